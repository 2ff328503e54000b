"""Reads in flight: how a slow disk or mount still feeds a fast trainer.

Reads from the page cache take microseconds, and the thread that makes the batch does them one after the other. A device that
answers after milliseconds is as fast as the number of questions it has been asked. So the time per read is watched, and where
it is long, rows are read by many threads, those of the coming steps too, since which rows they hold is known:

    answers after 6 µs      step 7: row row row row …
    answers after 10 ms     step 7: all rows at once,  step 8: all rows at once,  step 9: hints to the kernel

How many reads are in flight follows from the time per read: what it takes for a gigabyte per second, within limits.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import resource
import threading
import time
from collections.abc import Callable

import numpy as np

_TARGET_BYTES_PER_SECOND = 1e9
_SLOW_BYTES_PER_SECOND = 4e8
_SLOW_SECONDS = 5e-5
_MOST_THREADS = 256
_MOST_BYTES_AHEAD = 1 << 28
# Every so many steps that are read ahead, one row is read by itself.
_TRIAL_STEPS = 8


@dataclasses.dataclass
class _Flight:
  """The rows of a step that are being read."""

  ids: np.ndarray
  tokens: np.ndarray
  reads: list[concurrent.futures.Future]
  started: bool = False


class ReadAhead:
  """Reads the rows of steps, those of later ones ahead where reads are slow; safe for threads.

  Args:
    ids_of: Step → instance ids of its rows, -1 for padding; none past the end.
    buffer_of: Instance ids → an array to read into.
    read: Reads the rows of some ids into an array.
    hint: Tells the system that the rows of some ids will be read.
  """

  def __init__(
      self,
      ids_of: Callable[[int], np.ndarray],
      buffer_of: Callable[[np.ndarray], np.ndarray],
      read: Callable[[np.ndarray, np.ndarray], None],
      hint: Callable[[np.ndarray], None],
  ):
    self._ids_of = ids_of
    self._buffer_of = buffer_of
    self._read = read
    self._hint = hint
    self._lock = threading.Lock()
    self._flights: dict[int, _Flight] = {}
    self._last_step: int | None = None
    self._stride = 1
    self._seconds_per_read: float | None = None
    self._slow = False
    self._started = 0
    self._quick_trials = 0
    self._pool: concurrent.futures.ThreadPoolExecutor | None = None

  @property
  def in_flight(self) -> int:
    """Reads that have been asked for and not taken."""
    return sum(len(flight.reads) for flight in list(self._flights.values()))

  def take(self, step: int) -> tuple[np.ndarray, np.ndarray]:
    """The ids and the tokens of a step's rows."""
    with self._lock:
      self._note_stride(step)
      flight = self._flights.pop(step, None)
      if self._slow:
        flight = flight or self._start(self._prepare(self._ids_of(step)))
        self._forget_before(step)
        self._fill_up(step)
      elif flight is None:
        flight = self._prepare(self._ids_of(step))
    if not flight.started:
      self._read_and_judge(flight.ids, flight.tokens)
    for read in flight.reads:
      read.result()
    return flight.ids, flight.tokens

  def close(self) -> None:
    """Ends the threads, and drops what is in flight."""
    with self._lock:
      self._flights.clear()
      if self._pool is not None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = None

  def _read_and_judge(self, ids: np.ndarray, tokens: np.ndarray) -> None:
    """Reads rows one after the other, and judges by the time they took whether the source is slow."""
    rows = int((ids >= 0).sum())
    waits = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    seconds = self._timed_read(ids, tokens) / max(1, rows)
    # A busy machine makes reads slow too, by taking the processor away; only a thread that waits gives it up itself.
    waited = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - waits >= rows / 2
    if not rows or not waited:
      seconds = 0.0
    with self._lock:
      before = self._seconds_per_read
      self._seconds_per_read = seconds
      # The very first reads open files; where those of two batches are slow, it is the disk.
      self._slow = before is not None and min(before, seconds) > self._limit(tokens)

  def _timed_read(self, ids: np.ndarray, tokens: np.ndarray) -> float:
    began = time.perf_counter()
    self._read(ids, tokens)
    return time.perf_counter() - began

  def _limit(self, tokens: np.ndarray) -> float:
    return max(_SLOW_SECONDS, tokens[:1].nbytes / _SLOW_BYTES_PER_SECOND)

  def _try_whether_still_slow(
      self, ids: np.ndarray, tokens: np.ndarray
  ) -> concurrent.futures.Future:
    """Reads one row in this thread: the pages of a disk that was slow may be in the cache by now."""
    outcome: concurrent.futures.Future = concurrent.futures.Future()
    try:
      seconds = self._timed_read(ids, tokens)
    except (
        Exception
    ) as error:  # It belongs to the step that the row is of, which may never be asked for.
      outcome.set_exception(error)
      return outcome
    outcome.set_result(None)
    # Other threads are at work, so a read from the cache does not take microseconds here either.
    if seconds > 0.25 * (self._seconds_per_read or 0.0):
      self._quick_trials = 0
    else:
      self._quick_trials += 1
      if self._quick_trials == 2:
        self._slow, self._seconds_per_read, self._quick_trials = False, None, 0
    return outcome

  def _note_stride(self, step: int) -> None:
    """A worker process makes every W-th step; threads may ask for neighbours out of turn."""
    if self._last_step is not None and step > self._last_step:
      self._stride = step - self._last_step
    self._last_step = step

  def _fill_up(self, step: int) -> None:
    """Starts the reads of later steps until enough are in flight, and gives a hint of those of the one after."""
    for ahead in itertools.count(1):
      later = step + ahead * self._stride
      if later in self._flights:
        continue
      ids = self._ids_of(later)
      if not len(ids):
        return
      flight = self._prepare(ids)
      size = flight.tokens.nbytes
      enough = self.in_flight >= self._wanted_reads(size // len(ids))
      if enough or (len(self._flights) + 1) * size > _MOST_BYTES_AHEAD:
        self._hint(ids[ids >= 0])
        return
      self._flights[later] = self._start(flight)

  def _wanted_reads(self, row_bytes: int) -> int:
    seconds = self._seconds_per_read or 0.0
    return max(8, min(_MOST_THREADS, int(seconds * _TARGET_BYTES_PER_SECOND / row_bytes)))

  def _prepare(self, ids: np.ndarray) -> _Flight:
    return _Flight(ids, self._buffer_of(ids), [])

  def _start(self, flight: _Flight) -> _Flight:
    if self._pool is None:
      self._pool = concurrent.futures.ThreadPoolExecutor(_MOST_THREADS, "olmo-read")
    ids, tokens = flight.ids, flight.tokens
    tokens[ids < 0] = 0
    rows = np.flatnonzero(ids >= 0).tolist()
    self._started += 1
    if rows and self._started % _TRIAL_STEPS == 0:
      first = rows.pop(0)
      part = slice(first, first + 1)
      flight.reads.append(self._try_whether_still_slow(ids[part], tokens[part]))
    flight.reads += [self._pool.submit(self._read, ids[i : i + 1], tokens[i : i + 1]) for i in rows]
    flight.started = True
    return flight

  def _forget_before(self, step: int) -> None:
    """Drops steps that were left behind: whoever jumps elsewhere does not come back for them."""
    for old in [s for s in self._flights if s < step - 8 * self._stride]:
      del self._flights[old]
