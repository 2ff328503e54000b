"""The token files of a corpus in the form that readers need: paths, offsets and dtype."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from maxtext_olmo.corpus import paths as paths_lib
from maxtext_olmo.corpus.index import OlmoNpyIndex
from maxtext_olmo.corpus.storage import LocalStorage
from maxtext_olmo.corpus.storage import Storage


@dataclasses.dataclass(frozen=True, eq=False)
class TokenFiles:
  """Token files by number, and the storage they are read from.

  Attributes:
    paths: Full paths, remapped for this machine.
    data_offsets: Byte offset of the first token of each file (int64).
    dtype: Dtype of the tokens.
    storage: Storage that holds the files.
  """

  paths: tuple[str, ...]
  data_offsets: np.ndarray
  dtype: np.dtype
  storage: Storage

  @classmethod
  def of_index(
      cls,
      index: OlmoNpyIndex,
      *,
      path_remap: Mapping[str, str] | None = None,
      storage: Storage | None = None,
      max_open_files: int | None = None,
  ) -> TokenFiles:
    """Returns the files of an index, without opening them.

    Args:
      index: Index of the corpus.
      path_remap: prefix → replacement, for paths that begin differently on this machine; the
        longest matching prefix applies.
      storage: Storage that holds the files; local files by default.
      max_open_files: Number of files that stay open per process if no `storage` is given; None
        keeps as many open as the process can spare.
    """
    count = len(index.files)
    return cls(
        paths=tuple(paths_lib.remap(index.resolve(i), path_remap) for i in range(count)),
        data_offsets=np.array([entry.data_offset for entry in index.files], np.int64),
        dtype=index.token_dtype,
        storage=LocalStorage(max_open_files) if storage is None else storage,
    )

  def byte_range(self, source: int, first: int, count: int) -> tuple[int, int]:
    """Returns the bounds [start, end) in bytes of a range of tokens of a file."""
    start = int(self.data_offsets[source]) + first * self.dtype.itemsize
    return start, start + count * self.dtype.itemsize

  def ranges(
      self, sources: np.ndarray, firsts: np.ndarray, counts: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns the offsets and sizes in bytes of ranges of tokens (int64)."""
    width = self.dtype.itemsize
    return self.data_offsets[sources] + firsts * width, counts.astype(np.int64) * width

  def where(self, source: int, token: int) -> str:
    """Returns the file and the byte offset of a token, for messages."""
    return f"{self.paths[source]}, byte {self.byte_range(source, token, 1)[0]}"
