"""Reads in flight: how a slow disk or mount still feeds a fast trainer.

Reads from the page cache take microseconds, and the thread that makes the batch does them, alone or with a few helpers. A device that
answers later is as fast as the number of questions it has been asked. So the time per read is watched, and where it is long, the
rows of coming steps are asked for too, since which ones they hold is known:

    answers after 6 µs      step 7: row row row row …
    answers after 100 µs    hints to the kernel for steps 8 and 9, which read in the background,  step 7: row row row row …
    answers after 10 ms     steps 7, 8, 9, 10: all rows at once,  step 11: waits for a thread,  step 12: hints to the kernel

Hints cost next to nothing and suffice for a disk of this machine. Where reads take no less time for them, or a millisecond and
more, many threads read.

How many reads are in flight follows from the time per read: what it takes for a gigabyte per second, but for no more reads than one
interpreter can attend to, and at most 256. Two batches more than that are queued, so that a thread that has read a row finds the
next one. That bounds the memory: 256 rows and three batches, and never more than 256 MiB beside the batch that is asked for.
"""

from __future__ import annotations

import collections
import itertools
import resource
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from maxtext_olmo.rows import flights

_TARGET_BYTES_PER_SECOND = 1e9
# A read costs the interpreter some 30 µs around the wait; more threads than it has time for only get into each other's way.
_TARGET_READS_PER_SECOND = 2e4
_SLOW_BYTES_PER_SECOND = 4e8
_SLOW_SECONDS = 5e-5
# From here on it is a mount and not a disk.
_VERY_SLOW_SECONDS = 1e-3
_STEPS_HINTED = 2
# Every so many steps, one goes without a hint, to see whether the pages are in the cache by now.
_TRIAL_STEPS = 64
_MOST_THREADS = 256
_MOST_BYTES_AHEAD = 1 << 28
_BATCHES_QUEUED = 2
# What a read from the cache takes at most where others are at work, and how many such steps in a row mean that the source is not
# slow any more.
_QUICK_SECONDS = 1e-4
_QUICK_STEPS = 4


