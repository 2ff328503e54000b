"""Measures how fast an object store can be read from this host.

The measurement resembles training: it reads row-sized ranges at random places in real objects,
first one at a time, then more and more in parallel. Both the number of requests and the time are
limited.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from maxtext_olmo.errors import ConfigError

_ALONE = 20
_PARALLELISM = (8, 32, 64, 128, 256)
_LARGE_BYTES = 8 << 20
_LARGE_PARALLELISM = 8
_LARGE_READS = 16


@dataclasses.dataclass(frozen=True)
class Rate:
  """The speed at one degree of parallelism.

  Attributes:
    parallelism: Number of requests in flight.
    reads: Number of reads that were made.
    reads_per_second: Reads per second.
    bytes_per_second: Bytes per second.
    median: Median time of a read, in seconds.
    slowest: Time of the slowest read, in seconds.
  """

  parallelism: int
  reads: int
  reads_per_second: float
  bytes_per_second: float
  median: float
  slowest: float


@dataclasses.dataclass(frozen=True)
class Measurement:
  """The results of measuring a store.

  Attributes:
    first: Seconds to find the sizes of the objects, including connecting and getting credentials.
    rates: Speed of row-sized reads at growing parallelism, beginning with one read at a time.
    large: Speed of reads of up to 8 MiB.
    read_bytes: Length of the reads in `rates`.
    requests: Number of requests that were sent, including retries.
    retries: Number of requests that were retries of failed ones.
  """

  first: float
  rates: tuple[Rate, ...]
  large: Rate
  read_bytes: int
  requests: int
  retries: int

  @property
  def best(self) -> Rate:
    """The fastest of `rates`."""
    return max(self.rates, key=lambda rate: rate.reads_per_second)


def measure(
    storage: Any,
    paths: Sequence[str],
    *,
    read_bytes: int,
    max_requests: int = 10_000,
    max_seconds: float = 20.0,
    seed: int = 0,
) -> Measurement:
  """Measures the speed of reading random ranges.

  Args:
    storage: Storage to read from; it must have a `traffic` attribute, as RemoteStorage does. Open
      it with `slow_start=False`; otherwise, its slow start is measured instead of the store.
    paths: Objects to read; at least one must not be empty.
    read_bytes: Length of a read, capped at the size of the largest object.
    max_requests: Maximum number of row-sized reads.
    max_seconds: Seconds after which no further read is started.
    seed: Seed for the random offsets to read at.
  """
  if read_bytes < 1 or max_requests < 1 or max_seconds <= 0:
    raise ConfigError("The length of a read, the number of reads and the time must be positive.")
  began = time.monotonic()
  before = storage.traffic.counts()
  sizes = [storage.size(path) for path in paths]
  first = time.monotonic() - began
  if not any(sizes):
    raise ConfigError("All objects are empty, so nothing can be measured.")
  job = _Reads(storage, paths, sizes, random.Random(seed))
  read_bytes = min(read_bytes, max(sizes))
  rates = [job.run(1, read_bytes, min(_ALONE, max_requests), began + max_seconds / 4)]
  for number, parallelism in enumerate(_PARALLELISM):
    left = max_requests - sum(rate.reads for rate in rates)
    until = began + max_seconds * (0.25 + 0.5 * (number + 1) / len(_PARALLELISM))
    if left < parallelism:
      break
    count = max(left // (len(_PARALLELISM) - number), parallelism)
    rates.append(job.run(parallelism, read_bytes, count, until))
  large = job.run(
      _LARGE_PARALLELISM, min(_LARGE_BYTES, max(sizes)), _LARGE_READS, began + max_seconds
  )
  after = storage.traffic.counts()
  return Measurement(
      first,
      tuple(rates),
      large,
      read_bytes,
      int(after["requests"] - before["requests"]),
      int(after["retries"] - before["retries"]),
  )


@dataclasses.dataclass(frozen=True)
class _Reads:
  storage: Any
  paths: Sequence[str]
  sizes: Sequence[int]
  random: random.Random

  def run(self, parallelism: int, size: int, count: int, until: float) -> Rate:
    """Makes `count` reads, or fewer if time runs out at `until`, but at least `parallelism`."""
    numbers = [i for i, whole in enumerate(self.sizes) if whole >= size]
    places = [
        (number, self.random.randrange(self.sizes[number] - size + 1))
        for number in self.random.choices(numbers, k=count)
    ]
    began = time.monotonic()
    queue = itertools.count()
    seconds: list[float] = []

    def work() -> None:
      out = np.empty(size, np.uint8)
      for turn in queue:
        if turn >= count or (turn >= parallelism and time.monotonic() > until):
          return
        number, offset = places[turn]
        sent = time.monotonic()
        self.storage.fill(
            self.paths,
            np.array([number]),
            np.array([offset]),
            np.array([size]),
            out,
            np.zeros(1, np.int64),
        )
        seconds.append(time.monotonic() - sent)

    with concurrent.futures.ThreadPoolExecutor(parallelism) as pool:
      for done in [pool.submit(work) for _ in range(parallelism)]:
        done.result()
    passed = max(time.monotonic() - began, 1e-9)
    return Rate(
        parallelism,
        len(seconds),
        len(seconds) / passed,
        len(seconds) * size / passed,
        statistics.median(seconds),
        max(seconds),
    )
