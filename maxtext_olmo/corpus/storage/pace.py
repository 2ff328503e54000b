"""The pace of requests to a store: a gentle start, and less when the store asks for it.

A GCS bucket serves about 5,000 reads per second at first and more only after some minutes, and all
hosts of a run start at once. So each process starts slowly and adds a little every second. When the
store answers 429 or 503, the rate is halved, at most once per second.
"""

import threading
import time
from collections.abc import Callable

_FIRST = 1000.0  # Requests per second.
_LEAST = 8.0
_MORE_PER_SECOND = 1000.0
_BURST = 256  # Requests that may be sent at once after a pause: the rows of a batch.
_AT_ONCE = 16  # Requests that are reserved together while there is no need to wait.
_NO_LIMIT = 20000.0  # Above what a single process can send.


class Pace:
  """Decides when the next request may be sent; thread-safe.

  >>> pace = Pace()
  >>> pace.delay()  # The first requests are sent at once.
  0.0

  Args:
    clock: Returns the time in seconds.

  Attributes:
    rate: Requests per second that are allowed now.
  """

  def __init__(self, clock: Callable[[], float] = time.monotonic):
    self._clock = clock
    self._lock = threading.Lock()
    self.rate = _FIRST
    self._allowance = float(_BURST)
    self._updated = clock()
    self._slowed = float("-inf")
    self._reserved: list[None] = []  # Taken without the lock, so that threads do not queue for it.

  def delay(self) -> float:
    """Reserves the next request, and returns in how many seconds it may be sent."""
    try:
      self._reserved.pop()
      return 0.0
    except IndexError:
      pass
    with self._lock:
      now = self._clock()
      passed = now - self._updated
      self._updated = now
      # A pause adds no more to the rate than one second does, so it does not end in a flood.
      self.rate = min(self.rate + _MORE_PER_SECOND * min(passed, 1.0), _NO_LIMIT)
      self._allowance = min(self._allowance + passed * self.rate, float(_BURST)) - 1
      if self._allowance >= _AT_ONCE:
        self._allowance -= _AT_ONCE - 1
        self._reserved.extend([None] * (_AT_ONCE - 1))
      return max(0.0, -self._allowance / self.rate)

  def slow_down(self) -> None:
    """Halves the rate, at most once per second, because requests in flight are refused together."""
    with self._lock:
      now = self._clock()
      if now - self._slowed >= 1.0:
        self._slowed = now
        self.rate = max(self.rate / 2, _LEAST)
        self._allowance = min(self._allowance, 0.0)
        self._reserved.clear()
