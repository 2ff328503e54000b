"""The pace of requests to a store: slow at first, and halved when the store throttles.

A GCS bucket serves about 5,000 reads per second at first, and all hosts of a run start together. So
each process starts with its share of this rate. Google recommends to double the rate at most every
20 minutes, which would starve large runs: they double it every minute, because a store that cannot
follow throttles them. A run of few processes is faster, because each can send only so much. When
the store answers 429 or 503, the rate of the process is halved, at most once per second.

    requests per second of a run, after        0 s     10 s     60 s
    1 process                                1,000   11,700   20,000
    16 processes                             5,000    8,900   37,000
    64 processes                             5,000    6,400   16,800
    1,024 processes                          5,000    5,700   10,400
"""

import threading
import time
from collections.abc import Callable

# Initial requests per second: in total for a run, and at most for each process.
RUN_FIRST = 5000
_MOST_FIRST = 1000.0
# Besides doubling, all processes together add the initial rate of one process every second.
_DOUBLING_SECONDS = 60.0
_RECOVERY_SECONDS = 10.0  # After throttling: the time in which a process adds its initial rate.
_LEAST = 1.0
# Requests that may be sent at once after a pause, the rows of a batch; at most those of a second.
_BURST = 256
_AT_ONCE = 16  # Requests to reserve at a time while fewer are sent than the rate allows.
_NO_LIMIT = 20000.0  # More than a single process can send.

_processes = 1
_lock = threading.Lock()
_paces: dict[tuple[str, str, bool, int], "Pace"] = {}


def share_with(processes: int) -> None:
  """Sets how many processes read from the same stores, including this one.

  This applies to every `Pace` that this process creates or gets from `of_store` from then on.
  """
  global _processes
  _processes = processes


def sharing() -> int:
  """Returns how many processes read from the same stores."""
  return _processes


def of_store(name: str, endpoint: str = "", *, slow_start: bool = True) -> "Pace":
  """Returns the pace that all storages of this process share for a store.

  >>> of_store("gs://bucket") is of_store("gs://bucket")
  True

  Args:
    name: URL of the store.
    endpoint: Address of its server; "" for the provider's own.
    slow_start: As for `Pace`.
  """
  with _lock:
    key = (name, endpoint, slow_start, _processes)
    if key not in _paces:
      _paces[key] = Pace(slow_start=slow_start)
    return _paces[key]


class Pace:
  """Decides when the next request may be sent; thread-safe.

  >>> pace = Pace()
  >>> pace.delay()  # The first requests need not wait.
  0.0

  Args:
    clock: Function that returns the time in seconds.
    slow_start: Whether to start slowly; otherwise nothing is limited until the store throttles.

  Attributes:
    rate: Requests per second that are allowed now.
  """

  def __init__(self, clock: Callable[[], float] = time.monotonic, *, slow_start: bool = True):
    self._clock = clock
    self._lock = threading.Lock()
    self._first = min(_MOST_FIRST, max(_LEAST, RUN_FIRST / _processes))
    self._processes = _processes
    self.rate = self._first if slow_start else _NO_LIMIT
    self._allowance = min(float(_BURST), self.rate)
    self._updated = clock()
    self._slowed = float("-inf")
    # Requests that may be sent now. Threads take them without the lock, so none waits for it.
    self._reserved: list[None] = []

  def delay(self) -> float:
    """Reserves a request, and returns the number of seconds to wait before sending it."""
    try:
      self._reserved.pop()
      return 0.0
    except IndexError:
      pass
    with self._lock:
      now = self._clock()
      passed = now - self._updated
      self._updated = now
      # A pause counts as one second at most, so that no flood of requests follows it.
      self._raise_rate(min(passed, 1.0))
      self._allowance = min(self._allowance + passed * self.rate, self.rate, float(_BURST)) - 1
      if self._allowance >= _AT_ONCE:
        self._allowance -= _AT_ONCE - 1
        self._reserved.extend([None] * (_AT_ONCE - 1))
      return max(0.0, -self._allowance / self.rate)

  def _raise_rate(self, seconds: float) -> None:
    added = self._first / self._processes
    if self.rate < self._first:
      added = max(added, self._first / _RECOVERY_SECONDS)
    grown = self.rate * 2 ** (seconds / _DOUBLING_SECONDS)
    self.rate = min(grown + added * seconds, _NO_LIMIT)

  def slow_down(self) -> None:
    """Halves the rate, at most once per second: a busy store refuses many requests at once."""
    with self._lock:
      now = self._clock()
      if now - self._slowed >= 1.0:
        self._slowed = now
        self.rate = max(self.rate / 2, _LEAST)
        self._allowance = min(self._allowance, 0.0)
        self._reserved.clear()
