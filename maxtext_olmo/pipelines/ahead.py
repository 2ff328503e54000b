"""A thread that takes the next things while the trainer is busy with the present one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
  """Calls `make` over and over, up to `depth` results ahead; an exception ends it and reaches the caller of `take`."""

  def __init__(self, make: Callable[[], T], depth: int):
    self._make = make
    self._results: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(depth)
    self._stopped = threading.Event()
    self._thread = threading.Thread(target=self._work, name="olmo-ahead", daemon=True)
    self._thread.start()

  def take(self) -> T:
    """The next result; raises what `make` raised."""
    result, error = self._results.get()
    if error is not None:
      self._results.put((None, error))  # Every later call raises it too.
      raise error
    return result  # type: ignore[return-value]

  @property
  def ready(self) -> int:
    """Results that wait to be taken."""
    return self._results.qsize()

  def stop(self) -> None:
    """Ends the thread and forgets what it made."""
    self._stopped.set()
    while self._thread.is_alive():
      self._discard()
      self._thread.join(0.01)
    self._discard()

  def _discard(self) -> None:
    try:
      while True:
        self._results.get_nowait()
    except queue.Empty:
      pass

  def _work(self) -> None:
    while not self._stopped.is_set():
      outcome: Any
      try:
        outcome = self._make(), None
      except BaseException as error:  # It belongs to whoever asks for the result, whatever it is.
        outcome = None, error
      self._results.put(outcome)
      if outcome[1] is not None:
        return
