"""A thread that takes the next things while the trainer is busy with the present one.

Handing over is all that a trainer ever waits for when loading keeps up, so it is two calls into C, without a lock of Python's.
"""

from __future__ import annotations

import atexit
import functools
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")

# A thread that is inside JAX when the interpreter goes down takes the process with it, by SIGABRT. So those that nobody
# stopped, because the trainer failed, are waited for at exit; not longer than a batch may take to arrive.
_EXIT_SECONDS = 10.0
_running: weakref.WeakSet[Ahead] = weakref.WeakSet()


def _stop(results: queue.SimpleQueue, room: queue.SimpleQueue, stopped: threading.Event) -> None:
  stopped.set()
  room.put(None)  # The thread may be waiting to hand over a result.
  try:
    while True:
      results.get_nowait()
  except queue.Empty:
    pass


class Ahead(Generic[T]):
  """Calls `make` over and over, up to `depth` results ahead; an exception ends it and reaches the caller of `take`.

  `make` must not refer to whoever holds this object: the thread refers to `make`, and ends when this object is dropped.
  """

  def __init__(self, make: Callable[[], T], depth: int):
    self._results: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
    # As many tokens as results may still be put down.
    self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
    for _ in range(depth):
      self._room.put(None)
    shared = self._results, self._room, threading.Event()
    self._stop_thread = functools.partial(_stop, *shared)
    self._thread = threading.Thread(
        target=_work, args=(make, *shared), name="olmo-ahead", daemon=True
    )
    self._thread.start()
    self._finalizer = weakref.finalize(self, self._stop_thread)
    _running.add(self)

  def take(self) -> T:
    """The next result; raises what `make` raised."""
    result, error = self._results.get()
    if error is not None:
      self._results.put((None, error))  # Every later call raises it too.
      raise error
    self._room.put(None)
    return result  # type: ignore[return-value]

  @property
  def ready(self) -> int:
    """Results that wait to be taken."""
    return self._results.qsize()

  def stop(self, seconds: float = float("inf"), *, finalizing=sys.is_finalizing) -> None:
    """Ends the thread, waiting for it so long, and forgets what it made."""
    if finalizing():
      return  # The module's names may be gone, and the thread has been seen to already.
    deadline = time.monotonic() + seconds
    while self._thread.is_alive() and time.monotonic() < deadline:
      self._stop_thread()
      self._thread.join(0.01)
    self._stop_thread()


@atexit.register
def _stop_all() -> None:
  for ahead in list(_running):
    ahead.stop(_EXIT_SECONDS)


def _work(
    make: Callable[[], Any],
    results: queue.SimpleQueue,
    room: queue.SimpleQueue,
    stopped: threading.Event,
) -> None:
  while not stopped.is_set():
    outcome: Any
    try:
      outcome = make(), None
    except BaseException as error:  # It belongs to whoever asks for the result, whatever it is.
      outcome = None, error
    room.get()
    results.put(outcome)
    if outcome[1] is not None:
      return
