"""Where the time of loading goes, and a word when it is too much.

Each batch says how long its parts took: the order, the reads, the filter (with the vocabulary check), and the way to the devices.
They run beside the trainer, so what counts for it is the wait: the time that `next` took. The watchdog speaks, once, when
waits are longer than the steps before them several times in a row: one may be an accident, or a trainer that has sent work to
its devices ahead of them.
"""

from __future__ import annotations

import dataclasses
import time

from absl import logging

# Compilation and the first reads make the first steps unlike the rest.
_SETTLING_STEPS = 3
_NOTICEABLE_SECONDS = 0.01
_IN_A_ROW = 3


@dataclasses.dataclass
class Metrics:
  """Sums over the batches of an iterator; `snapshot` gives them as numbers."""

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
  _returned_at: float | None = None
  _long_waits: int = 0
  _warned: bool = False

  def made(
      self,
      *,
      order_seconds: float,
      read_seconds: float,
      filter_seconds: float,
      bytes_read: float,
      reads: float,
      bytes_to_device: int,
      transfer_seconds: float,
  ) -> None:
    """Counts a batch that was made and sent."""
    self.order_seconds += order_seconds
    self.read_seconds += read_seconds
    self.filter_seconds += filter_seconds
    self.bytes_read += int(bytes_read)
    self.reads += int(reads)
    self.bytes_to_device += bytes_to_device
    self.transfer_seconds += transfer_seconds

  def served(self, step: int, asked_at: float) -> None:
    """Counts a batch that the trainer got, and speaks if it had to wait for too long."""
    now = time.perf_counter()
    wait = now - asked_at
    self.batches += 1
    self.wait_seconds += wait
    if self._returned_at is not None and not self._warned and self.batches > _SETTLING_STEPS:
      step_seconds = asked_at - self._returned_at
      long = wait > max(step_seconds, _NOTICEABLE_SECONDS)
      self._long_waits = self._long_waits + 1 if long else 0
      if self._long_waits == _IN_A_ROW:
        self._warned = True
        self._warn(step, wait, step_seconds)
    self._returned_at = now

  def snapshot(self) -> dict[str, float]:
    """All sums, by name."""
    return {
        field.name: getattr(self, field.name)
        for field in dataclasses.fields(self)
        if not field.name.startswith("_")
    }

  def _warn(self, step: int, wait: float, step_seconds: float) -> None:
    parts = {
        "order": self.order_seconds,
        "read": self.read_seconds,
        "filter": self.filter_seconds,
        "transfer": self.transfer_seconds,
    }
    costs = [f"{name} {1e3 * spent / self.batches:.1f} ms" for name, spent in parts.items()]
    logging.warning(
        "Step %d waited %.0f ms for its batch, longer than the %.0f ms of the step before it: loading cannot keep up.%s"
        " See iterator.metrics(), and docs/guides/performance.md for what helps. This is said once.",
        step,
        1e3 * wait,
        1e3 * step_seconds,
        # Not every pipeline says what its parts cost.
        f" A batch costs on average {', '.join(costs)}." if any(parts.values()) else "",
    )
