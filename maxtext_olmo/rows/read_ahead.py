"""Read-ahead: many reads in flight, for storage with high latency.

Reads from the page cache take microseconds, and the thread that makes a batch does them itself. If
reads take milliseconds, throughput grows with the number of reads in flight. The parts of coming
steps are known, so their reads are started too:

    step 7 is being made      in flight: parts of steps 7, 8, 9, 10, in this order

A storage that wants concurrency is read ahead from the first step, a local file system after two
slow batches.
"""

from __future__ import annotations

import collections
import concurrent.futures
import itertools
import resource
import sys
import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from maxtext_olmo.rows import parts as parts_lib
from maxtext_olmo.rows import reader as reader_lib

_STEPS_AHEAD = 4
_MAX_THREADS = 256
_MAX_BYTES_AHEAD = 1 << 28
# A local batch that takes longer than this, and waits for at least half of its parts, is slow.
SLOW_SECONDS_PER_PART = 1e-4
_SLOW_BATCHES = 2
_FIRST_STEPS_AHEAD = 64


class PendingBatch(NamedTuple):
  """A batch whose parts are being read."""

  parts: parts_lib.Parts
  out: np.ndarray
  reads: list[concurrent.futures.Future]

  def wait(self) -> None:
    """Waits for all reads; raises the error of the first one that failed."""
    for read in self.reads:
      read.result()


class ReadAhead:
  """Reads the parts of steps, and those of coming steps in advance; thread-safe.

  Args:
    reader: Reads the parts.
    prepare: Returns the parts of a step and an array to read them into; None past the end.

  Attributes:
    holds_batches: Whether coming batches may be in memory; `close` frees them.
  """

  def __init__(
      self,
      reader: reader_lib.Reader,
      prepare: Callable[[int], tuple[parts_lib.Parts, np.ndarray] | None],
  ):
    self._reader = reader
    self._prepare = prepare
    self._lock = threading.Lock()
    self._pending: dict[int, PendingBatch] = {}
    self._recent: collections.deque[int] = collections.deque(maxlen=4)
    self._pool: concurrent.futures.ThreadPoolExecutor | None = None
    self.holds_batches = False

  def take(self, step: int) -> np.ndarray:
    """Returns the array of a step once it has been read; starts the reads of coming steps."""
    with self._lock:
      self.holds_batches = True
      self._recent.append(step)
      batch = self._pending.pop(step, None) or self._start(step)
      stride = self._stride()
      for other in [s for s in self._pending if not step - 8 * stride <= s <= step + 16 * stride]:
        del self._pending[other]  # The caller has jumped to other steps.
      held = sum(pending.out.nbytes for pending in self._pending.values())
      for coming in range(step + stride, step + (_STEPS_AHEAD + 1) * stride, stride):
        if coming in self._pending or held + batch.out.nbytes > _MAX_BYTES_AHEAD:
          continue
        pending = self._start(coming)
        held += pending.out.nbytes
        self._pending[coming] = pending
    batch.wait()
    return batch.out

  def close(self, *, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
    """Drops pending batches and stops the threads."""
    with self._lock:
      self.holds_batches = False
      self._pending.clear()
      # At interpreter exit, the threads have ended and the names of modules may be gone.
      if self._pool is not None and not finalizing():
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = None

  def _start(self, step: int) -> PendingBatch:
    prepared = self._prepare(step)
    if prepared is None:
      nothing = parts_lib.Parts.of_rows([])
      return PendingBatch(nothing, np.zeros((0, 0), np.uint8), [])
    parts, out = prepared
    if self._pool is None:
      self._pool = concurrent.futures.ThreadPoolExecutor(_MAX_THREADS, "olmo-read")
    fill = self._reader.filler(parts, out)
    pool = self._pool
    reads = [pool.submit(fill, slice(i, i + 1)) for i in range(len(parts.source))]
    return PendingBatch(parts, out, reads)

  def _stride(self) -> int:
    """Returns the distance between requested steps: a worker process makes every n-th one."""
    recent = sorted(set(self._recent))
    return min((b - a for a, b in itertools.pairwise(recent)), default=1)


class LocalReads:
  """Decides which steps of a local file system are read ahead: those after two slow batches.

  Reading ahead ends after some steps, in case the pages are in the cache by then. If batches are
  still slow, it lasts twice as long the next time.

  Attributes:
    slow_batches: The number of slow batches in a row so far.
    ahead_until: Steps before this one are read ahead.
  """

  def __init__(self):
    self.slow_batches = 0
    self.ahead_until = -1
    self._steps_ahead = _FIRST_STEPS_AHEAD

  def slow_batch(self, step: int, waits: int, parts: int) -> None:
    """Records a batch that took long.

    Args:
      step: The step.
      waits: Number of voluntary context switches of its thread. On a busy machine all reads are
        slow, but only a thread that waits for a disk yields the processor.
      parts: The number of parts it read.
    """
    self.slow_batches = self.slow_batches + 1 if waits >= parts / 2 else 0
    if self.slow_batches >= _SLOW_BATCHES:
      self.ahead_until = step + self._steps_ahead
      self._steps_ahead *= 2


def waits_of_thread() -> int:
  """Returns the number of voluntary context switches of the calling thread."""
  return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
