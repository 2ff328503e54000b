"""A storage with latency, to measure how many reads are in flight."""

import threading
import time

from maxtext_olmo.corpus import storage as storage_lib


class SlowStorage(storage_lib.LocalStorage):
  """Local files that take a while for each range, as an object store does.

  Args:
    seconds: Latency of each range.
    wants_concurrency: What the method of the same name returns.

  Attributes:
    gather: Number of reads that must have been in flight at once before any continues; 0 waits for
      none.
    waiting: Number of calls of `fill` in flight.
    most_waiting: Largest number that was in flight at a time.
    ranges: Number of ranges read so far.
    calls: Number of calls of `fill` so far.
    on_fill: Called at the beginning of each call of `fill`.
  """

  def __init__(self, seconds: float = 0.003, wants_concurrency: int = 256):
    super().__init__()
    self.seconds = seconds
    self._wants_concurrency = wants_concurrency
    self.gather = self.waiting = self.most_waiting = self.ranges = self.calls = 0
    self.on_fill = lambda: None
    self._lock = threading.Condition()

  def __reduce__(self):
    return type(self), (self.seconds, self._wants_concurrency)

  def wants_concurrency(self, paths):
    del paths
    return self._wants_concurrency

  def pin(self, paths, sources):
    del paths, sources
    return None

  def fill(self, paths, sources, offsets, sizes, out, places):
    self.on_fill()
    with self._lock:
      self.calls += 1
      self.waiting += 1
      self.ranges += len(sources)
      self.most_waiting = max(self.most_waiting, self.waiting)
      self._lock.notify_all()
      if not self._lock.wait_for(lambda: self.most_waiting >= self.gather, timeout=60):
        raise AssertionError(f"{self.most_waiting} reads in flight at once, not {self.gather}.")
    if self.seconds:
      for _ in range(len(sources)):
        time.sleep(self.seconds)
    try:
      super().fill(paths, sources, offsets, sizes, out, places)
    finally:
      with self._lock:
        self.waiting -= 1
