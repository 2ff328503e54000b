"""Counters of requests to object stores, for metrics and for messages about outages."""

from __future__ import annotations

import bisect
import collections
import math
import threading
import time
from collections.abc import Sequence
from typing import Any

# Latencies are counted in buckets from 0.1 ms to 160 s, each 25% wider than the one before.
_SHORTEST, _GROWTH = 1e-4, 1.25
_BOUNDS = [_SHORTEST * math.pow(_GROWTH, place) for place in range(1, 64)]
_LONGEST_LOG = 1024
_BEGAN = (1, 0.0, 0)


class Traffic:
  """Counts requests, retries, bytes and latencies; safe to share between threads.

  >>> traffic = Traffic()
  >>> traffic.began()
  >>> traffic.ended(seconds=0.05, size=32768)
  >>> counts = traffic.counts()
  >>> counts["requests"], counts["bytes"], counts["in_flight"]
  (1, 32768, 0)
  """

  def __init__(self) -> None:
    self._lock = threading.Lock()
    # Events that are not counted yet, as (1 if a request begins, seconds, bytes). Appending needs
    # no lock, so threads do not wait for each other.
    self._log: collections.deque[tuple[int, float, int]] = collections.deque()
    self._requests = self._retries = self._throttled = self._bytes = self._in_flight = 0
    self._latencies = [0] * (len(_BOUNDS) + 1)
    self._taken: list[int] | None = None
    self._failing: dict[str, tuple[float, str]] = {}  # store → (since, reason)

  def began(self) -> None:
    """Counts a request that is being sent."""
    self._log.append(_BEGAN)

  def ended(self, seconds: float, size: int) -> None:
    """Counts a request that was answered in full."""
    self._log.append((0, seconds, size))
    if len(self._log) >= _LONGEST_LOG and self._lock.acquire(blocking=False):
      try:
        self._count_log()
      finally:
        self._lock.release()

  def _count_log(self) -> None:
    """Counts the logged events; the caller must hold the lock."""
    for _ in range(len(self._log)):
      begun, seconds, size = self._log.popleft()
      if begun:
        self._requests += 1
        self._in_flight += 1
        continue
      self._in_flight -= 1
      self._bytes += size
      self._latencies[bisect.bisect(_BOUNDS, seconds)] += 1

  def failed(self, *, retried: bool, throttled: bool) -> None:
    """Counts a request that failed."""
    with self._lock:
      self._in_flight -= 1
      self._retries += retried
      self._throttled += throttled

  def store_fails(self, store: str, reason: str) -> float:
    """Records that a store does not answer; returns the length of the outage so far, in seconds."""
    now = time.monotonic()
    with self._lock:
      since, _ = self._failing.get(store, (now, ""))
      self._failing[store] = (since, reason)
    return now - since

  def store_answers(self, store: str) -> float:
    """Records that a store answers; returns the length of the outage, if any, in seconds."""
    if store not in self._failing:
      return 0.0
    with self._lock:
      since, _ = self._failing.pop(store, (time.monotonic(), ""))
    return time.monotonic() - since

  @property
  def outage(self) -> str:
    """The stores that do not answer now, and the reasons; "" if all stores answer."""
    with self._lock:
      failing, now = dict(self._failing), time.monotonic()
    return "; ".join(
        f"{store} has not answered for {now - since:.0f} s: {reason}"
        for store, (since, reason) in failing.items()
    )

  def take(self) -> list[int]:
    """Returns what was counted since the last call, for `add` in another process.

    >>> here, there = Traffic(), Traffic()
    >>> there.began()
    >>> there.ended(seconds=0.05, size=32768)
    >>> here.add(there.take())
    >>> here.counts() == there.counts()
    True
    """
    with self._lock:
      self._count_log()
      counted = [self._requests, self._retries, self._throttled, self._bytes, *self._latencies]
      before, self._taken = self._taken or [0] * len(counted), counted
    return [now - then for now, then in zip(counted, before)]

  def add(self, counted: Sequence[int]) -> None:
    """Adds what another process has counted, and `take` has returned there."""
    requests, retries, throttled, size, *latencies = counted
    with self._lock:
      self._requests += requests
      self._retries += retries
      self._throttled += throttled
      self._bytes += size
      self._latencies = [mine + other for mine, other in zip(self._latencies, latencies)]

  def counts(self) -> dict[str, float]:
    """Returns the counters and latency percentiles (in seconds) so far."""
    with self._lock:
      self._count_log()
      latencies = list(self._latencies)
      counts: dict[str, Any] = {
          "requests": self._requests,
          "retries": self._retries,
          "throttled": self._throttled,
          "bytes": self._bytes,
          "in_flight": self._in_flight,
      }
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
      counts[f"latency_{name}"] = _percentile(latencies, share)
    return counts


def _percentile(latencies: list[int], share: float) -> float:
  """Returns the latency at a percentile (0 to 1), accurate to the width of a bucket."""
  wanted, seen = share * sum(latencies), 0
  for place, count in enumerate(latencies):
    seen += count
    if count and seen >= wanted:
      return _SHORTEST * math.pow(_GROWTH, place + 0.5)
  return 0.0
