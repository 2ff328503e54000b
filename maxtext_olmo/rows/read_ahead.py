"""Read-ahead: many reads in flight, for storage with high latency.

Reads from the page cache take microseconds, and the thread that makes a batch does these reads
itself. If reads take milliseconds, throughput grows with the number of reads in flight. The parts
of upcoming steps are known, so their reads are started too:

    step 7 is being made      in flight: parts of steps 7, 8, 9, 10, in this order

An object store is read ahead from the first step. The storage class reads the parts of a step in
parallel, so a step is one call. The number of steps read ahead follows the trainer's observed pace,
so that each step arrives before it is needed. It is limited by the number of reads that the storage
wants in flight: reads of further steps would only queue, and their batches would leave the caches
before they are used. A local file system is read ahead only after two slow batches, with one call
per part.
"""

from __future__ import annotations

import collections
import concurrent.futures
import itertools
import math
import resource
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from maxtext_olmo.rows import parts as parts_lib
from maxtext_olmo.rows import reader as reader_lib

_STEPS_AHEAD = 4
_MAX_STEPS_AHEAD = 32
_MAX_THREADS = 256
_MAX_BYTES_AHEAD = 1 << 28
# A local batch is slow if it takes longer than this per part, and waits for at least half of its
# parts.
SLOW_SECONDS_PER_PART = 1e-4
_SLOW_BATCHES = 2
_FIRST_STEPS_AHEAD = 64


