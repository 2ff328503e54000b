"""The token files of a corpus in the form that readers need: paths, offsets and dtype."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from maxtext_olmo.corpus import paths as paths_lib
from maxtext_olmo.corpus.index import OlmoNpyIndex
from maxtext_olmo.corpus.storage import Storage
from maxtext_olmo.corpus.storage import narrowed
from maxtext_olmo.corpus.storage import open_storage


@dataclasses.dataclass(frozen=True, eq=False)
class TokenFiles:
  """Token files by number, and the storage they are read from.

  Attributes:
    paths: Full paths, remapped for this machine.
    data_offsets: Byte offset of the first token of each file (int64).
    dtype: Dtype of the tokens.
    storage: Storage that holds the files.
    expected_sizes: Sizes in bytes (int64) that the index recorded; None without an index.
  """

  paths: tuple[str, ...]
  data_offsets: np.ndarray
  dtype: np.dtype
  storage: Storage
  expected_sizes: np.ndarray | None = None

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

    For each object in a store, tells the storage which size to expect, and also which ETag if the
    index recorded one for the same URL.

    Args:
      index: Index of the corpus.
      path_remap: prefix → replacement, for paths that begin differently on this machine; the
        longest matching prefix applies.
      storage: Storage that holds the files; `open_storage()` by default.
      max_open_files: Number of files that stay open per process if no `storage` is given; None
        keeps as many open as the process can spare.
    """
    if storage is None:
      storage = open_storage(max_open_files=max_open_files)
    paths = []
    for i, entry in enumerate(index.files):
      full = index.resolve(i)
      path = paths_lib.remap(full, path_remap)
      if paths_lib.is_url(path):
        storage.expect(path, index.expected_size(i), entry.etag if path == full else None)
      paths.append(path)
    return cls(
        paths=tuple(paths),
        data_offsets=np.array([entry.data_offset for entry in index.files], np.int64),
        dtype=index.token_dtype,
        storage=narrowed(storage, paths),
        expected_sizes=np.array(
            [index.expected_size(i) for i in range(len(index.files))], np.int64
        ),
    )

  def size(self, source: int) -> int:
    """Returns the size of a file in bytes; sends no request for an object of an index.

    Every read of such an object checks that it has the size in the index.
    """
    path = self.paths[source]
    if self.expected_sizes is not None and paths_lib.is_url(path):
      return int(self.expected_sizes[source])
    return self.storage.size(path)

  def byte_range(self, source: int, first: int, count: int) -> tuple[int, int]:
    """Returns the byte bounds [start, end) of a token range of a file."""
    start = int(self.data_offsets[source]) + first * self.dtype.itemsize
    return start, start + count * self.dtype.itemsize

  def ranges(
      self, sources: np.ndarray, firsts: np.ndarray, counts: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns the byte offsets and byte sizes of token ranges (int64)."""
    width = self.dtype.itemsize
    return self.data_offsets[sources] + firsts * width, counts.astype(np.int64) * width

  def where(self, source: int, token: int) -> str:
    """Returns the file and the byte offset of a token, for messages."""
    return f"{self.paths[source]}, byte {self.byte_range(source, token, 1)[0]}"
