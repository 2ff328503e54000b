"""Batches of rows at positions: the rows of step k are those from `schedule.start(k)` on."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import overload

import grain
import numpy as np

from maxtext_olmo.errors import OrderError
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.rows import records as tokens_lib
from maxtext_olmo.rows import rows as rows_lib
from maxtext_olmo.rows.rows import Rows


class RowStepDataset(grain.MapDataset[Rows]):
  """Step → this host's rows of the batch; {} at and past an end that was not known before.

  Args:
    source: Where rows come from.
    schedule: Where each step starts and how many rows it takes.
    rows: For each batch size, the rows of the batch that this host holds; past the size, they are
      padding.
    length: Tokens of a row.
    first_step: The step that element 0 is.
    num_steps: Steps to the end, counted from step 0, where that is agreed; else the source's end
      decides.
    drop_remainder: Whether a last batch that is not full is left out; else it is filled up with
      padding.
    with_cost: Whether `cost` is there too, as `steps.StepDataset` has it.
  """

  def __init__(
      self,
      source: rows_lib.RowSource,
      schedule: schedule_lib.BatchSchedule,
      rows: Mapping[int, np.ndarray],
      *,
      length: int | None,
      first_step: int = 0,
      num_steps: int | None = None,
      drop_remainder: bool = False,
      with_cost: bool = False,
  ):
    super().__init__()
    self._source = source
    self._schedule = schedule
    self._rows = dict(rows)
    self._length = length
    self._first_step = first_step
    self._num_steps = num_steps
    self._drop_remainder = drop_remainder
    self._with_cost = with_cost
    # Whoever asked for the length while it was not known may go on past the end after it is.
    self._open_end = num_steps is None and not source.endless and source.num_rows is None

  def __len__(self) -> int:
    steps = self._num_steps
    if steps is None and not self._source.endless and self._source.num_rows is not None:
      steps = steps_of(self._schedule, self._source.num_rows, self._drop_remainder)
    return sys.maxsize if steps is None else max(0, steps - self._first_step)

  @overload
  def __getitem__(self, index: slice) -> grain.MapDataset[Rows]:
    ...

  @overload
  def __getitem__(self, index: int) -> Rows:
    ...

  def __getitem__(self, index):
    if isinstance(index, slice):
      return self.slice(index)
    if index >= len(self) and self._open_end:
      return {}
    if not 0 <= index < len(self):
      raise OrderError(f"Step {self._first_step + index} lies outside the stream.")
    step = self._first_step + index
    size = self._schedule.size(step)
    start = self._schedule.start(step)
    if self._num_steps is None and not self._there(start, size):
      return {}
    mine = self._rows[size]
    positions = start + mine
    real = mine < size
    # Only the last batches of a stream reach past its end.
    if real.any() and not self._source.has(int(positions[real].max())):
      real &= np.array([self._source.has(int(position)) for position in positions])
    cost = rows_lib.Cost()
    made = self._source.rows(positions[real], cost) if real.any() else {}
    filled = fill(made, real, self._length)
    if self._with_cost:
      filter_seconds = 0.0
      filled["cost"] = np.array(
          (cost.order_seconds, cost.read_seconds, filter_seconds, cost.bytes_read, cost.reads)
      )
    return filled

  def _there(self, start: int, size: int) -> bool:
    return self._source.endless or self._source.has(
        start + size - 1 if self._drop_remainder else start
    )


def fill(made: Rows, real: np.ndarray, length: int | None) -> Rows:
  """Rows with padding rows where they are not real."""
  if made and real.all():
    return made
  if not made:
    return tokens_lib.stack([], len(real), length)
  filled = {}
  for name, values in made.items():
    filled[name] = np.zeros((len(real), values.shape[1]), np.int32)
    filled[name][real] = values
  return filled


def steps_of(schedule: schedule_lib.BatchSchedule, rows: int, drop_remainder: bool) -> int:
  """The steps that so many rows make, from step 0."""
  if rows <= schedule.anchor_position:
    return schedule.anchor_step
  return schedule.step_at(rows) if drop_remainder else schedule.step_at(rows - 1) + 1
