"""A storage in memory that counts the ranges it is asked for, and can fail or wait."""

import collections
import threading

from maxtext_olmo.errors import CorpusError
from tests import memory_storage


class CountingStorage(memory_storage.MemoryStorage):
  """Files in memory with versions, as an object store has them.

  Args:
    files: path → content.
    versions: path → version; a file without one has the version "v1".

  Attributes:
    requests: How often each range (path, offset, size) was read.
    working: Reads wait until it is set.
    fails: Whether reads raise an error.
    in_flight: Ranges of the calls that are waiting or being read.
  """

  def __init__(self, files, versions=None):
    super().__init__(files)
    self.versions = versions or {}
    self.requests = collections.Counter()
    self.working = threading.Event()
    self.working.set()
    self.fails = False
    self.in_flight = 0
    self._lock = threading.Lock()

  def __reduce__(self):
    return type(self), (self.files, self.versions)

  def version(self, path):
    return self.versions.get(path, "v1")

  def fill(self, paths, sources, offsets, sizes, out, places):
    with self._lock:
      self.in_flight += len(sources)
      for source, offset, size in zip(sources.tolist(), offsets.tolist(), sizes.tolist()):
        self.requests[paths[source], offset, size] += 1
    try:
      self.working.wait()
      if self.fails:
        raise CorpusError("The store is broken.")
      super().fill(paths, sources, offsets, sizes, out, places)
    finally:
      with self._lock:
        self.in_flight -= len(sources)

  @property
  def total(self):
    """The number of ranges read so far."""
    return sum(self.requests.values())