class ReadAhead:
  """Reads the rows of steps, those of later ones ahead where reads are slow; safe for threads.

  Args:
    ids_of: Step → instance ids of its rows, -1 for padding; none past the end.
    buffer_of: Instance ids → an array to read into.
    read: Reads the rows of a step into an array; what it gives is passed on. If that says `threads`, so many did it together.
    row_reader: Ids and an array → what reads one of the rows, by its number.
    hint: Tells the system that the rows of some ids will be read.
  """

  def __init__(
      self,
      ids_of: Callable[[int], np.ndarray],
      buffer_of: Callable[[np.ndarray], np.ndarray],
      read: Callable[[int, np.ndarray], Any],
      row_reader: Callable[[np.ndarray, np.ndarray], Callable[[int], object]],
      hint: Callable[[np.ndarray], None],
  ):
    self._ids_of = ids_of
    self._buffer_of = buffer_of
    self._read = read
    self._row_reader = row_reader
    self._hint = hint
    self._lock = threading.Lock()
    self._flights: dict[int, flights.Flight] = {}
    self._recent: collections.deque[int] = collections.deque(maxlen=4)
    # Of a read by itself, and of one among others where that turned out to take longer.
    self._seconds_per_read: float | None = None
    self._seconds_in_flight = 0.0
    self._hinting = False
    self._hinted: set[int] = set()
    self._vain_hints = 0
    self._slow = False
    self._quick_steps = 0
    self._suspect = True
    self._readers: flights.Readers | None = None

  def take(self, step: int) -> tuple[np.ndarray, np.ndarray, Any]:
    """The ids and the tokens of a step's rows, and what `read` gave for them; None where they were read one by one."""
    with self._lock:
      self._recent.append(step)
      flight = self._flights.pop(step, None)
      if self._slow:
        flight = flight or self._start(self._ids_of(step))
        self._forget_far_from(step)
        self._fill_up(step, flight.tokens[:1].nbytes)
      coming = self._steps_to_hint(step) if self._hinting else ()
    for later in coming:
      ids = self._ids_of(later)
      self._hint(ids[ids >= 0])
    if flight is None:
      ids = self._ids_of(step)
      tokens = self._buffer_of(ids)
      return ids, tokens, self._read_and_judge(step, ids, tokens)
    waits = not flight.finished
    seconds = flight.wait()
    with self._lock:
      self._judge(seconds, waits)
    return flight.ids, flight.tokens, None

  def close(self) -> None:
    """Ends the threads, and drops what is in flight."""
    with self._lock:
      self._flights.clear()
      if self._readers is not None:
        self._readers.close()
        self._readers = None

  def _read_and_judge(self, step: int, ids: np.ndarray, tokens: np.ndarray) -> Any:
    """Reads the rows of a step, and judges by the time they took whether the source is slow."""
    suspect = self._suspect or self._hinting
    waits = _waits_of_thread() if suspect else 0
    began = time.perf_counter()
    found = self._read(step, tokens)
    threads = getattr(found, "threads", 1)
    waits += getattr(found, "naps", 0)  # For other threads, not for the disk.
    rows = int(np.count_nonzero(ids >= 0))
    seconds = (time.perf_counter() - began) * threads / max(1, rows)
    limit = max(_SLOW_SECONDS, tokens.strides[0] / _SLOW_BYTES_PER_SECOND)
    # After a batch that did not take long, it is not asked whether the thread waits, since asking takes time too.
    self._suspect = seconds > limit
    if not (suspect and rows and _waits_of_thread() - waits >= rows / threads / 2):
      # A busy machine makes reads slow too, by taking the processor away; only a thread that waits gives it up itself.
      seconds = 0.0
    with self._lock:
      if self._hinting:
        self._judge_hints(step in self._hinted, seconds, limit)
      elif not self._slow:
        self._judge_plain(seconds, limit)
    return found

  def _judge_plain(self, seconds: float, limit: float) -> None:
    """Goes on to hints, or to threads at once, where reads are slow."""
    before = self._seconds_per_read
    self._seconds_per_read = seconds
    # The very first reads open files; where those of two batches are slow, it is the disk.
    if before is not None and min(before, seconds) > limit:
      # One batch may have been held up; the other one tells.
      self._seconds_per_read = min(before, seconds)
      self._slow = self._seconds_per_read >= _VERY_SLOW_SECONDS
      self._hinting = not self._slow
      self._quick_steps = self._vain_hints = 0

  def _judge_hints(self, hinted: bool, seconds: float, limit: float) -> None:
    """Goes on to threads where hints do not help, and back to plain reads where they are not needed."""
    if not hinted:
      self._quick_steps = self._quick_steps + 1 if seconds <= limit else 0
      if self._quick_steps == 2:
        self._hinting, self._seconds_per_read, self._quick_steps = False, None, 0
      return
    self._vain_hints = (
        self._vain_hints + 1 if seconds > 0.5 * (self._seconds_per_read or 0.0) else 0
    )
    if self._vain_hints == 2:
      self._hinting, self._slow, self._quick_steps = False, True, 0

  def _steps_to_hint(self, step: int) -> list[int]:
    """The coming steps that the kernel has not been told of."""
    stride = self._stride()
    self._hinted = {old for old in self._hinted if old >= step - 8 * stride}
    coming = range(step + stride, step + (_STEPS_HINTED + 1) * stride, stride)
    new = [s for s in coming if s not in self._hinted and s // stride % _TRIAL_STEPS]
    self._hinted.update(new)
    return new

  def _judge(self, seconds: float, waits: bool) -> None:
    """Learns from the rows of a step that were read among others: the pages of a slow disk may be in the cache by now."""
    if not self._slow:
      return
    alone = self._seconds_per_read or 0.0
    # Other threads are at work, so a read from the cache does not take microseconds here either.
    is_quick = seconds <= max(0.25 * alone, _QUICK_SECONDS)
    self._quick_steps = self._quick_steps + 1 if is_quick else 0
    if self._quick_steps == _QUICK_STEPS:
      self._slow, self._seconds_per_read, self._seconds_in_flight = False, None, 0.0
      self._quick_steps = 0
    elif waits and seconds > 1.5 * max(alone, self._seconds_in_flight):
      # A mount that others use too has become slower, and somebody waits for it.
      self._seconds_in_flight = seconds

  def _stride(self) -> int:
    """A worker process makes every W-th step; threads may ask for neighbours out of turn."""
    recent = sorted(set(self._recent))
    return min((b - a for a, b in itertools.pairwise(recent)), default=1)

  def _fill_up(self, step: int, row_bytes: int) -> None:
    """Starts the reads of later steps until enough are in flight, and gives a hint of those of the one after."""
    stride = self._stride()
    held = sum(len(flight.ids) for flight in self._flights.values())
    for later in itertools.count(step + stride, stride):
      if later in self._flights:
        continue
      ids = self._ids_of(later)
      if not len(ids):
        return
      enough = held >= self._wanted_reads(row_bytes) + _BATCHES_QUEUED * len(ids)
      if enough or (held + len(ids)) * row_bytes > _MOST_BYTES_AHEAD:
        self._hint(ids[ids >= 0])
        return
      self._flights[later] = self._start(ids)
      held += len(ids)

  def _wanted_reads(self, row_bytes: int) -> int:
    seconds = max(self._seconds_per_read or 0.0, self._seconds_in_flight)
    rate = min(_TARGET_BYTES_PER_SECOND / row_bytes, _TARGET_READS_PER_SECOND)
    return max(8, min(_MOST_THREADS, int(seconds * rate)))

  def _start(self, ids: np.ndarray) -> flights.Flight:
    if self._readers is None:
      self._readers = flights.Readers(_MOST_THREADS)
    tokens = self._buffer_of(ids)
    tokens[ids < 0] = 0
    flight = flights.Flight(ids, tokens, self._row_reader(ids, tokens))
    self._readers.start(flight, self._wanted_reads(tokens[:1].nbytes))
    return flight

  def _forget_far_from(self, step: int) -> None:
    """Drops steps that were left behind, or that lie far ahead: whoever jumps elsewhere does not come back for them."""
    stride = self._stride()
    near = range(step - 8 * stride, step + (len(self._flights) + 8) * stride + 1)
    for other in [s for s in self._flights if s not in near]:
      del self._flights[other]


def _waits_of_thread() -> int:
  """How often the calling thread has given up the processor to wait for something."""
  return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
