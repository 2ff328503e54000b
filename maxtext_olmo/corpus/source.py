"""Instance id → tokens: a Grain data source, and a batched read that fills one array."""

import operator
from collections.abc import Mapping
from typing import Any

import grain
import numpy as np

from maxtext_olmo.corpus.index import OlmoNpyIndex
from maxtext_olmo.corpus.index import global_to_local
from maxtext_olmo.corpus.storage import Storage
from maxtext_olmo.corpus.token_files import TokenFiles


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
      path_remap: prefix → replacement, for full paths that begin differently on this machine; the
        longest matching prefix applies.
      max_open_files: how many files stay open in a process where no `storage` is given; None for
        as many as the process can spare.
      storage: where the files are read from; the local file system unless given.
    """
    self._index = index
    self._path_remap = dict(path_remap or {})
    self._files = TokenFiles.of_index(
        index, path_remap=path_remap, storage=storage, max_open_files=max_open_files
    )

  @property
  def index(self) -> OlmoNpyIndex:
    """The index of the corpus."""
    return self._index

  @property
  def files(self) -> TokenFiles:
    """The token files, and the storage they are read from."""
    return self._files

  @property
  def dtype(self) -> np.dtype:
    """The dtype of the tokens."""
    return self._index.token_dtype

  def __len__(self) -> int:
    return self._index.total_instances

  def __getitem__(self, instance_id: int) -> dict[str, Any]:
    instance_id = operator.index(instance_id)
    tokens = self.read(np.array([instance_id]))[0]
    file_id, _ = global_to_local(self._index, instance_id)
    return {"tokens": tokens, "instance_id": instance_id, "file_id": file_id}

  def read(self, instance_ids: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Returns the tokens of many instances, one row each, in the dtype of the files.

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
    raw = out.reshape(-1).view(np.uint8)
    sizes = np.full(len(file_ids), shape[1] * dtype.itemsize, np.int64)
    places = np.arange(len(file_ids)) * sizes
    self._files.storage.fill(self._files.paths, file_ids, offsets, sizes, raw, places)
    return out

  def locate(self, instance_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the file (int64 id) and the byte offset in it (int64) where each instance begins."""
    return self._index.locate(instance_ids)

  def where(self, instance_id: int, column: int = 0) -> str:
    """Returns the file and the byte of a token, for messages."""
    file_ids, offsets = self._index.locate(np.array([instance_id]))
    byte = int(offsets[0]) + column * self._index.token_dtype.itemsize
    return f"{self._files.paths[int(file_ids[0])]}, byte {byte}"

  def __repr__(self) -> str:
    """Equal for equal streams on any mount: Grain compares it when it restores a state."""
    return (
        f"OlmoNpyDataSource(fingerprint={self._index.fingerprint!r},"
        f" sequence_length={self._index.sequence_length}, dtype={self._index.dtype!r})"
    )

  def __getstate__(self) -> dict[str, Any]:
    # The paths are derived from the index, and take as many bytes as it does.
    state = self.__dict__.copy()
    state["_files"] = self._files.storage
    return state

  def __setstate__(self, state: dict[str, Any]) -> None:
    self.__dict__.update(state)
    self._files = TokenFiles.of_index(
        self._index, path_remap=self._path_remap, storage=state["_files"]
    )
