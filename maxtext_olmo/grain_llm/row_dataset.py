"""Rows of a language model as a Grain dataset, and batches of rows that come one after the other.

`RowDataset` is what `make_grain_llm_dataset` returns: an `IterDataset` of rows. If its rows are
random access, it also has them as `rows`, so that batches and mixtures need not stream. If they are
packed as they come, `open` returns the stream, read by any number of worker processes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import grain
import numpy as np

from maxtext_olmo.devices import grain_state
from maxtext_olmo.errors import ResumeError
from maxtext_olmo.grain_llm import records as records_lib
from maxtext_olmo.grain_llm import row_source
from maxtext_olmo.grain_llm import steps as steps_lib
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.rows import prefetch


@dataclasses.dataclass(frozen=True)
class RowInfo:
  """What is known of the rows of a dataset.

  Attributes:
    length: Tokens of a row; None if rows are not padded.
    shard: `slice` if each host has rows of its own, `batch` if all hosts share one stream, of which
      each takes its rows of a batch.
    packed: Whether the number of rows does not follow from the number of documents, because rows
      are packed, split or filtered.
    endless: Whether rows never end.
    host_rows: The rows of each host until the end; empty if unknown or without end.
    identity: What decides which row comes at which position, for all hosts together; empty if
      unknown.
    version_1: The identity of each host in states of version 1; `host` is this host's.
    host: Which of them this host is.
  """

  length: int | None
  shard: str
  packed: bool
  endless: bool
  host_rows: tuple[int, ...] = ()
  identity: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  version_1: tuple[str, ...] = ("",)
  host: int = 0


class RowDataset(grain.IterDataset[dict[str, np.ndarray]]):
  """Rows, one at a time."""

  def __init__(
      self,
      info: RowInfo,
      *,
      rows: row_source.RowSource | None = None,
      open_stream: Callable[[int, int], grain.IterDataset] | None = None,
  ):
    super().__init__()
    self.info = info
    self.rows = rows
    self._open_stream = open_stream

  def open(self, workers: int = 0, ahead: int = 1) -> grain.IterDataset:
    """Returns the rows as a stream, the same for any number of processes that read documents."""
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
    self._steps = steps_lib.RowStepDataset(rows, one, {1: np.zeros(1, np.int64)}, length=None)

  def __len__(self) -> int:
    return len(self._steps)

  def __getitem__(self, index):
    if isinstance(index, slice):
      return self.slice(index)
    return {name: values[0] for name, values in self._steps[index].items()}


class StreamBatches(grain.IterDataset[dict[str, np.ndarray]]):
  """Batches of rows that come one after the other; the state is the step and that of the rows.

  Args:
    rows: The stream.
    schedule: How many rows each step takes from it.
    mine: For each batch size, the rows that this host keeps.
    length: Tokens of a row; None pads to the longest of a batch.
    drop_remainder: Whether a last batch that is not full is dropped; otherwise it is padded.
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
      # Over all rows, not only this host's, so that hosts that share a batch agree on its length.
      length = max(len(row["inputs"]) for row in rows)
    return records_lib.stack(kept, len(mine), length)

  def get_state(self) -> dict[str, Any]:
    return {"step": self._step, "rows": self._parent.get_state()}

  def set_state(self, state: dict[str, Any]) -> None:
    if not isinstance(state, dict) or set(state) != {"step", "rows"}:
      raise ResumeError(
          f"Expected the state of packed batches, with 'step' and 'rows', found {state!r}: it was"
          " saved by another kind of pipeline."
      )
    state = grain_state.from_json(state)
    self._parent.set_state(state["rows"])
    self._step = state["step"]
    self._ended = False


class SplitDocuments(grain.experimental.FlatMapTransform):
  """Divides or cuts documents that are longer than a row."""

  max_fan_out = 1 << 20

  def __init__(self, length: int, long_documents: str):
    self._length = length
    self._long_documents = long_documents

  def flat_map(self, element: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    return records_lib.fit(element, self._length, self._long_documents)


class ToRecord(grain.transforms.Map):
  """Turns any element with tokens into a record with arrays of its own."""

  def map(self, element: Any) -> dict[str, np.ndarray]:
    return records_lib.record_of(element)


class ToRow(grain.transforms.Map):
  """Turns a record into a row: cut if asked, padded, shifted, its documents numbered."""

  def __init__(self, length: int, long_documents: str, pad: bool, shift: row_source.Shift):
    self._length = length
    self._long_documents = long_documents
    self._pad = pad
    self._shift = shift

  def map(self, element: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    (record,) = records_lib.fit(element, self._length, self._long_documents)
    row = records_lib.padded(record, self._length if self._pad else None)
    return records_lib.segmented(self._shift.apply(row), self._shift.eod_token_id)


class ShiftRow(grain.transforms.Map):
  """Shifts a packed row."""

  def __init__(self, shift: row_source.Shift):
    self._shift = shift

  def map(self, element: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return self._shift.apply(element)
