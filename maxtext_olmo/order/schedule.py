"""Batch schedules, which say how many samples each step takes, and at which position it starts.

A schedule is a list of stages, each a first step and a batch size:

    BatchSchedule(((0, 4), (3, 8)))     step      0  1  2  3   4
                                        size      4  4  4  8   8
                                        start     0  4  8  12  20

Stages may begin at positions instead of steps (`by_position`); such a stage begins with the first
step that starts at or after its position. An anchor ties one step to a position. A run needs one if
it changes its batch size at a position where the new schedule has no step boundary: it continues
from that position, and counts its later steps from there.

If `epochs` are given, no batch crosses the end of an epoch. The places that remain at its end are
skipped, but positions still count them:

    BatchSchedule(((0, 4),), epochs=Epochs.constant(10))     step       0  1  2   3   4
                                                             start      0  4  10  14  20
                                                             position   0  4  8   14  18

`position` is the number of samples that earlier steps have consumed. It does not include the tail
that the next step skips, because a run that continues with smaller batches can still use the tail.

If samples are skipped (`skips`), no batch takes them, but positions still count them:

    BatchSchedule(((0, 4),), skips=Skips(((4, 7),)))     step       0  1  2   3
                                                         start      0  7  11  15
                                                         position   0  4  11  15

Internally, `_Run` describes consecutive steps of equal size and counts only unskipped samples.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections.abc import Iterable

import numpy as np

from maxtext_olmo import errors
from maxtext_olmo.order import epochs as epochs_lib
from maxtext_olmo.order import skips as skips_lib

_NEVER = 1 << 62


@dataclasses.dataclass(frozen=True)
class BatchSchedule:
  """Maps steps to positions and back, by bisection over the stages and arithmetic within them.

  >>> schedule = BatchSchedule(((0, 4), (3, 8)))  # Batches of 4, and of 8 from step 3 on.
  >>> [schedule.start(step) for step in range(5)]
  [0, 4, 8, 12, 20]
  >>> schedule.step_at(19)
  3

  Attributes:
    stages: `(first step, batch size)` pairs; the first stage begins at step 0.
    anchor_step: First step of the schedule; earlier steps belong to a previous schedule.
    anchor_position: Position at which that step starts.
    by_position: Whether stages begin at positions instead of steps.
    epochs: Epochs whose ends no batch crosses; None if batches may span epochs.
    skips: Positions that no batch takes.
  """

  stages: tuple[tuple[int, int], ...]
  anchor_step: int = 0
  anchor_position: int = 0
  by_position: bool = False
  epochs: epochs_lib.Epochs | None = None
  skips: skips_lib.Skips = skips_lib.Skips()

  def __post_init__(self) -> None:
    unit = "position" if self.by_position else "step"
    firsts = [first for first, _ in self.stages]
    if not firsts or firsts[0] != 0 or any(a >= b for a, b in zip(firsts, firsts[1:])):
      raise errors.ConfigError(
          f"A batch schedule must begin at {unit} 0 and its {unit}s must ascend, got"
          f" {list(self.stages)}."
      )
    if any(size < 1 for _, size in self.stages):
      raise errors.ConfigError(f"A batch must have at least one row, got {list(self.stages)}.")
    if self.anchor_step < 0 or self.anchor_position < 0:
      raise errors.OrderError(
          f"A schedule must be anchored at a step and a position of 0 or more, got step"
          f" {self.anchor_step} at position {self.anchor_position}."
      )
    if self.epochs is not None:
      shortest = self._counted_epochs.shortest  # type: ignore[union-attr]
      if self.sizes[-1] > shortest:
        skipped = " (excluding skipped ones)" if self.skips else ""
        raise errors.ConfigError(
            f"A batch of {self.sizes[-1]} rows does not fit into an epoch of {shortest}"
            f" instances{skipped}, and this order lets no batch span epochs. Make the batch"
            " smaller, or use a different olmo_order."
        )

  @classmethod
  def constant(cls, size: int) -> BatchSchedule:
    """Makes a schedule in which every step takes `size` samples."""
    return cls(((0, size),))

  @classmethod
  def from_tokens(cls, stages: Iterable[tuple[int, int]], *, sequence_length: int) -> BatchSchedule:
    """Makes a schedule from `(tokens, batch size)` pairs.

    A batch size takes effect at the first step that starts after at least `tokens` tokens.
    """
    return cls(
        tuple((-(-tokens // sequence_length), size) for tokens, size in stages), by_position=True
    )

  @classmethod
  def from_factors(
      cls,
      initial_size: int,
      factors: Iterable[tuple[int, float]],
      *,
      sequence_length: int | None = None,
  ) -> BatchSchedule:
    """Makes a schedule from `(boundary, factor)` pairs, each factor relative to the initial size.

    The initial size applies before the first boundary.

    Args:
      initial_size: Batch size in rows for a factor of 1.
      factors: Pairs with boundaries in steps, or in tokens if `sequence_length` is given.
      sequence_length: Number of tokens per row.
    """
    stages = []
    for boundary, factor in factors:
      size = int(initial_size * factor) if math.isfinite(factor) else 0
      if size < 1:
        raise errors.ConfigError(
            f"A batch must have at least one row, but {initial_size} rows times {factor} give"
            f" {size}."
        )
      stages.append((int(boundary), size))
    if not stages or stages[0][0] != 0:
      stages.insert(0, (0, initial_size))
    if sequence_length is None:
      return cls(tuple(stages))
    return cls.from_tokens(stages, sequence_length=sequence_length)

  def within(self, epochs: epochs_lib.Epochs | None) -> BatchSchedule:
    """Returns this schedule with batches that do not cross the ends of the given epochs."""
    return dataclasses.replace(self, epochs=epochs)

  def skipping(self, skips: skips_lib.Skips) -> BatchSchedule:
    """Returns this schedule with batches that leave out the given positions."""
    return dataclasses.replace(self, skips=skips)

  @property
  def sizes(self) -> tuple[int, ...]:
    """The distinct batch sizes, ascending."""
    return tuple(sorted({size for _, size in self.stages}))

  def size(self, step: int) -> int:
    """Returns the number of samples that a step takes."""
    if step < 0:
      raise errors.OrderError(f"Steps count from 0, got {step}.")
    if not self.by_position:
      return self.stages[bisect.bisect_right(self.stages, (step, _NEVER)) - 1][1]
    return self._run_of_step(step).size

  def start(self, step: int) -> int:
    """Returns the position of a step's first sample."""
    return self.skips.position(self._run_of_step(step).start(step))

  def positions(self, step: int) -> np.ndarray:
    """Returns the positions of the samples that a step takes."""
    first = self._run_of_step(step).start(step)
    return self.skips.positions(np.arange(first, first + self.size(step)))

  def position(self, step: int) -> int:
    """Returns where the previous step ended; less than `start` if this step skips places."""
    return self.skips.consumed(self._run_of_step(step).position(step))

  def step_at(self, position: int) -> int:
    """Returns the step that takes the sample at a position, or the next step if none takes it."""
    if position < self.anchor_position:
      raise errors.OrderError(
          f"Position {position} lies before position {self.anchor_position}, where this schedule"
          " begins; earlier positions followed a previous schedule."
      )
    number = self.skips.number(position)
    run = self._runs[
        bisect.bisect_right(self._runs, number, key=lambda run: run.first_position) - 1
    ]
    return run.first_from(number - run.size + 1)

  def block(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the starts and the sizes of `count` consecutive steps.

    The starts do not count skipped samples; `skips.positions` converts them to positions.
    """
    steps = np.arange(first, first + count)
    starts, sizes = np.empty(count, np.int64), np.empty(count, np.int64)
    step = first
    while step < first + count:
      run = self._run_of_step(step)
      number = self._runs.index(run) + 1
      end = first + count
      if number < len(self._runs):
        end = min(end, self._runs[number].first_step)
      here = slice(step - first, end - first)
      starts[here] = run.starts(steps[here])
      sizes[here] = run.size
      step = end
    return starts, sizes

  def anchored(self, step: int, position: int) -> BatchSchedule:
    """Returns a schedule in which `step` starts at `position`; this one if it already does."""
    if step >= self.anchor_step and self.position(step) == position:
      return self
    return dataclasses.replace(self, anchor_step=step, anchor_position=position)

  def _run_of_step(self, step: int) -> _Run:
    if step < 0:
      raise errors.OrderError(f"Steps count from 0, got {step}.")
    if step < self.anchor_step:
      raise errors.OrderError(
          f"Step {step} lies before step {self.anchor_step}, where this schedule begins at position"
          f" {self.anchor_position}; earlier steps followed a previous schedule."
      )
    return self._runs[bisect.bisect_right(self._runs, step, key=lambda run: run.first_step) - 1]

  @functools.cached_property
  def _runs(self) -> list[_Run]:
    """Runs of steps with the same batch size and epoch length, from the anchor on."""
    runs: list[_Run] = []
    step, position = self.anchor_step, self.skips.number(self.anchor_position)
    firsts = [self.skips.number(first) if self.by_position else first for first, _ in self.stages]
    while True:
      stage = bisect.bisect_right(firsts, position if self.by_position else step) - 1
      run, end_of_part = self._run_from(step, position, self.stages[stage][1])
      runs.append(run)
      ends = []
      if stage + 1 < len(self.stages):
        first = firsts[stage + 1]
        # With `by_position`, a stage begins once earlier steps have consumed that many samples.
        ends.append(run.first_from(first - run.size) + 1 if self.by_position else first)
      if end_of_part is not None:
        ends.append(run.first_from(end_of_part))
      if not ends:
        return runs
      step = min(ends)
      position = run.position(step)

  def _run_from(self, step: int, position: int, size: int) -> tuple[_Run, int | None]:
    """Returns the run that begins with a step, and the position where the epoch length changes.

    The position is None if the epoch length never changes again.
    """
    epochs = self._counted_epochs
    if epochs is None:
      return _Run(step, position, position, size, 0, _NEVER), None
    start, epoch = position, epochs.epoch(position)
    while start + size > epochs.start(epoch + 1):
      start, epoch = epochs.start(epoch + 1), epoch + 1
    later = [first for first, _, _ in epochs.parts if first > start]
    run = _Run(step, position, start, size, epochs.start(epoch), epochs.length(epoch))
    return run, later[0] if later else None

  @functools.cached_property
  def _counted_epochs(self) -> epochs_lib.Epochs | None:
    """The epochs, with lengths that exclude skipped samples."""
    if self.epochs is None or not self.skips:
      return self.epochs
    lengths = dict(self.epochs.lengths)
    for first, end in self.skips.ranges:
      for epoch in range(self.epochs.epoch(first), self.epochs.epoch(end - 1) + 1):
        whole = self.epochs.length(epoch)
        start = self.epochs.start(epoch)
        skipped = min(end, start + whole) - max(first, start)
        lengths.setdefault(epoch + 1, self.epochs.length(epoch + 1))
        lengths[epoch] = lengths.get(epoch, whole) - skipped
        if lengths[epoch] < 1:
          raise errors.ConfigError(
              f"The skipped positions {first} to {end} cover all of epoch {epoch}, which this order"
              " does not allow. Skip fewer samples."
          )
    return epochs_lib.Epochs(tuple(sorted(lengths.items())), self.epochs.cut)


@dataclasses.dataclass(frozen=True)
class _Run:
  """Consecutive steps with the same size, in epochs of the same length.

  Attributes:
    first_step: First step of the run.
    first_position: Number of samples that earlier steps consumed, excluding skipped ones.
    first_start: Start of the first step.
    size: Number of samples per step.
    epoch_start: Start of the epoch that contains `first_start`.
    epoch_length: Length of that epoch and of later epochs.
  """

  first_step: int
  first_position: int
  first_start: int
  size: int
  epoch_start: int
  epoch_length: int

  @property
  def _in_first_epoch(self) -> int:
    return (self.epoch_start + self.epoch_length - self.first_start) // self.size

  def starts(self, steps: np.ndarray) -> np.ndarray:
    counts = steps - self.first_step
    epochs, batches = np.divmod(counts - self._in_first_epoch, self.epoch_length // self.size)
    later = self.epoch_start + (epochs + 1) * self.epoch_length + batches * self.size
    first = self.first_start + counts * self.size
    return np.where(counts < self._in_first_epoch, first, later)

  def start(self, step: int) -> int:
    count = step - self.first_step
    if count < self._in_first_epoch:
      return self.first_start + count * self.size
    epochs, batches = divmod(count - self._in_first_epoch, self.epoch_length // self.size)
    return self.epoch_start + (epochs + 1) * self.epoch_length + batches * self.size

  def position(self, step: int) -> int:
    return self.first_position if step == self.first_step else self.start(step - 1) + self.size

  def first_from(self, position: int) -> int:
    """Returns the first step that starts at or after a position, as if the run had no end."""
    epochs, place = divmod(position - self.epoch_start, self.epoch_length)
    if epochs < 0 or position <= self.first_start:
      return self.first_step
    if epochs == 0:
      batches = -(-(position - self.first_start) // self.size)
      return self.first_step + min(batches, self._in_first_epoch)
    per_epoch = self.epoch_length // self.size
    batches = min(-(-place // self.size), per_epoch)
    return self.first_step + self._in_first_epoch + (epochs - 1) * per_epoch + batches
