"""Threads that make the next things while the trainer is busy with the present one.

Handing over is all that a trainer ever waits for when loading keeps up, so it is two calls into C, without a lock of Python's. Things are
numbered, several threads may make them, and they are handed over in order. A thread puts down what it has made when there is room:

    depth 1, 2 threads     taken 0 1 2 │ put down: 3 │ in hand: 4, and 5 is being made │ room for 4 when 3 is taken
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
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


def _be_considerate() -> None:
  """Lets a thread that is woken wait until the core is free, instead of taking it from the trainer that has just woken it."""
  if hasattr(os, "SCHED_BATCH"):
    with contextlib.suppress(OSError):
      os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class _Stopped(RuntimeError):
  """Reaches whoever waits for a result when the threads are stopped."""


class _Shared(Generic[T]):
  """What the threads refer to, instead of what holds them, so that they end with it.

  What number n became goes to slot n, once turn n has come. Fewer numbers are under way than there are slots, so they go round.
  """

  def __init__(self, make: Callable[[int], T], depth: int, threads: int):
    self.make = make
    self.numbers = itertools.count()  # Taking one is a single call into C, so threads need no lock.
    count = depth + threads + 1
    self.slots: list[queue.SimpleQueue] = [queue.SimpleQueue() for _ in range(count)]
    self.turns: list[queue.SimpleQueue] = [queue.SimpleQueue() for _ in range(count)]
    self.stopped = threading.Event()
    for number in range(depth):
      self.turns[number].put(None)

  def work(self) -> None:
    _be_considerate()
    while not self.stopped.is_set():
      number = next(self.numbers)
      place = number % len(self.slots)
      outcome: Any
      try:
        outcome = self.make(number), None
      except BaseException as error:  # It belongs to whoever asks for the result, whatever it is.
        outcome = None, error
      self.turns[place].get()
      self.slots[place].put(outcome)
      if outcome[1] is not None:
        return
      del outcome  # Its memory is not to wait for the next one.

  def stop(self, threads: int) -> None:
    self.stopped.set()
    for turn in self.turns:
      for _ in range(threads):  # They may be waiting to put something down.
        turn.put(None)
    for slot in self.slots:
      with contextlib.suppress(queue.Empty):
        while True:
          slot.get_nowait()
      # Somebody may be waiting for the next one.
      slot.put((None, _Stopped("Nothing is made ahead any more.")))


class Ahead(Generic[T]):
  """The results of `make(0)`, `make(1)`, … in order; an exception ends it and reaches the caller of `take`.

  Args:
    make: Must not refer to whoever holds this object: the threads refer to `make`, and end when this object is dropped.
    depth: Results that may lie ready, beside one that each thread has in hand.
    threads: How many make them beside each other.
  """

  def __init__(self, make: Callable[[int], T], depth: int, threads: int = 1):
    self._shared: _Shared[T] = _Shared(make, depth, threads)
    self._depth = depth
    self._taken = 0
    self._error: BaseException | None = None
    self._threads = [
        threading.Thread(target=self._shared.work, name=f"olmo-ahead-{i}", daemon=True)
        for i in range(threads)
    ]
    for thread in self._threads:
      thread.start()
    self._stop_threads = functools.partial(self._shared.stop, threads)
    self._finalizer = weakref.finalize(self, self._stop_threads)
    _running.add(self)

  def take(self) -> T:
    """The next result; raises what `make` raised, and every later call does too."""
    if self._error is not None:
      raise self._error
    slots, number = self._shared.slots, self._taken
    room = self._shared.turns[(number + self._depth) % len(slots)]
    if not self._depth:  # This very one may be put down now.
      room.put(None)
    result, self._error = slots[number % len(slots)].get()
    if self._error is not None:
      raise self._error
    if self._depth:  # Only now, so that no thread wakes up beside one that has to be quick.
      room.put(None)
    self._taken += 1
    return result

  @property
  def ready(self) -> int:
    """Results that wait to be taken."""
    return sum(slot.qsize() for slot in self._shared.slots)

  def end(self, *, finalizing=sys.is_finalizing) -> None:
    """Tells the threads to end, and forgets what they made; whoever takes a result gets an error."""
    if not finalizing():
      self._stop_threads()

  def stop(self, seconds: float = float("inf"), *, finalizing=sys.is_finalizing) -> None:
    """Ends the threads, and waits for them so long."""
    if finalizing():
      return  # The module's names may be gone, and the threads have been seen to already.
    deadline = time.monotonic() + seconds
    for thread in self._threads:
      if thread is threading.current_thread():
        continue  # The garbage collector may call from anywhere.
      while thread.is_alive() and time.monotonic() < deadline:
        self._stop_threads()
        thread.join(0.01)
    self._stop_threads()


@atexit.register
def _stop_all() -> None:
  running = list(_running)
  for ahead in running:  # All of them first, since one may be waiting for another.
    ahead.end()
  for ahead in running:
    ahead.stop(_EXIT_SECONDS)
