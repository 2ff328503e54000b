"""A storage whose files are in memory, so that tests notice reads that bypass the storage."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from maxtext_olmo.corpus import storage as storage_lib
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.errors import MissingFileError


class MemoryStorage:
  """Files by path; has no descriptors, and wants concurrency as a remote store does.

  Args:
    files: path → content.
  """

  def __init__(self, files: Mapping[str, bytes]):
    self.files = dict(files)

  def __reduce__(self) -> tuple:
    return type(self), (self.files,)

  def wants_concurrency(self, paths: Sequence[str]) -> int:
    return 16

  def expect(self, path: str, size: int, etag: str | None = None) -> None:
    pass

  def size(self, path: str) -> int:
    return len(self._content(path))

  def exists(self, path: str) -> bool:
    return path in self.files

  def read(self, path: str, offset: int = 0, size: int | None = None) -> bytes:
    content = self._content(path)
    end = len(content) if size is None else offset + size
    if end > len(content):
      raise CorpusError(
          f"{path} is too short: expected bytes {offset} to {end}, but it ends at byte"
          f" {len(content)}."
      )
    return content[offset:end]

  def pieces(
      self, path: str, offset: int = 0, size: int | None = None, piece_bytes: int = 16 << 20
  ) -> Iterator[bytes]:
    data = self.read(path, offset, size)
    for start in range(0, len(data), piece_bytes):
      yield data[start : start + piece_bytes]

  def fill(
      self,
      paths: Sequence[str],
      sources: np.ndarray,
      offsets: np.ndarray,
      sizes: np.ndarray,
      out: np.ndarray,
      places: np.ndarray,
  ) -> None:
    ranges = zip(sources.tolist(), offsets.tolist(), sizes.tolist(), places.tolist())
    for source, offset, size, place in ranges:
      data = self.read(paths[source], offset, size)
      out[place : place + size] = np.frombuffer(data, np.uint8)

  def pin(self, paths: Sequence[str], sources: np.ndarray) -> storage_lib.Pinned | None:
    return None

  def _content(self, path: str) -> bytes:
    if path not in self.files:
      raise MissingFileError(f"There is no {path} in this storage.")
    return self.files[path]

  def close(self):
    """Does nothing: no file is open."""
