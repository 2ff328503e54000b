"""Steps and positions: how many samples each step takes, and where it starts.

A schedule is a list of stages, each a first step and a batch size:

    BatchSchedule(((0, 4), (3, 8)))     step      0  1  2  3   4
                                        size      4  4  4  8   8
                                        start     0  4  8  12  20

An anchor ties one step to a position: a run that changes its batch size at a position where the new schedule has no
step boundary goes on from that position, and its later steps are counted from there.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools

from maxtext_olmo import errors


@dataclasses.dataclass(frozen=True)
class BatchSchedule:
  """Step ↔ position, by bisection over the stages.

  Attributes:
    stages: `(first step, batch size)` pairs; the first stage begins at step 0.
    anchor_step: A step whose position is known.
    anchor_position: That position; earlier steps belong to another schedule.
  """

  stages: tuple[tuple[int, int], ...]
  anchor_step: int = 0
  anchor_position: int = 0

  def __post_init__(self):
    steps = [first for first, _ in self.stages]
    if not steps or steps[0] != 0 or any(a >= b for a, b in zip(steps, steps[1:])):
      raise errors.ConfigError(
          f"A batch schedule begins at step 0 and its steps increase, got {list(self.stages)}."
      )
    if any(size < 1 for _, size in self.stages):
      raise errors.ConfigError(f"A batch holds at least one row, got {list(self.stages)}.")
    if self.anchor_step < 0 or self.anchor_position < 0:
      raise errors.OrderError(
          f"A schedule is anchored at a step and position of 0 or more, got step"
          f" {self.anchor_step} at position {self.anchor_position}."
      )

  @classmethod
  def constant(cls, size: int) -> BatchSchedule:
    """Every step takes `size` samples."""
    return cls(((0, size),))

  @functools.cached_property
  def _first_steps(self) -> list[int]:
    return [first for first, _ in self.stages]

  @functools.cached_property
  def _starts(self) -> list[int]:
    """Where each stage would start if step 0 were at position 0."""
    starts = [0]
    for (first, size), (following, _) in zip(self.stages, self.stages[1:]):
      starts.append(starts[-1] + (following - first) * size)
    return starts

  @property
  def sizes(self) -> tuple[int, ...]:
    """The distinct batch sizes, ascending."""
    return tuple(sorted({size for _, size in self.stages}))

  def size(self, step: int) -> int:
    """How many samples a step takes."""
    return self.stages[self._stage(step)][1]

  def start(self, step: int) -> int:
    """The position of a step's first sample, which is how many samples the steps before it took."""
    if step < self.anchor_step:
      raise errors.OrderError(
          f"Step {step} lies before step {self.anchor_step}, where this schedule took over at"
          f" position {self.anchor_position}; earlier steps had another schedule."
      )
    return self.anchor_position + self._unanchored(step) - self._unanchored(self.anchor_step)

  def step_at(self, position: int) -> int:
    """The step that takes the sample at a position."""
    if position < self.anchor_position:
      raise errors.OrderError(
          f"Position {position} lies before position {self.anchor_position}, where this schedule"
          " took over; earlier positions had another schedule."
      )
    target = position - self.anchor_position + self._unanchored(self.anchor_step)
    stage = bisect.bisect_right(self._starts, target) - 1
    first, size = self.stages[stage]
    return first + (target - self._starts[stage]) // size

  def anchored(self, step: int, position: int) -> BatchSchedule:
    """The schedule that goes on with `step` at `position`; the same one where they agree already."""
    if step >= self.anchor_step and self.start(step) == position:
      return self
    return dataclasses.replace(self, anchor_step=step, anchor_position=position)

  def _stage(self, step: int) -> int:
    if step < 0:
      raise errors.OrderError(f"Steps count from 0, got {step}.")
    return bisect.bisect_right(self._first_steps, step) - 1

  def _unanchored(self, step: int) -> int:
    stage = self._stage(step)
    first, size = self.stages[stage]
    return self._starts[stage] + (step - first) * size
