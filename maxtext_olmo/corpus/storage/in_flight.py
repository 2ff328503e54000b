"""Threads that send the requests of several reads, a limited number at a time.

A thread that has its answer takes the next request from a queue, so that a request costs no future
and a read of many ranges wakes its caller once:

    read of step 7 ─┐
    read of step 8 ─┼─▶ queue of requests ─▶ up to `limit` threads
    read of step 9 ─┘

By Little's law, n requests are in flight if n = requests per second × latency. More threads than
the fastest rate of a process needs only compete for the interpreter, so the limit follows the
measured latency.

Requests take no lock: a thread that holds one while it waits for the interpreter makes all others
wait for both. The operations of a deque and of an iterator are atomic.
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
_FEWEST = 32
_MOST_PER_SECOND = 8000  # Requests that a process can handle.
# The shortest latency of a window is hardly affected by other threads; most are longer.
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
    self._pool = concurrent.futures.ThreadPoolExecutor(MOST_THREADS, "olmo-get")
    self._closed = False

  def run(self, send: Callable[[Any], None], requests: Sequence[Any]) -> None:
    """Calls `send` for each request and waits; after an error, starts none and raises the error."""
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
      except RuntimeError as error:  # The interpreter exits, or no more threads can be started.
        if not self._running:  # Otherwise fewer threads send the requests.
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
    """Runs a function in one of the threads, apart from the queue."""
    with self._lock:
      self._check_open()
      return self._pool.submit(function, *args)

  def close(self) -> None:
    """Gives up the requests that have not been sent; those in flight end by themselves."""
    with self._lock:
      self._closed = True
      self._pool.shutdown(wait=False, cancel_futures=True)
    while self._queue:
      with contextlib.suppress(IndexError):  # A thread was faster.
        self._queue.popleft()[0].end(_closed())

  def _check_open(self) -> None:
    if self._closed:
      raise _closed()

  def _work(self) -> None:
    """Sends requests until there are none, or more threads than the limit."""
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
      except BaseException as error:  # Raised by `run`.
        read.end(error)
      else:
        self._note_latency(time.monotonic() - began)
        read.end(None)

  def _leave(self) -> bool:
    """Returns whether a thread is to end, and counts it out."""
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
      if latencies:  # Otherwise another thread was first.
        wanted = round(_MOST_PER_SECOND * _SHORTEST_TO_TYPICAL * min(latencies))
        self.limit = min(max(wanted, _FEWEST), MOST_THREADS)


class _Read:
  """The requests of one call of `run`.

  Attributes:
    send: Sends a request.
    error: The first error.
    done: Set when no request is in flight or waits.
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
  return CorpusError("Did not read: the storage was closed meanwhile.")
