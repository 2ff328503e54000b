"""Rows of many batches, read by many threads, in the order in which they were asked for.

The threads know nothing of batches: each takes the next row of the queue, whatever batch it belongs to, so none of them waits at
the end of a batch for the slowest row of it:

    queue       row 61 of step 7, row 62 of step 7, row 63 of step 7, row 0 of step 8, row 1 of step 8, …
    threads     │ row 58 of step 7 │ row 59 of step 7 │ row 60 of step 7 │

A source that answers after milliseconds is asked ten thousand times in a second and more, all by one interpreter. So a row costs a
`popleft` and the read itself; there is no future per row, and a thread that finds a row waiting wakes nobody and is woken by nobody.
"""

from __future__ import annotations

import collections
import concurrent.futures
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np


class Flight:
  """The rows of a step that are being read.

  Args:
    ids: The instances of the rows, -1 for padding.
    tokens: What is read into.
    read_row: Reads a row, by its number.
  """

  def __init__(self, ids: np.ndarray, tokens: np.ndarray, read_row: Callable[[int], object]):
    self.ids = ids
    self.tokens = tokens
    self.rows: Sequence[int] = np.flatnonzero(ids >= 0).tolist()
    self._read_row = read_row
    self._seconds: list[float] = []
    self._errors: dict[int, BaseException] = {}
    self._finished = threading.Event()
    if not self.rows:
      self._finished.set()

  @property
  def finished(self) -> bool:
    """Whether all rows have been read."""
    return self._finished.is_set()

  def read(self, row: int) -> None:
    """Reads a row; an error is kept for whoever waits for the step, which may never be asked for."""
    began = time.perf_counter()
    try:
      self._read_row(row)
    except BaseException as error:
      self._errors[row] = error
    self._done(time.perf_counter() - began)

  def drop(self, row: int) -> None:
    """Says that a row will not be read."""
    self._errors[row] = concurrent.futures.CancelledError()
    self._done(0.0)

  def wait(self) -> float:
    """Waits for all rows, and gives the median of the seconds that they took; raises the error of the first bad row."""
    self._finished.wait()
    if self._errors:
      raise self._errors[min(self._errors)]
    return sorted(self._seconds)[len(self._seconds) // 2] if self._seconds else 0.0

  def _done(self, seconds: float) -> None:
    self._seconds.append(seconds)
    if len(self._seconds) == len(self.rows):
      self._finished.set()


class Readers:
  """Threads that read the rows of flights, in order; none is started before there is a row for it."""

  def __init__(self, most: int):
    self._queue = _Queue()
    self._pool = concurrent.futures.ThreadPoolExecutor(most, "olmo-read")

  def start(self, flight: Flight, threads: int) -> None:
    """Queues the rows of a flight, to be read by at least so many threads where there are so many rows."""
    queue = self._queue
    with queue.lock:
      queue.rows.extend([(flight, row) for row in flight.rows])
      more = max(0, min(threads - queue.busy, len(queue.rows)))
      queue.busy += more
    for started in range(more):
      try:
        self._pool.submit(_drain, queue)
      except RuntimeError:  # No thread is to be had; those that there are read all the same.
        with queue.lock:
          queue.busy -= more - started
          nobody_reads = queue.busy == 0 and queue.rows
        if nobody_reads:
          self._drop_all()
          raise
        return

  def close(self) -> None:
    """Ends the threads once each has finished its row; the other rows are not read."""
    self._drop_all()
    self._pool.shutdown(wait=False)

  def _drop_all(self) -> None:
    with self._queue.lock:
      dropped = list(self._queue.rows)
      self._queue.rows.clear()
    for flight, row in dropped:
      flight.drop(row)


class _Queue:
  """What the threads refer to, instead of what holds them, so that they do not keep a dropped dataset alive."""

  def __init__(self) -> None:
    self.rows: collections.deque[tuple[Flight, int]] = collections.deque()
    self.busy = 0
    self.lock = threading.Lock()


def _drain(queue: _Queue) -> None:
  while True:
    try:
      flight, row = queue.rows.popleft()
    except IndexError:
      with queue.lock:
        if queue.rows:  # They came in the meantime, and this thread was counted on.
          continue
        queue.busy -= 1
        return
    flight.read(row)
    del flight  # Its memory is not to wait for this thread's next row.
