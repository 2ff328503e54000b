"""Loading metrics, and a warning when the trainer keeps waiting for its batches.

Each batch adds what its stages cost: order, reads, filter (with the vocabulary check) and transfer
to the devices. Most of that runs in parallel with the trainer. What the trainer loses is the wait:
the time that `next` took.

The watchdog warns once, and only after warm-up. The first steps wait for compilation and cold
caches, and one long wait may be an accident, so it looks at 20 later steps together:

    first batch | 20 steps and 10 s: ignored | 20 steps, of which more than a tenth waiting: warn
"""

from __future__ import annotations

import collections
import dataclasses
import operator
import time

from absl import logging

_STAGES = ("order", "read", "filter", "transfer")
_COSTS = operator.attrgetter(*(f"{stage}_seconds" for stage in _STAGES))
_WARM_UP_STEPS = 20
_WARM_UP_SECONDS = 10.0
_WINDOW_STEPS = 20
_TOLERATED_SHARE = 0.1


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
  queue_depth: int = 0
  _watchdog: _Watchdog = dataclasses.field(default_factory=lambda: _Watchdog())

  def made(
      self,
      *,
      order_seconds: float = 0.0,
      read_seconds: float = 0.0,
      filter_seconds: float = 0.0,
      transfer_seconds: float = 0.0,
      bytes_read: int = 0,
      reads: int = 0,
      bytes_to_device: int = 0,
  ) -> None:
    """Adds the cost of one batch that was read, filtered and sent to the devices."""
    self.order_seconds += order_seconds
    self.read_seconds += read_seconds
    self.filter_seconds += filter_seconds
    self.transfer_seconds += transfer_seconds
    self.bytes_read += int(bytes_read)
    self.reads += int(reads)
    self.bytes_to_device += int(bytes_to_device)

  def served(
      self, *, step: int, asked_at: float, served_at: float | None = None, queue_depth: int = 0
  ) -> None:
    """Counts a batch handed to the trainer, and warns once if waits persist.

    Args:
      step: The step that the batch is for.
      asked_at: When the trainer asked for it, on the clock of `time.perf_counter`.
      served_at: When it got it, on the same clock; now unless given.
      queue_depth: Batches that were ready on the devices by then.
    """
    served_at = time.perf_counter() if served_at is None else served_at
    self.batches += 1
    self.wait_seconds += served_at - asked_at
    self.queue_depth = queue_depth
    costs = _COSTS(self)
    slow = self._watchdog.observe(asked_at, served_at, costs)
    if slow is not None:
      slow.warn(step)

  def snapshot(self) -> dict[str, float]:
    """Returns all sums by name."""
    return {
        field.name: getattr(self, field.name)
        for field in dataclasses.fields(self)
        if not field.name.startswith("_")
    }


@dataclasses.dataclass(frozen=True)
class _SlowSteps:
  """Steps with too much waiting: their seconds in all, of waiting, and by stage of loading."""

  steps: int
  elapsed: float
  waited: float
  costs: tuple[float, ...]

  def warn(self, step: int) -> None:
    """Logs the warning."""
    each = {name: 1e3 * cost / self.steps for name, cost in zip(_STAGES, self.costs)}
    listed = ", ".join(f"{name} {cost:.1f} ms" for name, cost in each.items())
    largest = max(each, key=lambda name: each[name])
    logging.warning(
        "The trainer waits for data: over the last %d steps (to step %d), %.0f %% of the time, or"
        " %.0f ms per step.%s See iterator.metrics(), and docs/guides/performance.md for what"
        " helps. This warning is not repeated.",
        self.steps,
        step,
        100 * self.waited / self.elapsed,
        1e3 * self.waited / self.steps,
        # Not every pipeline measures its stages.
        f" The largest cost of a batch is {largest} ({listed})." if any(self.costs) else "",
    )


class _Watchdog:
  """Finds out, once, whether the trainer keeps waiting."""

  def __init__(self):
    self._first_at: float | None = None
    self._seen = 0
    self._warned = False
    # Of each of the last steps: when it got its batch, how long it waited, all costs up to then.
    self._recent: collections.deque[tuple[float, float, tuple[float, ...]]] = collections.deque(
        maxlen=_WINDOW_STEPS + 1
    )

  def observe(
      self, asked_at: float, served_at: float, costs: tuple[float, ...]
  ) -> _SlowSteps | None:
    """Takes in a step; returns the last steps if their waits are worth a warning."""
    if self._first_at is None:
      self._first_at = served_at
    self._seen += 1
    # Nothing that happens during warm-up counts, so the window fills with later steps only.
    warm = self._seen > _WARM_UP_STEPS and served_at - self._first_at >= _WARM_UP_SECONDS
    if self._warned or not warm:
      return None
    self._recent.append((served_at, served_at - asked_at, costs))
    if len(self._recent) <= _WINDOW_STEPS:
      return None
    (began_at, _, before), *steps = self._recent
    elapsed, waited = served_at - began_at, sum(wait for _, wait, _ in steps)
    if waited <= _TOLERATED_SHARE * elapsed:
      return None
    self._warned = True
    spent = tuple(now - then for now, then in zip(costs, before))
    return _SlowSteps(_WINDOW_STEPS, elapsed, waited, spent)
