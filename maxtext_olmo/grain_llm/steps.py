"""Batches of rows by position: step k takes the rows from `schedule.start(k)` on."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import overload

import grain
import numpy as np

from maxtext_olmo.errors import OrderError
from maxtext_olmo.grain_llm import records as records_lib
from maxtext_olmo.grain_llm import row_source
from maxtext_olmo.grain_llm.row_source import Rows
from maxtext_olmo.order import schedule as schedule_lib


class RowStepDataset(grain.MapDataset[Rows]):
  """Maps a step to this host's rows of its batch.

  An element at or past an end that was not known when this dataset was made is {}.

  Args:
    source: Where rows come from.
    schedule: Where each step starts and how many rows it takes.
    rows: For each batch size, the rows of the batch that this host holds; rows at or past the batch
      size are padding.
    length: Tokens of a row.
    num_steps: Steps to the end, if all hosts have agreed on it; otherwise the source's end decides.
    drop_remainder: Whether a last batch that is not full is dropped; otherwise it is padded.
  """

  def __init__(
      self,
      source: row_source.RowSource,
      schedule: schedule_lib.BatchSchedule,
      rows: Mapping[int, np.ndarray],
      *,
      length: int | None,
      num_steps: int | None = None,
      drop_remainder: bool = False,
  ):
    super().__init__()
    self._source = source
    self._schedule = schedule
    self._rows = dict(rows)
    self._length = length
    self._num_steps = num_steps
    self._drop_remainder = drop_remainder
    # A reader that saw no end may ask for elements past it after it has been counted.
    self._open_end = num_steps is None and not source.endless and source.num_rows is None

  def __len__(self) -> int:
    steps = self._num_steps
    if steps is None and not self._source.endless and self._source.num_rows is not None:
      steps = steps_of(self._schedule, self._source.num_rows, self._drop_remainder)
    return sys.maxsize if steps is None else max(0, steps)

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
      raise OrderError(f"Step {index} is outside the stream, which has {len(self)} steps.")
    size = self._schedule.size(index)
    start = self._schedule.start(index)
    if self._num_steps is None and not self._has_batch(start, size):
      return {}
    mine = self._rows[size]
    positions = start + mine
    real = mine < size
    # Only the last batches of a stream reach past its end.
    if real.any() and not self._source.has(int(positions[real].max())):
      real &= np.array([self._source.has(int(position)) for position in positions])
    made = self._source.rows(positions[real]) if real.any() else {}
    return fill(made, real, self._length)

  def _has_batch(self, start: int, size: int) -> bool:
    last = start + size - 1 if self._drop_remainder else start
    return self._source.endless or self._source.has(last)


def fill(made: Rows, real: np.ndarray, length: int | None) -> Rows:
  """Returns rows with rows of padding inserted where `real` is false."""
  if made and real.all():
    return made
  if not made:
    return records_lib.stack([], len(real), length)
  filled = {}
  for name, values in made.items():
    filled[name] = np.zeros((len(real), values.shape[1]), np.int32)
    filled[name][real] = values
  return filled


def steps_of(schedule: schedule_lib.BatchSchedule, rows: int, drop_remainder: bool) -> int:
  """Returns the number of steps, counted from step 0, until `rows` rows are used up."""
  if rows <= schedule.anchor_position:
    return schedule.anchor_step
  return schedule.step_at(rows) if drop_remainder else schedule.step_at(rows - 1) + 1
