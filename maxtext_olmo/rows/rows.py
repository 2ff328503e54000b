"""Rows at positions: the random-access side of the language-model pipelines.

A row source gives the six arrays of any rows at once, by position, and knows how many there are
(`row_steps` makes batches of them):

    records   one row per document, padded                 MapRows
    plan      documents packed by a plan                   PlannedRows
    mixture   rows of several sources, by weight           MixedRows
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol

import grain
import numpy as np

from maxtext_olmo.order import interleave
from maxtext_olmo.rows import plan as plan_lib
from maxtext_olmo.rows import records as tokens_lib

Rows = dict[str, np.ndarray]


@dataclasses.dataclass
class Cost:
  """What rows took: seconds to find what lies in them, and to read it; bytes read, and reads."""

  order_seconds: float = 0.0
  read_seconds: float = 0.0
  bytes_read: int = 0
  reads: int = 0


class RowSource(Protocol):
  """Position → row."""

  @property
  def num_rows(self) -> int | None:
    """All rows; None where there is no end, or where it has not been counted yet."""

  @property
  def epoch_rows(self) -> int | None:
    """Rows of an epoch; None where it has not been counted yet."""

  @property
  def endless(self) -> bool:
    """Whether there is no end."""

  def has(self, position: int) -> bool:
    """Whether there is a row at a position."""

  def rows(self, positions: np.ndarray, cost: Cost | None = None) -> Rows:
    """The six arrays, (positions, L) each; what they took is added to `cost`."""

  def count_ahead(self, position: int) -> None:
    """Begins to count, in the background, what a resume near a position would have to count."""

  def settle(self, limit: int) -> bool:
    """Counts the rows if packing that many documents suffices; whether they are known."""

  def close(self) -> None:
    """Ends what runs in the background."""


@dataclasses.dataclass(frozen=True)
class Shift:
  """How inputs and targets are offset; `left` moves targets, `right` inputs, None neither."""

  direction: str | None = "left"
  eod_token_id: int = 0

  def apply(self, rows: Rows) -> Rows:
    if self.direction is None:
      return rows
    return tokens_lib.shifted(
        rows, shift_target=self.direction == "left", eod_token_id=self.eod_token_id
    )


class MapRows:
  """The rows of a `MapDataset` of rows; `num_epochs` of them, or without end."""

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

  def rows(self, positions: np.ndarray, cost: Cost | None = None) -> Rows:
    began = time.perf_counter()
    rows = [self._dataset[position] for position in positions.tolist()]
    if cost is not None:
      # Finding a document is part of reading it here, and what counts is what its row keeps of it.
      cost.read_seconds += time.perf_counter() - began
      cost.bytes_read += sum(int(np.count_nonzero(r["inputs_segmentation"])) * 4 for r in rows)
      cost.reads += len(rows)
    return tokens_lib.stack(rows, len(rows), self._length)

  def count_ahead(self, position: int) -> None:
    del position

  def settle(self, limit: int) -> bool:
    del limit
    return True

  def close(self) -> None:
    pass


class PartSource(Protocol):
  """Parts of documents; `OlmoDocumentSource` is one."""

  def read_parts(
      self, document_ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray, out: list[np.ndarray]
  ) -> int:
    """Reads tokens [start, start + length) of each document into its array; returns the bytes."""


class RecordParts:
  """Parts of the records of a random-access dataset; each is read once to find its length."""

  def __init__(self, dataset: grain.MapDataset):
    self._dataset = dataset
    sizes = [
        0 if (found := self.record(i)) is None else len(found["inputs"])
        for i in range(len(dataset))
    ]
    self._lengths = np.array(sizes, np.int64)
    self.num_tokens = sum(sizes)

  def record(self, number: int) -> Rows | None:
    """A record, or None where it was filtered out."""
    element = self._dataset[number]
    return None if element is None else tokens_lib.record_of(element)

  def lengths(self, document_ids: np.ndarray) -> np.ndarray:
    """How many tokens some records have; none where they were filtered out."""
    return self._lengths[document_ids]


class PlannedRows:
  """Documents packed by a plan, shifted; the segments of a row count its documents.

  Args:
    source: Where parts of documents are read from.
    plan: Which parts lie in which row.
    length: Tokens of a row.
    shift: How inputs and targets are set against each other.
    num_epochs: Epochs until the end; None for none.
  """

  def __init__(
      self,
      source: PartSource | RecordParts,
      plan: plan_lib.PackingPlan,
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

  def rows(self, positions: np.ndarray, cost: Cost | None = None) -> Rows:
    cost = cost or Cost()
    began = time.perf_counter()
    shape = (len(positions), self._length)
    inputs, segments, places = (np.zeros(shape, np.int32) for _ in range(3))
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    targets: list[slice] = []
    for number, position in enumerate(positions.tolist()):
      epoch, window, row = self.plan.locate(position)
      found = self.plan.window(epoch, window).rows(row, row + 1)
      parts.append((found.source, found.first, found.count))
      lengths = found.count
      ends = np.cumsum(lengths)
      used = int(ends[-1])
      segments[number, :used] = np.repeat(np.arange(1, len(lengths) + 1, dtype=np.int32), lengths)
      places[number, :used] = np.arange(used) - np.repeat(ends - lengths, lengths)
      base = number * self._length
      targets += [
          slice(base + end - size, base + end) for end, size in zip(ends.tolist(), lengths.tolist())
      ]
    documents, starts, lengths = (np.concatenate([part[i] for part in parts]) for i in range(3))
    made = {"inputs": inputs, "inputs_position": places, "inputs_segmentation": segments}
    ordered = time.perf_counter()
    if isinstance(self._source, RecordParts):
      self._read_records(made, documents, starts, lengths, targets)
    else:
      flat = inputs.reshape(-1)
      cost.bytes_read += self._source.read_parts(
          documents, starts, lengths, [flat[here] for here in targets]
      )
      made["targets"] = inputs
      made["targets_segmentation"] = segments
    cost.order_seconds += ordered - began
    cost.read_seconds += time.perf_counter() - ordered
    cost.reads += len(documents)
    made["targets_position"] = places
    return self._shift.apply(made)

  def count_ahead(self, position: int) -> None:
    self.plan.count_ahead(position, self._num_epochs)

  def settle(self, limit: int) -> bool:
    # What is decided by the number of documents alone is decided alike on all hosts.
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
      targets: list[slice],
  ) -> None:
    segments = made["inputs_segmentation"]
    made["targets"] = np.zeros_like(made["inputs"])
    made["targets_segmentation"] = segments.copy()
    made["inputs_segmentation"] = segments.copy()
    flat = {name: values.reshape(-1) for name, values in made.items()}
    for document, start, length, here in zip(
        documents.tolist(), starts.tolist(), lengths.tolist(), targets
    ):
      record = self._source.record(document)  # type: ignore[union-attr]
      for name, values in (record or {}).items():
        part = values[start : start + length]
        if name.endswith("_segmentation"):
          flat[name][here] *= part != 0
        else:
          flat[name][here] = part


class MixedRows:
  """Rows of several sources, interleaved by weight; a position in each follows from the mix's.

  Args:
    sources: The members.
    weights: Their shares.
    repeat: Whether a member that ends starts again, until each has come to its end once; else the
      first end is the mix's.
  """

  def __init__(self, sources: Sequence[RowSource], weights: Sequence[Any], *, repeat: bool = False):
    self._sources = list(sources)
    self._interleave = interleave.Interleave(interleave.counts_of_weights(weights))
    self._repeat = repeat

  @property
  def endless(self) -> bool:
    each = [source.endless for source in self._sources]
    return any(each) if self._repeat else all(each)

  @property
  def num_rows(self) -> int | None:
    if self.endless:
      return None
    counts = [source.num_rows for source in self._sources]
    if any(n is None and not source.endless for n, source in zip(counts, self._sources)):
      return None
    return self.total(counts)

  def total(self, counts: Sequence[int | None]) -> int | None:
    """The rows of the mix where its members have so many; None is without end."""
    if all(count is None for count in counts) or (self._repeat and None in counts):
      return None
    ends = []
    for member, count in enumerate(counts):
      if count is None:
        continue
      if self._repeat:
        ends.append(self._interleave.position_of(member, count - 1) + 1 if count else 0)
      else:
        ends.append(self._interleave.position_of(member, count))
    return max(ends) if self._repeat else min(ends)

  @property
  def epoch_rows(self) -> int | None:
    """Until each member has been seen once."""
    counts = [source.epoch_rows for source in self._sources]
    ends = [
        None if count is None else self._interleave.position_of(member, count - 1) + 1
        for member, count in enumerate(counts)
    ]
    return None if None in ends else max(end for end in ends if end is not None)

  def has(self, position: int) -> bool:
    count = self.num_rows
    if count is not None or self.endless:
      return count is None or position < count
    members, indices = self._interleave.locate(np.array([position]))
    return self._sources[int(members[0])].has(int(indices[0]))

  def rows(self, positions: np.ndarray, cost: Cost | None = None) -> Rows:
    members, indices = self._interleave.locate(positions)
    made: Rows = {}
    for member in np.unique(members).tolist():
      here = members == member
      source, wanted = self._sources[member], indices[here]
      if self._repeat and not source.endless and source.num_rows:
        wanted = wanted % source.num_rows
      for name, values in source.rows(wanted, cost).items():
        if name not in made:
          made[name] = np.zeros((len(positions), values.shape[1]), np.int32)
        made[name][here] = values
    return made

  def count_ahead(self, position: int) -> None:
    for source, taken in zip(self._sources, self._interleave.taken(position)):
      source.count_ahead(taken)

  def settle(self, limit: int) -> bool:
    settled = [source.settle(limit) for source in self._sources]
    return all(settled)

  def close(self) -> None:
    for source in self._sources:
      source.close()


class OrderedDataset(grain.MapDataset[Any]):
  """A dataset in the order of each epoch, for so many epochs."""

  def __init__(self, parent: grain.MapDataset, order: Any, num_epochs: int | None):
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
