"""Loading metrics, and a warning when the trainer keeps waiting for its batches.

The metrics add up the time that batches take in each stage: order, reads, filter (with the
vocabulary check) and transfer to the devices. Most of this work runs in parallel with the trainer,
which loses only the time that it waits in `next`.

The watchdog warns once, and only after warm-up. The first steps wait for compilation and cold
caches, and a single long wait may be an accident, so the watchdog looks at 20 later steps together:

    first batch | 20 steps and 10 s: ignored | 20 steps with more than 10 % waiting: warn

Waits of at most 10 ms per step are ignored: they matter only if steps are as short as those of a
toy model.
"""

from __future__ import annotations

import collections
import dataclasses
import operator
import time
from collections.abc import Callable, Sequence

from absl import logging

_STAGES = ("order", "read", "filter", "transfer")
_COSTS = operator.attrgetter(*(f"{stage}_seconds" for stage in _STAGES))
_WARM_UP_STEPS = 20
_WARM_UP_SECONDS = 10.0
_WINDOW_STEPS = 20
_TOLERATED_SHARE = 0.1
_TOLERATED_SECONDS = 0.01  # Per step.


@dataclasses.dataclass
class Metrics:
  """Sums over the batches of an iterator; `snapshot` returns them by name."""

  batches: int = 0
  wait_seconds: float = 0.0
  order_seconds: float = 0.0
  read_seconds: float = 0.0
  filter_seconds: float = 0.0
  transfer_seconds: float = 0.0
  bytes_read: int = 0
  reads: int = 0
  bytes_to_device: int = 0
  queue_depth: int = 0  # Iterators that send batches to devices in advance report their own value.
  _watchdog: _Watchdog = dataclasses.field(default_factory=lambda: _Watchdog())

  def watch_store(self, describe: Callable[[], str]) -> None:
    """Sets the function that warnings call for a sentence on how fast the store answers."""
    self._watchdog.describe_store = describe

  def made(self, **costs: float) -> None:
    """Adds the costs, by name, of one batch that was read, filtered and sent to the devices."""
    for name, cost in costs.items():
      total = getattr(self, name)
      setattr(self, name, total + type(total)(cost))

  def served(self, *, step: int, asked_at: float, served_at: float | None = None) -> None:
    """Counts a batch that the trainer received, and warns once if the trainer keeps waiting.

    Args:
      step: Step of the batch.
      asked_at: Time at which the trainer requested the batch, from `time.perf_counter`.
      served_at: Time at which the trainer received the batch, from the same clock; now by default.
    """
    served_at = time.perf_counter() if served_at is None else served_at
    self.batches += 1
    self.wait_seconds += served_at - asked_at
    self._watchdog.observe(step, asked_at, served_at, _COSTS(self))

  def snapshot(self) -> dict[str, float]:
    """Returns all sums by name."""
    return {name: value for name, value in vars(self).items() if not name.startswith("_")}


class _Watchdog:
  """Warns, once, if the trainer keeps waiting."""

  def __init__(self):
    self.describe_store: Callable[[], str] = lambda: ""
    self._first_at: float | None = None
    self._seen = 0
    self._warned = False
    # For each of the last steps: when it got its batch, how long it waited, and all costs so far.
    self._recent: collections.deque[tuple[float, float, Sequence[float]]] = collections.deque(
        maxlen=_WINDOW_STEPS + 1
    )

  def observe(self, step: int, asked_at: float, served_at: float, costs: Sequence[float]) -> None:
    """Records a step, and warns if the last steps waited too long."""
    if self._first_at is None:
      self._first_at = served_at
    self._seen += 1
    # Steps during warm-up do not count, so the window contains later steps only.
    warm = self._seen > _WARM_UP_STEPS and served_at - self._first_at >= _WARM_UP_SECONDS
    if self._warned or not warm:
      return
    self._recent.append((served_at, served_at - asked_at, costs))
    if len(self._recent) <= _WINDOW_STEPS:
      return
    (began_at, _, before), *steps = self._recent
    elapsed, waited = served_at - began_at, sum(wait for _, wait, _ in steps)
    if waited > max(_TOLERATED_SHARE * elapsed, _TOLERATED_SECONDS * _WINDOW_STEPS):
      self._warned = True
      costs = [now - then for now, then in zip(costs, before)]
      _warn(step, elapsed, waited, costs, self.describe_store)


def _warn(
    step: int,
    elapsed: float,
    waited: float,
    costs: Sequence[float],
    describe_store: Callable[[], str],
) -> None:
  each = {name: 1e3 * cost / _WINDOW_STEPS for name, cost in zip(_STAGES, costs)}
  listed = ", ".join(f"{name} {cost:.1f} ms" for name, cost in each.items())
  largest = max(each, key=lambda name: each[name])
  store = describe_store() if largest == "read" else ""
  logging.warning(
      "The trainer waits for data: over the last %d steps (to step %d), it waited %.0f %% of the"
      " time, or %.0f ms per step.%s%s See iterator.metrics(), and docs/guides/performance.md for"
      " what helps. This warning is not repeated.",
      _WINDOW_STEPS,
      step,
      100 * waited / elapsed,
      1e3 * waited / _WINDOW_STEPS,
      # Some pipelines do not measure the cost of their stages.
      f" The largest cost of a batch is {largest} ({listed})." if any(costs) else "",
      f" {store}" if store else "",
  )
