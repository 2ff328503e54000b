"""Rows by position: the random-access rows of the Grain LLM pipelines.

A row source returns the six arrays of any rows at once, by position, and knows how many there are
(`steps` makes batches of them):

    records   one row per document, padded          MapRows
    plan      documents packed by a plan            PlannedRows
    mixture   rows of several sources, by weight    mixed_rows.MixedRows
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, Protocol

import grain
import numpy as np

from maxtext_olmo.grain_llm import records as records_lib
from maxtext_olmo.order import base
from maxtext_olmo.rows import planned
from maxtext_olmo.rows import row_source
from maxtext_olmo.rows import segments as segments_lib

Rows = dict[str, np.ndarray]


class RowSource(Protocol):
  """Maps positions to rows."""

  @property
  def num_rows(self) -> int | None:
    """Rows in all; None if there is no end, or if it has not been counted yet."""

  @property
  def epoch_rows(self) -> int | None:
    """Rows of an epoch; None if they have not been counted yet."""

  @property
  def endless(self) -> bool:
    """Whether there is no end."""

  def has(self, position: int) -> bool:
    """Returns whether there is a row at a position."""

  def rows(self, positions: np.ndarray) -> Rows:
    """Returns the six arrays, (positions, L) each."""

  def count_ahead(self, position: int) -> None:
    """Starts counting, in the background, what a resume near a position would have to count."""

  def settle(self, limit: int) -> bool:
    """Counts the rows if that means packing at most `limit` documents; returns whether it did."""

  def close(self) -> None:
    """Stops what runs in the background."""


@dataclasses.dataclass(frozen=True)
class Shift:
  """How rows are shifted: `left` moves the targets, `right` moves the inputs, None neither."""

  direction: str | None = "left"
  eod_token_id: int = 0

  def apply(self, rows: Rows) -> Rows:
    """Returns shifted rows."""
    if self.direction is None:
      return rows
    return records_lib.shifted(
        rows, shift_target=self.direction == "left", eod_token_id=self.eod_token_id
    )


class OrderedDataset(grain.MapDataset[Any]):
  """A dataset in the order of each epoch, for `num_epochs` epochs; None for no end."""

  def __init__(self, parent: grain.MapDataset, order: base.Order, num_epochs: int | None):
    super().__init__(parent)
    self._order = order
    self._num_epochs = num_epochs

  def __len__(self) -> int:
    if self._num_epochs is None:
      return sys.maxsize
    return self._num_epochs * self._order.num_instances

  def __getitem__(self, index):
    if isinstance(index, slice):
      return self.slice(index)
    return self._parent[int(self._order.at(np.array([index]))[0])]


class MapRows:
  """The rows of a `MapDataset` of rows, `epoch_rows` of them in an epoch."""

  def __init__(self, dataset: grain.MapDataset, epoch_rows: int, length: int | None):
    self._dataset = dataset
    self._length = length
    self.epoch_rows = epoch_rows

  @property
  def endless(self) -> bool:
    return len(self._dataset) == sys.maxsize

  @property
  def num_rows(self) -> int | None:
    return None if self.endless else len(self._dataset)

  def has(self, position: int) -> bool:
    return position < len(self._dataset)

  def rows(self, positions: np.ndarray) -> Rows:
    rows = [self._dataset[position] for position in positions.tolist()]
    return records_lib.stack(rows, len(rows), self._length)

  def count_ahead(self, position: int) -> None:
    del position

  def settle(self, limit: int) -> bool:
    del limit
    return True

  def close(self) -> None:
    pass


class PartSource(Protocol):
  """A source that reads parts of documents, such as `OlmoDocumentSource`."""

  def read_parts(
      self, document_ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray, out: list[np.ndarray]
  ) -> int:
    """Reads tokens [start, start + length) of each document into its array in `out`."""


class RecordParts:
  """Parts of the records of a dataset, whose lengths are found by reading each record once."""

  def __init__(self, dataset: grain.MapDataset):
    self._dataset = dataset
    found = (self.record(number) for number in range(len(dataset)))
    sizes = [0 if record is None else len(record["inputs"]) for record in found]
    self._lengths = np.array(sizes, np.int64)
    self.num_tokens = sum(sizes)

  def record(self, number: int) -> records_lib.Record | None:
    """Returns a record, or None if it was filtered out."""
    element = self._dataset[number]
    return None if element is None else records_lib.record_of(element)

  def lengths(self, document_ids: np.ndarray) -> np.ndarray:
    """Returns the numbers of tokens of records; 0 for those that were filtered out."""
    return self._lengths[document_ids]


class PlannedRows:
  """Documents packed by a plan, shifted; the segments of a row number its documents.

  Args:
    source: Where parts of documents are read from.
    plan: Which parts make up which row.
    length: Tokens of a row.
    shift: How inputs and targets are shifted.
    num_epochs: Epochs until the end; None for no end.
  """

  def __init__(
      self,
      source: PartSource | RecordParts,
      plan: planned.PackingPlan,
      length: int,
      *,
      shift: Shift = Shift(),
      num_epochs: int | None = None,
  ):
    self.plan = plan
    self._source = source
    self._length = length
    self._shift = shift
    self._num_epochs = num_epochs
    rows = planned.PlannedRows(plan, length, fingerprint="")
    self._stream = row_source.RowSequence(rows, name="", seed=0, num_epochs=num_epochs)

  @property
  def endless(self) -> bool:
    return self._num_epochs is None

  @property
  def num_rows(self) -> int | None:
    return None if self._num_epochs is None else self.plan.num_rows(self._num_epochs)

  @property
  def epoch_rows(self) -> int | None:
    return self.plan.num_rows(1)

  def has(self, position: int) -> bool:
    return self.plan.has_row(position, self._num_epochs)

  def rows(self, positions: np.ndarray) -> Rows:
    shape = (len(positions), self._length)
    table = row_source.parts_at(self._stream.source, self._stream, positions)
    rule = segments_lib.SegmentRule("part")
    begins = segments_lib.segment_starts(np.zeros(shape, np.bool_), table.used, rule, table)
    segments, places = segments_lib.segments_and_positions(begins, table.used)
    documents, starts, lengths = table.source, table.first, table.count
    firsts = table.row * self._length + table.column
    spans = [slice(a, a + n) for a, n in zip(firsts.tolist(), lengths.tolist())]
    made = {
        "inputs": np.zeros(shape, np.int32),
        "inputs_position": places,
        "inputs_segmentation": segments,
        "targets_position": places,
    }
    if isinstance(self._source, RecordParts):
      self._read_records(made, documents, starts, lengths, spans)
    else:
      flat = made["inputs"].reshape(-1)
      self._source.read_parts(documents, starts, lengths, [flat[span] for span in spans])
      made["targets"], made["targets_segmentation"] = made["inputs"], segments
    return self._shift.apply(made)

  def count_ahead(self, position: int) -> None:
    self.plan.count_ahead(position, self._num_epochs)

  def settle(self, limit: int) -> bool:
    # All hosts decide alike, because the decision depends on the number of documents alone.
    epochs = self._num_epochs or 1
    if epochs * self.plan.num_documents > limit:
      return False
    self.plan.count(epochs)
    return True

  def close(self) -> None:
    self.plan.close()

  def _read_records(
      self,
      made: Rows,
      documents: np.ndarray,
      starts: np.ndarray,
      lengths: np.ndarray,
      spans: list[slice],
  ) -> None:
    segments = made["inputs_segmentation"]
    made["targets"] = np.zeros_like(made["inputs"])
    made["targets_segmentation"] = segments.copy()
    flat = {name: values.reshape(-1) for name, values in made.items()}
    for document, start, length, span in zip(
        documents.tolist(), starts.tolist(), lengths.tolist(), spans
    ):
      record = self._source.record(document)  # type: ignore[union-attr]
      for name, values in (record or {}).items():
        part = values[start : start + length]
        if name.endswith("_segmentation"):
          flat[name][span] *= part != 0
        else:
          flat[name][span] = part
