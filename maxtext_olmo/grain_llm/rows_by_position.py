"""Rows by position: the random-access rows of the Grain LLM pipelines.

MapRows          one row per document, padded
PlannedRecords   documents packed by a plan
MixedRecords     rows of several sources, by weight. With weights 2 and 1:

                 position    0   1   2   3   4   5
                 row         a0  b0  a1  a2  b1  a3
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np

from maxtext_olmo import grain_compat
from maxtext_olmo.corpus import source as source_lib
from maxtext_olmo.grain_llm import records as records_lib
from maxtext_olmo.grain_llm.records import Record
from maxtext_olmo.order import base
from maxtext_olmo.order import interleave
from maxtext_olmo.rows import planned
from maxtext_olmo.rows import row_sequence
from maxtext_olmo.rows import row_source
from maxtext_olmo.rows import segments as segments_lib


class RowsByPosition(grain.MapDataset[Record]):
  """Maps positions to rows; an element past the end is {}.

  Attributes:
    endless: Whether the rows have no end.
    row_length: Number of tokens per row; None if rows are not padded.
  """

  endless: bool
  row_length: int | None

  @property
  def num_rows(self) -> int | None:
    """The total number of rows; None if there is no end, or if rows are not counted yet."""
    raise NotImplementedError

  @property
  def epoch_rows(self) -> int | None:
    """The number of rows of an epoch; None if they have not been counted yet."""
    raise NotImplementedError

  def rows(self, positions: np.ndarray) -> list[Record]:
    """Returns the rows at the given positions, all of which must exist."""
    raise NotImplementedError

  def has(self, position: int) -> bool:
    """Returns whether there is a row at a position."""
    return self.endless or position < (self.num_rows or 0)

  def count_ahead(self, position: int) -> None:
    """Starts to count, in the background, the rows that a resume near a position needs."""

  def settle(self, limit: int) -> bool:
    """Counts the rows if at most `limit` documents are packed; returns whether they are counted."""
    del limit
    return True

  def close(self) -> None:
    """Stops background work."""

  def __len__(self) -> int:
    count = self.num_rows
    return sys.maxsize if count is None else count

  def __getitem__(self, index):
    if isinstance(index, slice):
      return self.slice(index)
    return self.rows(np.array([index]))[0] if self.has(index) else {}

  @property
  def _element_spec(self) -> dict[str, Any]:
    """The spec for `grain.experimental.get_element_spec`."""
    return records_lib.row_spec((self.row_length,))


class OrderedDataset(grain.MapDataset[Any]):
  """The elements of a dataset in the order of each epoch; `num_epochs=None` repeats without end."""

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

  @property
  def _element_spec(self) -> Any:
    return grain_compat.get_element_spec(self._parent)


class MapRows(RowsByPosition):
  """The rows of a `MapDataset`, with `epoch_rows` rows per epoch."""

  def __init__(self, dataset: grain.MapDataset, epoch_rows: int, row_length: int | None = None):
    super().__init__(dataset)
    self._epoch_rows = epoch_rows
    self.row_length = row_length
    self.endless = len(dataset) == sys.maxsize

  @property
  def num_rows(self) -> int | None:
    return None if self.endless else len(self._parent)

  @property
  def epoch_rows(self) -> int:
    return self._epoch_rows

  def rows(self, positions: np.ndarray) -> list[Record]:
    return [self._parent[position] for position in positions.tolist()]


class RecordParts:
  """The records of a dataset by number; finds their lengths by reading each record once."""

  def __init__(self, dataset: grain.MapDataset):
    self._dataset = dataset
    found = (self.record(number) for number in range(len(dataset)))
    self._lengths = np.array([len(record.get("inputs", ())) for record in found], np.int64)
    self.num_tokens = int(self._lengths.sum())

  def record(self, number: int) -> Record:
    """Returns a record; {} if it was filtered out."""
    element = self._dataset[number]
    return {} if element is None else records_lib.record_of(element)

  def lengths(self, document_ids: np.ndarray) -> np.ndarray:
    """Returns the number of tokens of each record; 0 for records that were filtered out."""
    return self._lengths[document_ids]


class PlannedRecords(RowsByPosition):
  """Shifted rows of documents that are packed by a plan; each document in a row is a segment.

  Args:
    source: Source of the documents.
    plan: Packing plan, which says which parts make up which row.
    length: Number of tokens per row.
    shift: Direction in which rows are shifted (`records.shifted`).
    eod_token_id: First token of the inputs, if inputs are shifted.
    num_epochs: Number of epochs until the end; None for no end.
  """

  def __init__(
      self,
      source: source_lib.OlmoDocumentSource | RecordParts,
      plan: planned.PackingPlan,
      length: int,
      *,
      shift: str | None = "left",
      eod_token_id: int = 0,
      num_epochs: int | None = None,
  ):
    super().__init__()
    self.plan = plan
    self._source = source
    self.row_length = self._length = length
    self._shift = shift
    self._eod_token_id = eod_token_id
    rows = planned.PlannedRows(plan, length, fingerprint="")
    self._stream = row_sequence.RowSequence(rows, name="", seed=0, num_epochs=num_epochs)
    self.endless = self._stream.endless

  @property
  def num_rows(self) -> int | None:
    return self._stream.num_positions

  @property
  def epoch_rows(self) -> int | None:
    return self.plan.num_rows(0)

  def has(self, position: int) -> bool:
    return self._stream.has(position)

  def rows(self, positions: np.ndarray) -> list[Record]:
    shape = (len(positions), self._length)
    table = row_source.parts_at(self._stream.source, self._stream, positions)
    rule = segments_lib.SegmentRule("part")
    begins = segments_lib.segment_starts(np.zeros(shape, np.bool_), table.used, rule, table)
    segments, places = segments_lib.segments_and_positions(begins, table.used)
    made = {
        "inputs": np.zeros(shape, np.int32),
        "inputs_position": places,
        "inputs_segmentation": segments,
        "targets_position": places,
    }
    firsts = table.row * self._length + table.column
    spans = [slice(a, a + n) for a, n in zip(firsts.tolist(), table.count.tolist())]
    if isinstance(self._source, RecordParts):
      made["targets"] = np.zeros(shape, np.int32)
      made["targets_segmentation"] = segments.copy()
      flat = {name: values.reshape(-1) for name, values in made.items()}
      for document, first, span in zip(table.source.tolist(), table.first.tolist(), spans):
        for name, values in self._source.record(document).items():
          part = values[first : first + span.stop - span.start]
          if name.endswith("_segmentation"):
            flat[name][span] *= part != 0
          else:
            flat[name][span] = part
    else:
      tokens = made["inputs"].reshape(-1)
      out = [tokens[span] for span in spans]
      self._source.read_parts(table.source, table.first, table.count, out)
      made["targets"], made["targets_segmentation"] = made["inputs"], segments
    made = records_lib.shifted(made, self._shift, self._eod_token_id)
    return [{name: values[i] for name, values in made.items()} for i in range(len(positions))]

  def count_ahead(self, position: int) -> None:
    self._stream.look_ahead(position)

  def settle(self, limit: int) -> bool:
    # All hosts decide the same, because the decision depends only on the number of documents.
    epochs = self._stream.num_epochs or 1
    if epochs * self.plan.num_documents > limit:
      return False
    self.plan.count(epochs)
    return True

  def close(self) -> None:
    self._stream.close()


class MixedRecords(RowsByPosition):
  """Rows of several sources, interleaved by weight.

  Args:
    sources: Members of the mix.
    weights: Shares of the members.
    repeat: Whether a member that ends starts again, until each member has ended once; otherwise,
      the mix ends as soon as one member ends.
  """

  def __init__(
      self, sources: Sequence[RowsByPosition], weights: Sequence[Any], *, repeat: bool = False
  ):
    super().__init__()
    self._sources = list(sources)
    self._interleave = interleave.Interleave(interleave.counts_of_weights(weights))
    self._repeat = repeat
    self.row_length = self._sources[0].row_length
    self.endless = (any if repeat else all)(source.endless for source in self._sources)

  @property
  def num_rows(self) -> int | None:
    counts = [source.num_rows for source in self._sources]
    if any(n is None and not source.endless for n, source in zip(counts, self._sources)):
      return None
    return self.total(counts)

  def total(self, counts: Sequence[int | None]) -> int | None:
    """Returns the number of rows of the mix if members have `counts` rows; None means no end."""
    ended = [(member, count) for member, count in enumerate(counts) if count is not None]
    if not ended or (self._repeat and None in counts):
      return None
    if self._repeat:
      return max(self._rows_until(member, count) for member, count in ended)
    return min(self._interleave.position_of(member, count) for member, count in ended)

  @property
  def epoch_rows(self) -> int | None:
    """The number of rows until each member has been seen once."""
    ends = []
    for member, source in enumerate(self._sources):
      count = source.epoch_rows
      if count is None:
        return None
      ends.append(self._rows_until(member, count))
    return max(ends)

  def has(self, position: int) -> bool:
    if self.endless or self.num_rows is not None:
      return super().has(position)
    members, indices = self._interleave.locate(np.array([position]))
    return self._sources[int(members[0])].has(int(indices[0]))

  def rows(self, positions: np.ndarray) -> list[Record]:
    members, indices = self._interleave.locate(positions)
    found: list[Record] = [{}] * len(positions)
    for member in np.unique(members).tolist():
      here = np.flatnonzero(members == member)
      source, wanted = self._sources[member], indices[here]
      if self._repeat and not source.endless and source.num_rows:
        wanted = wanted % source.num_rows
      for place, row in zip(here.tolist(), source.rows(wanted)):
        found[place] = row
    return found

  def count_ahead(self, position: int) -> None:
    for source, taken in zip(self._sources, self._interleave.taken(position)):
      source.count_ahead(taken)

  def settle(self, limit: int) -> bool:
    settled = [source.settle(limit) for source in self._sources]
    return all(settled)

  def close(self) -> None:
    for source in self._sources:
      source.close()

  def _rows_until(self, member: int, count: int) -> int:
    """Returns the number of rows of the mix until a member has contributed `count` rows."""
    return self._interleave.position_of(member, count - 1) + 1 if count else 0
