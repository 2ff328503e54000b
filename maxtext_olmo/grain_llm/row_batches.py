"""Batches of random-access rows: step k takes the rows from `schedule.start(k)` on."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import grain
import numpy as np

from maxtext_olmo.grain_llm import records as records_lib
from maxtext_olmo.grain_llm import rows_by_position
from maxtext_olmo.grain_llm.records import Record
from maxtext_olmo.order import schedule as schedule_lib


@dataclasses.dataclass(frozen=True)
class Batching:
  """The division of rows into this host's batches.

  Attributes:
    schedule: Schedule, which says where each step starts and how many rows it takes.
    mine: For each batch size, the rows of the batch that this host holds, in ascending order. Row
      numbers at or above the batch size are padding.
    length: Tokens per row; None pads to the longest row of a batch.
    drop_remainder: Whether a last batch that is not full is dropped; otherwise it is padded.
  """

  schedule: schedule_lib.BatchSchedule
  mine: Mapping[int, np.ndarray]
  length: int | None
  drop_remainder: bool

  @property
  def spec(self) -> dict[str, Any]:
    """The shape and dtype of the arrays of the first batch."""
    return records_lib.row_spec((len(self.mine[self.schedule.size(0)]), self.length))


class RowBatches(grain.MapDataset[Record]):
  """Maps a step to this host's rows of its batch; an element past the end is {}.

  Args:
    source: Source of the rows.
    batching: Division of the rows into batches.
    num_steps: Number of steps until the end, if all hosts have agreed on it; otherwise the end of
      the source decides.
  """

  def __init__(
      self,
      source: rows_by_position.RowsByPosition,
      batching: Batching,
      num_steps: int | None = None,
  ):
    super().__init__()
    self._source = source
    self._batching = batching
    self._num_steps = num_steps

  def __len__(self) -> int:
    if self._num_steps is not None:
      return self._num_steps
    count, batching = self._source.num_rows, self._batching
    if count is None:
      return sys.maxsize
    return steps_of(batching.schedule, count, batching.drop_remainder)

  def __getitem__(self, index):
    if isinstance(index, slice):
      return self.slice(index)
    batching = self._batching
    size, start = batching.schedule.size(index), batching.schedule.start(index)
    if self._num_steps is not None:
      ended = index >= self._num_steps
    else:
      ended = not self._source.has(start + size - 1 if batching.drop_remainder else start)
    if ended:
      return {}
    mine = batching.mine[size]
    positions = start + mine[mine < size]
    # Only the last batches of a stream reach past its end.
    while positions.size and not self._source.has(int(positions[-1])):
      positions = positions[:-1]
    rows = self._source.rows(positions) if positions.size else []
    return records_lib.stack(rows, len(mine), batching.length)

  @property
  def _element_spec(self) -> dict[str, Any]:
    return self._batching.spec


def steps_of(schedule: schedule_lib.BatchSchedule, rows: int, drop_remainder: bool) -> int:
  """Returns the number of steps, counted from step 0, until `rows` rows are used up."""
  if rows <= schedule.anchor_position:
    return schedule.anchor_step
  return schedule.step_at(rows) if drop_remainder else schedule.step_at(rows - 1) + 1
