"""Rows of a language model as a Grain dataset, and batches of rows that come one after the other.

`RowDataset` is what `make_grain_llm_dataset` returns: an `IterDataset` of rows. Where its rows are random access it also
has them as `rows`, so that batches and mixtures need not stream; where they are packed as they come, `open` gives the
stream, with as many worker processes as asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import grain
import numpy as np

from maxtext_olmo.errors import ResumeError
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.rows import prefetch
from maxtext_olmo.rows import records as tokens_lib
from maxtext_olmo.rows import row_steps
from maxtext_olmo.rows import rows as rows_lib


@dataclasses.dataclass(frozen=True)
class Facts:
  """What a batch maker must know of rows.

  Attributes:
    length: Tokens of a row; None where rows are not padded.
    shard: `slice`: the rows are this host's own; `batch`: they are all hosts', who each take theirs of a batch.
    packed: Whether rows hold several documents, so that their number does not follow from that of documents.
    endless: Whether rows never end.
    host_rows: The rows of each host until the end, where that is known; empty where there is none or nobody knows.
    identity: Names the rows and their order; empty where nobody knows.
  """

  length: int | None
  shard: str
  packed: bool
  endless: bool
  host_rows: tuple[int, ...] = ()
  identity: str = ""


class RowDataset(grain.IterDataset[dict[str, np.ndarray]]):
  """Rows, one at a time."""

  def __init__(
      self,
      facts: Facts,
      *,
      rows: rows_lib.RowSource | None = None,
      open_stream: Callable[[int, int], grain.IterDataset] | None = None,
  ):
    super().__init__()
    self.facts = facts
    self.rows = rows
    self._open_stream = open_stream

  def open(self, workers: int = 0, ahead: int = 1) -> grain.IterDataset:
    """The rows as a stream; `workers` processes read documents, the same rows come for any number of them."""
    if self._open_stream is not None:
      return self._open_stream(workers, ahead)
    return prefetch.PrefetchedDataset(_Single(self.rows), workers=workers, ahead=ahead)

  def __iter__(self) -> grain.DatasetIterator[dict[str, np.ndarray]]:
    return iter(self.open())


class _Single(grain.MapDataset[dict[str, np.ndarray]]):
  """Random-access rows one by one."""

  def __init__(self, rows: Any):
    super().__init__()
    one = schedule_lib.BatchSchedule.constant(1)
    self._steps = row_steps.RowStepDataset(rows, one, {1: np.zeros(1, np.int64)}, length=None)

  def __len__(self) -> int:
    return len(self._steps)

  def __getitem__(self, index):
    if isinstance(index, slice):
      return self.slice(index)
    return {name: values[0] for name, values in self._steps[index].items()}


class StreamBatches(grain.IterDataset[dict[str, np.ndarray]]):
  """Batches of rows that come one after the other; the state is the step and the state of the rows.

  Args:
    rows: The stream.
    schedule: How many rows each step takes from it.
    mine: For each size, which of them this host keeps.
    length: Tokens of a row; None pads to the longest of a batch.
    drop_remainder: Whether a last batch that is not full is left out; else it is filled up with padding.
  """

  def __init__(
      self,
      rows: grain.IterDataset,
      schedule: schedule_lib.BatchSchedule,
      mine: Mapping[int, np.ndarray],
      *,
      length: int | None,
      drop_remainder: bool,
  ):
    super().__init__(rows)
    self._schedule = schedule
    self._mine = dict(mine)
    self._length = length
    self._drop_remainder = drop_remainder

  def __iter__(self) -> grain.DatasetIterator[dict[str, np.ndarray]]:
    return _StreamBatchesIterator(
        iter(self._parent), self._schedule, self._mine, self._length, self._drop_remainder
    )


class _StreamBatchesIterator(grain.DatasetIterator[dict[str, np.ndarray]]):

  def __init__(self, parent, schedule, mine, length, drop_remainder):
    super().__init__(parent)
    self._schedule = schedule
    self._mine = mine
    self._length = length
    self._drop_remainder = drop_remainder
    self._step = 0
    self._ended = False

  def __next__(self) -> dict[str, np.ndarray]:
    if self._ended:
      raise StopIteration
    size = self._schedule.size(self._step)
    rows = []
    for _ in range(size):
      try:
        rows.append(next(self._parent))
      except StopIteration:
        self._ended = True
        break
    if not rows or (self._ended and self._drop_remainder):
      self._ended = True
      raise StopIteration
    self._step += 1
    mine = self._mine[size]
    kept = [rows[i] for i in mine.tolist() if i < len(rows)]
    length = self._length
    if length is None:
      # All of them, not only this host's, so that hosts that take rows of one batch agree on its length.
      length = max(len(row["inputs"]) for row in rows)
    return tokens_lib.stack(kept, len(mine), length)

  def get_state(self) -> dict[str, Any]:
    return {"step": self._step, "rows": self._parent.get_state()}

  def set_state(self, state: dict[str, Any]) -> None:
    if not isinstance(state, dict) or set(state) != {"step", "rows"}:
      raise ResumeError(
          f"Expected the state of packed batches, with 'step' and 'rows', found {state!r}: it was saved by another kind"
          " of pipeline."
      )
    self._parent.set_state(_with_tuples(state["rows"]))
    self._step = state["step"]
    self._ended = False


def _with_tuples(state: Any, slices: bool = False) -> Any:
  """The state as Grain's concat-then-split compares it: its slices are tuples, which JSON turns into lists."""
  if isinstance(state, dict):
    return {k: _with_tuples(v, slices or k == "remainder_slices") for k, v in state.items()}
  if isinstance(state, list):
    return tuple(state) if slices else [_with_tuples(part) for part in state]
  return state


class SplitDocuments(grain.experimental.FlatMapTransform):
  """Documents longer than a row → pieces that are not."""

  max_fan_out = 1 << 20

  def __init__(self, length: int, long_documents: str):
    self._length = length
    self._long_documents = long_documents

  def flat_map(self, element: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    return tokens_lib.fit(element, self._length, self._long_documents)


class ToRecord(grain.transforms.Map):
  """Any element with tokens → a record of its own arrays."""

  def map(self, element: Any) -> dict[str, np.ndarray]:
    return tokens_lib.record_of(element)


class ToRow(grain.transforms.Map):
  """A record → a row: cut to the length where asked, padded, shifted, and its documents numbered."""

  def __init__(self, length: int, long_documents: str, pad: bool, shift: rows_lib.Shift):
    self._length = length
    self._long_documents = long_documents
    self._pad = pad
    self._shift = shift

  def map(self, element: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    (record,) = tokens_lib.fit(element, self._length, self._long_documents)
    row = tokens_lib.padded(record, self._length if self._pad else None)
    return tokens_lib.segmented(self._shift.apply(row), self._shift.eod_token_id)


class ShiftRow(grain.transforms.Map):
  """A packed row, shifted."""

  def __init__(self, shift: rows_lib.Shift):
    self._shift = shift

  def map(self, element: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return self._shift.apply(element)