def max_steps_ahead(batch_bytes: int) -> int:
  """Returns how many steps may be in memory ahead of the trainer, if reads are slow.

  Args:
    batch_bytes: The size of the tokens that this host reads per step.
  """
  return min(_MAX_STEPS_AHEAD, _MAX_BYTES_AHEAD // max(1, batch_bytes))


def wanted_steps_ahead(latency: float, interval: float) -> int:
  """Returns how many steps to read ahead, so that each has arrived when it is taken.

  Args:
    latency: Seconds to read a step.
    interval: Seconds between two steps of the trainer.
  """
  return math.ceil(1.5 * latency / interval) + 1


class PendingBatch(NamedTuple):
  """A batch whose parts are being read."""

  parts: parts_lib.Parts
  out: np.ndarray
  reads: list[concurrent.futures.Future]

  def wait(self) -> None:
    """Waits for all reads; raises the error of the first read that failed."""
    for read in self.reads:
      read.result()


class ReadAhead:
  """Reads the parts of steps, and reads upcoming steps in advance; thread-safe.

  Args:
    reader: Reader of the parts.
    prepare: Function that returns the parts of a step and an array to read them into; None past the
      end.

  Attributes:
    holds_batches: Whether upcoming batches may be in memory; `close` frees them.
    frontier: The last step whose reads have been started; -1 before the first.
  """

  def __init__(
      self,
      reader: reader_lib.Reader,
      prepare: Callable[[int], tuple[parts_lib.Parts, np.ndarray] | None],
  ):
    self._reader = reader
    self._prepare = prepare
    self._parallel_fill = reader.wants_concurrency > 0
    self._distance = _Distance()
    self._lock = threading.Lock()
    self._pending: dict[int, PendingBatch] = {}
    self._recent: collections.deque[int] = collections.deque(maxlen=4)
    self._pool: concurrent.futures.ThreadPoolExecutor | None = None
    self.holds_batches = False
    self.frontier = -1

  def take(self, step: int) -> np.ndarray:
    """Returns the array of a step once it has been read; starts reading later steps."""
    with self._lock:
      self.holds_batches = True
      self._recent.append(step)
      batch = self._pending.pop(step, None)
      was_pending = batch is not None
      batch = batch or self._start(step)
      self._distance.taken(step // self._stride())
      if was_pending or not self._parallel_fill:
        self._start_coming(step, batch)
    batch.wait()
    if not was_pending and self._parallel_fill:
      # At the start and after a jump, later steps are requested only now, because earlier requests
      # would have delayed this step.
      with self._lock:
        if len(self._recent) > 1:  # After one request, the distance between steps is unknown.
          self._start_coming(step, batch)
    return batch.out

  def close(self, *, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
    """Drops pending batches and stops the threads."""
    with self._lock:
      self.holds_batches = False
      self._pending.clear()
      # At interpreter exit, the threads have ended, and globals of modules may be gone.
      if self._pool is not None and not finalizing():
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = None

  def _start_coming(self, step: int, batch: PendingBatch) -> None:
    """Starts the reads of the steps after `step`, as far as the storage and memory allow."""
    if not self.holds_batches:
      return  # `close` was called meanwhile.
    stride = self._stride()
    nbytes, ahead = batch.out.nbytes, _STEPS_AHEAD
    if self._parallel_fill:
      # Twice as many reads as may be in flight, so that the storage never runs out of them.
      reads = 2 * self._reader.wants_concurrency
      ahead = min(self._distance.steps, 2 + reads // max(1, len(batch.parts.source)))
    reach = max(16, _MAX_STEPS_AHEAD) * stride
    for other in [s for s in self._pending if not step - 8 * stride <= s <= step + reach]:
      del self._pending[other]  # The caller has jumped to other steps.
    held = sum(pending.out.nbytes for pending in self._pending.values())
    for coming in range(step + stride, step + (ahead + 1) * stride, stride):
      if coming in self._pending:
        continue
      if held + nbytes > _MAX_BYTES_AHEAD:
        break
      pending = self._start(coming)
      held += pending.out.nbytes
      self._pending[coming] = pending

  def _start(self, step: int) -> PendingBatch:
    prepared = self._prepare(step)
    if prepared is None:
      nothing = parts_lib.Parts.of_rows([])
      return PendingBatch(nothing, np.zeros((0, 0), np.uint8), [])
    self.frontier = max(self.frontier, step)
    parts, out = prepared
    fill = self._reader.filler(parts, out)
    if self._pool is None:
      threads = 2 * _MAX_STEPS_AHEAD if self._parallel_fill else _MAX_THREADS
      self._pool = concurrent.futures.ThreadPoolExecutor(threads, "olmo-read")
    pool = self._pool
    if self._parallel_fill:
      reads = [pool.submit(self._distance.measure, fill)] if len(parts.source) else []
    else:
      reads = [pool.submit(fill, slice(i, i + 1)) for i in range(len(parts.source))]
    return PendingBatch(parts, out, reads)

  def _stride(self) -> int:
    """Returns the distance between requested steps, which is n in each of n worker processes."""
    recent = sorted(set(self._recent))
    return min((b - a for a, b in itertools.pairwise(recent)), default=1)


class _Distance:
  """Decides how many steps to read ahead: as many as the trainer takes while one step is read.

  While the trainer waits for reads, its own pace cannot be observed. The distance then grows by one
  at each step, until the trainer no longer waits.

  Attributes:
    steps: The number of steps.
  """

  def __init__(self) -> None:
    self.steps = _STEPS_AHEAD
    self._last: tuple[int, float] | None = None
    self._interval = 0.0  # Mean seconds between two calls of `taken`, per step.
    self._latency = 0.0  # Mean seconds to read a step.

  def taken(self, number: int) -> None:
    """Records that a batch is taken, and updates `steps`."""
    now = time.perf_counter()
    if self._last is not None and number > self._last[0]:
      interval = (now - self._last[1]) / (number - self._last[0])
      self._interval = _mean(self._interval, interval)
      if self._latency and self._interval:
        wanted = wanted_steps_ahead(self._latency, self._interval)
        self.steps = min(_MAX_STEPS_AHEAD, max(2, min(wanted, self.steps + 1)))
    self._last = (number, now)

  def measure(self, fill: Callable[[slice], None]) -> None:
    """Reads a step, and records how long the read takes."""
    began = time.perf_counter()
    fill(slice(None))
    self._latency = _mean(self._latency, time.perf_counter() - began)


def _mean(mean: float, value: float) -> float:
  """Returns a moving mean over about 8 values."""
  return mean + (value - mean) / 8 if mean else value


class LocalReads:
  """Decides which steps are read ahead from a local file system: the steps after two slow batches.

  Reading ahead ends after a number of steps, in case the page cache holds the files by then. If
  batches are still slow, the next read-ahead lasts twice as long.

  Attributes:
    slow_batches: Number of consecutive slow batches so far.
    ahead_until: Steps before this one are read ahead.
  """

  def __init__(self):
    self.slow_batches = 0
    self.ahead_until = -1
    self._steps_ahead = _FIRST_STEPS_AHEAD

  def slow_batch(self, step: int, waits: int, parts: int) -> None:
    """Records a batch that took a long time.

    Args:
      step: Step of the batch.
      waits: Number of voluntary context switches of the reading thread. On a busy machine all reads
        are slow, but only a thread that waits for a disk yields the processor.
      parts: Number of parts of the batch.
    """
    self.slow_batches = self.slow_batches + 1 if waits >= parts / 2 else 0
    if self.slow_batches >= _SLOW_BATCHES:
      self.ahead_until = step + self._steps_ahead
      self._steps_ahead *= 2


def waits_of_thread() -> int:
  """Returns the number of voluntary context switches of the calling thread."""
  return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
