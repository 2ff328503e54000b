"""Instance id → tokens: a Grain data source, and a batched read that fills one array."""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import grain
import numpy as np

from maxtext_olmo.corpus import paths
from maxtext_olmo.corpus.index_builder import OlmoNpyIndex
from maxtext_olmo.corpus.index_builder import global_to_local
from maxtext_olmo.corpus.storage.local import LocalStorage
from maxtext_olmo.corpus.storage.local import Storage
from maxtext_olmo.corpus.storage.open_files import OpenRows


class OlmoNpyDataSource(grain.sources.RandomAccessDataSource):
  """The instances of a corpus, by id; safe to use from several threads, to pickle and to fork."""

  def __init__(
      self,
      index: OlmoNpyIndex,
      *,
      path_remap: Mapping[str, str] | None = None,
      max_open_files: int | None = None,
      storage: Storage | None = None,
  ):
    """Opens nothing yet.

    Args:
      path_remap: prefix → replacement, for full paths that begin otherwise on this machine; the
        longest prefix decides.
      max_open_files: how many files stay open in a process, where no `storage` is given; None for as many
        as the process can spare.
      storage: where the files are read from; the local file system unless given.
    """
    self._index = index
    self._path_remap = dict(path_remap or {})
    self._storage = LocalStorage(max_open_files) if storage is None else storage
    self._paths = self._full_paths()

  @property
  def index(self) -> OlmoNpyIndex:
    """The index that says which instance lies where."""
    return self._index

  @property
  def dtype(self) -> np.dtype:
    """Of the tokens."""
    return self._index.token_dtype

  def __len__(self) -> int:
    return self._index.total_instances

  def __getitem__(self, instance_id: int) -> dict[str, Any]:
    instance_id = operator.index(instance_id)
    tokens = self.read(np.array([instance_id]))[0]
    file_id, _ = global_to_local(self._index, instance_id)
    return {"tokens": tokens, "instance_id": instance_id, "file_id": file_id}

  def read(self, instance_ids: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """The tokens of many instances, one row each, in the dtype of the files.

    Args:
      out: an array to fill and return, in C order, so that no memory is allocated.
    """
    file_ids, offsets = self._index.locate(instance_ids)
    shape, dtype = (len(file_ids), self._index.sequence_length), self._index.token_dtype
    if out is None:
      out = np.empty(shape, dtype)
    elif out.shape != shape or out.dtype != dtype or not out.flags.c_contiguous:
      raise ValueError(
          f"`out` must be a C-ordered array of {dtype.name} with shape {shape}, got"
          f" {out.dtype.name} with shape {out.shape}."
      )
    self._storage.fill(self._paths, file_ids, offsets, out.view(np.uint8))
    return out

  def row_reader(self, instance_ids: np.ndarray, out: np.ndarray) -> Callable[[int], None]:
    """What reads one of the rows that `read` would, by its number: where all of them lie is found here, at once."""
    file_ids, offsets = self._index.locate(instance_ids)
    storage, full_paths, rows = self._storage, self._paths, out.view(np.uint8)

    def read_row(row: int) -> None:
      here = slice(row, row + 1)
      storage.fill(full_paths, file_ids[here], offsets[here], rows[here])

    return read_row

  def locate(self, instance_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The files (int64 ids) and the byte offsets in them (int64) where instances begin."""
    return self._index.locate(instance_ids)

  def open_rows(self, file_ids: np.ndarray) -> OpenRows | None:
    """Open files to read rows from, for code that does it by itself; None where it must use `read`."""
    # Another storage, and one derived from this, may do more than read.
    if type(self._storage) is not LocalStorage:
      return None
    return self._storage.open_rows(self._paths, file_ids)

  def hint(self, instance_ids: np.ndarray) -> None:
    """Tells the storage that these instances will be read soon."""
    file_ids, offsets = self._index.locate(instance_ids)
    size = self._index.sequence_length * self.dtype.itemsize
    self._storage.hint(self._paths, file_ids, offsets, size)

  def where(self, instance_id: int, column: int = 0) -> str:
    """The file and the byte of a token, for messages."""
    file_ids, offsets = self._index.locate(np.array([instance_id]))
    byte = int(offsets[0]) + column * self._index.token_dtype.itemsize
    return f"{self._paths[int(file_ids[0])]}, byte {byte}"

  def __repr__(self) -> str:
    """The same for the same stream, wherever it is mounted: Grain compares it on restoring."""
    return (
        f"OlmoNpyDataSource(fingerprint={self._index.fingerprint!r},"
        f" sequence_length={self._index.sequence_length}, dtype={self._index.dtype!r})"
    )

  def __getstate__(self) -> dict[str, Any]:
    state = self.__dict__.copy()
    del state["_paths"]  # Derived, and as long as the index itself.
    return state

  def __setstate__(self, state: dict[str, Any]) -> None:
    self.__dict__.update(state)
    self._paths = self._full_paths()

  def _full_paths(self) -> list[str]:
    count = len(self._index.files)
    return [paths.remap(self._index.resolve(i), self._path_remap) for i in range(count)]
