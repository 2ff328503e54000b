"""Threads that send the requests of several reads, with a limited number in flight at a time.

A thread that has received its answer takes the next request from a queue. So a request needs no
future, and a read of many ranges wakes its caller only once, at its end:

    read of step 7 ─┐
    read of step 8 ─┼─▶ queue of requests ─▶ up to `limit` threads
    read of step 9 ─┘

By Little's law, the number of requests in flight is the request rate times the latency. At low
latency, a few threads reach the highest rate that a process can handle; more threads would only
compete for the GIL. The limit therefore follows the measured latency. When it falls, surplus
threads end: idle ones take memory and, in most measurements, CPU time from the others.

Threads send requests without taking a lock: a thread that waits for the GIL while it holds a lock
blocks all others. Operations on deques and iterators are atomic, so no lock is needed.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from maxtext_olmo.errors import CorpusError

MOST_THREADS = 256
_FEWEST = 32  # Enough to hide the delays of a fast server without many context switches.
MOST_PER_SECOND = 8000  # Requests per second that a process can handle.
# The limit is computed from the shortest latency of `_WINDOW` requests, because other threads
# hardly affect it. The typical latency is `_SHORTEST_TO_TYPICAL` times as long.
_WINDOW = 256
_SHORTEST_TO_TYPICAL = 2


class InFlight:
  """Runs requests in threads; safe to share between threads.

  >>> found = []
  >>> threads = InFlight()
  >>> threads.run(found.append, [1, 2, 3])
  >>> sorted(found)
  [1, 2, 3]
  >>> threads.close()

  Attributes:
    limit: The number of requests that may be in flight now.
  """

  def __init__(self) -> None:
    self.limit = MOST_THREADS
    self._lock = threading.Lock()
    self._queue: collections.deque[tuple[_Read, Any]] = collections.deque()
    self._running = 0
    self._latencies: list[float] = []
    self._pool = _new_pool()
    self._most_running = 0  # Since `_pool` was created, so it has about as many threads.
    self._closed = False

  def run(self, send: Callable[[Any], None], requests: Sequence[Any]) -> None:
    """Calls `send` for each request and waits; stops at the first error and raises it."""
    if not requests:
      return
    read = _Read(send, len(requests))
    with self._lock:
      self._check_open()
      self._queue.extend([(read, request) for request in requests])
      try:
        for _ in range(min(self.limit - self._running, len(requests))):
          self._pool.submit(self._work)
          self._running += 1
          self._most_running = max(self._most_running, self._running)
      except RuntimeError as error:  # The interpreter is exiting, or no thread can be started.
        if not self._running:  # Otherwise, the threads already running send the requests.
          read.error = error
          raise
    try:
      read.done.wait()
    except BaseException as error:
      read.error = read.error or error
      read.done.wait()  # No thread may write to the caller's arrays after this call.
      raise
    if read.error is not None:
      raise read.error

  def submit(self, function: Callable[..., Any], *args: Any) -> concurrent.futures.Future[Any]:
    """Runs a function in a thread of the pool; it does not wait in the queue of requests."""
    with self._lock:
      self._check_open()
      return self._pool.submit(function, *args)

  def close(self) -> None:
    """Cancels the requests that have not been sent; does not wait for those in flight."""
    with self._lock:
      self._closed = True
      self._pool.shutdown(wait=False, cancel_futures=True)
    while self._queue:
      with contextlib.suppress(IndexError):  # Another thread emptied the queue first.
        self._queue.popleft()[0].end(_closed())

  def _check_open(self) -> None:
    if self._closed:
      raise _closed()

  def _work(self) -> None:
    """Sends requests until none is left, or until more threads are running than allowed."""
    while not self._leave():
      try:
        read, request = self._queue.popleft()
      except IndexError:
        continue
      if read.error is not None:
        read.end(None)
        continue
      began = time.monotonic()
      try:
        read.send(request)
      except BaseException as error:  # `run` raises it in the caller's thread.
        read.end(error)
      else:
        self._note_latency(time.monotonic() - began)
        read.end(None)

  def _leave(self) -> bool:
    """Returns whether the calling thread should end; if so, it no longer counts as running."""
    if self._queue and self._running <= self.limit:
      return False
    with self._lock:
      leave = not self._queue or self._running > self.limit
      self._running -= leave
    return leave

  def _note_latency(self, seconds: float) -> None:
    self._latencies.append(seconds)
    if len(self._latencies) < _WINDOW:
      return
    with self._lock:
      latencies, self._latencies = self._latencies, []
      if latencies:  # Otherwise, another thread has just updated the limit.
        wanted = round(MOST_PER_SECOND * _SHORTEST_TO_TYPICAL * min(latencies))
        self.limit = min(max(wanted, _FEWEST), MOST_THREADS)
        if self._most_running > 2 * self.limit and not self._closed:
          # The threads of the old pool end when they have nothing to do.
          self._pool.shutdown(wait=False)
          self._pool, self._most_running = _new_pool(), 0


def _new_pool() -> concurrent.futures.ThreadPoolExecutor:
  return concurrent.futures.ThreadPoolExecutor(MOST_THREADS, "olmo-get")


class _Read:
  """The requests of one call of `run`.

  Attributes:
    send: Function that sends a request.
    error: The first error; None if there is none.
    done: Set when no request is in flight or waiting.
  """

  __slots__ = ("_left", "done", "error", "send")

  def __init__(self, send: Callable[[Any], None], count: int):
    self.send = send
    self.error: BaseException | None = None
    self.done = threading.Event()
    self._left = iter(range(count - 1, -1, -1))

  def end(self, error: BaseException | None) -> None:
    """Records that one request has ended."""
    if error is not None:
      self.error = self.error or error
    if next(self._left) == 0:
      self.done.set()


def _closed() -> CorpusError:
  return CorpusError("The read was cancelled: the storage was closed.")
