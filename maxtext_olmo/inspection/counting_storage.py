"""A storage that counts what a host would request, and reads nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from maxtext_olmo.corpus import storage as storage_lib
from maxtext_olmo.corpus import urls
from maxtext_olmo.corpus.storage import ranges
from maxtext_olmo.errors import CorpusError


class CountingStorage:
  """Knows the sizes of files, and counts reads; thread-safe.

  A range of a local file is one read. Ranges of objects are joined into requests by the code that
  joins them for a real store.

  Args:
    sizes: Size of each file, by path.

  Attributes:
    sizes_asked: Number of calls of `size`: a `stat` of a file, or a HEAD request for an object.
    reads: Number of reads of local files.
    requests: Number of requests to object stores.
    bytes: Number of bytes to read.
    unversioned: Objects whose ETag the index does not know.
  """

  def __init__(self, sizes: Mapping[str, int]):
    self._sizes = dict(sizes)
    self._lock = threading.Lock()
    self.sizes_asked = self.reads = self.requests = self.bytes = 0
    self.unversioned: set[str] = set()

  def wants_concurrency(self, paths: Sequence[str]) -> bool:
    """Returns whether one of the paths is a URL."""
    return any(urls.is_url(path) for path in paths)

  def expect(self, path: str, size: int, etag: str | None = None) -> None:
    """Notes an object without an ETag."""
    del size
    if etag is None:
      self.unversioned.add(path)

  def size(self, path: str) -> int:
    """Returns the size of a file, and counts the call."""
    with self._lock:
      self.sizes_asked += 1
    return self._sizes[path]

  def exists(self, path: str) -> bool:
    """Returns whether the size of a file is known."""
    return path in self._sizes

  def read(self, path: str, offset: int = 0, size: int | None = None) -> bytes:
    """Raises CorpusError: there is nothing to read."""
    raise CorpusError(f"{path} cannot be read: a storage that only counts has no bytes.")

  def pieces(
      self, path: str, offset: int = 0, size: int | None = None, piece_bytes: int = 1
  ) -> Iterator[bytes]:
    """Raises CorpusError: there is nothing to read."""
    raise CorpusError(f"{path} cannot be read: a storage that only counts has no bytes.")

  def fill(
      self,
      paths: Sequence[str],
      sources: np.ndarray,
      offsets: np.ndarray,
      sizes: np.ndarray,
      out: np.ndarray,
      places: np.ndarray,
  ) -> None:
    """Counts the ranges, and leaves `out` as it is."""
    ranges.check_output(out, sizes, places)
    remote = np.array([urls.is_url(paths[source]) for source in sources.tolist()], np.bool_)
    requests = ranges.plan_requests(sources[remote], offsets[remote], sizes[remote], places[remote])
    with self._lock:
      self.reads += int((sizes[~remote] > 0).sum())
      self.requests += len(requests)
      self.bytes += int(sizes.sum())

  def pin(self, paths: Sequence[str], sources: np.ndarray) -> storage_lib.Pinned | None:
    """Returns None: no file is open."""
    del paths, sources
    return None

  def close(self) -> None:
    """Does nothing: no file is open."""
