"""Row sources, the only part in which dataset types differ.

A row source maps row numbers to parts. Orders, batches, prefetch, state, resume and metrics are
written once and work for every row source: fixed windows (`windows`), packed documents (`planned`),
one document per row (`document_rows`), and mixtures of these (`mixture`). `docs/guides/design.md`
shows how to write another.

A stream of rows says which row of which epoch each position of a run holds. `order.stream.Stream`
shuffles rows whose number is known. `RowSequence` takes rows in sequence, as a packing plan needs,
because its rows are counted only as far as they are needed:

    rows of epochs 0, 1, 2   3, 4, not counted yet     position   0  1  2  3  4  5  6  7
                                                       epoch      0  0  0  1  1  1  1  2
                                                       row        0  1  2  0  1  2  3  0
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from maxtext_olmo import errors
from maxtext_olmo.order import base
from maxtext_olmo.order import epochs as epochs_lib
from maxtext_olmo.order import staged_stream
from maxtext_olmo.rows import parts as parts_lib
from maxtext_olmo.rows import segments


@runtime_checkable
class RowSource(Protocol):
  """Maps row numbers to parts; the same on every host, thread-safe, and picklable.

  >>> class FirstTokens(RowSourceDefaults):  # Row i is the first 4 tokens of file i.
  ...   row_length, fingerprint = 4, "v1"
  ...
  ...   def num_rows(self, epoch):
  ...     return 10
  ...
  ...   def parts(self, epoch, rows):
  ...     return parts_lib.Parts.one_per_row(rows, 0 * rows, np.full(len(rows), 4))
  >>> isinstance(FirstTokens(), RowSource)
  True
  >>> FirstTokens().parts(0, np.array([7, 2])).source.tolist()
  [7, 2]

  Attributes:
    row_length: Tokens per row, padding included.
    pad_id: The id that fills a row after its parts.
    segment_rule: Where segments begin.
    filter_sees_padding: Whether the repetition filter treats padding as tokens.
    mask_paths: For each token file, the file of its loss mask, with one byte per token, 0 to leave
      the token out of the loss. None if every token counts.
    block_rows: Approximate number of rows of global batches to request parts for at once: an order
      costs nearly the same for 64 places as for a thousand, and a packing plan pauses to pack.
    fingerprint: Identifies the data that rows are made of; a state of other data is rejected.

  A row source whose rows are counted as they are needed also has `count_rows(epoch, row)`, and one
  that works in the background has `look_ahead(position, num_epochs)` and `close()` (`planned`). One
  whose rows can be searched has `rows_of(epoch, source, first, count)`: the rows of an epoch that
  have a token of a range of a file, ascending. If `segments_cover_padding` is true, padding belongs
  to segments, as tokens without loss; otherwise it is segment 0.
  """

  @property
  def row_length(self) -> int:
    ...

  @property
  def pad_id(self) -> int:
    ...

  @property
  def segment_rule(self) -> segments.SegmentRule:
    ...

  @property
  def filter_sees_padding(self) -> bool:
    ...

  @property
  def mask_paths(self) -> Sequence[str] | None:
    ...

  @property
  def block_rows(self) -> int:
    ...

  @property
  def fingerprint(self) -> str:
    ...

  def num_rows(self, epoch: int) -> int | None:
    """Returns the number of rows of an epoch; None if it has not been counted yet."""

  def parts(self, epoch: int, rows: np.ndarray) -> parts_lib.Parts:
    """Returns the parts of rows of an epoch, in the given order."""


class RowSourceDefaults:
  """Defaults for a row source whose rows are one segment each, without padding or masks."""

  pad_id = 0
  segment_rule = segments.SegmentRule()
  filter_sees_padding = False
  block_rows: ClassVar[int] = 8192
  mask_paths: Sequence[str] | None = None


class RowStream(Protocol):
  """Maps positions to epochs and rows."""

  @property
  def endless(self) -> bool:
    """True if the stream has no end."""

  @property
  def num_positions(self) -> int | None:
    """The number of positions until the end; None if there is no end, or it is not counted yet."""

  def has(self, position: int) -> bool:
    """Returns whether there is a row at a position."""

  def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the epoch and the row at each position."""


# A jump over more epochs than this would take minutes of counting, so its position is a mistake.
_MOST_EPOCHS_AT_ONCE = 10_000


class RowSequence:
  """The rows of a source in sequence, or in an order, epoch after epoch.

  Args:
    source: Source of the rows.
    name: Text for the identity of the stream, which says how rows are assigned to positions.
    seed: Seed of the run.
    num_epochs: Number of epochs until the end; None for an endless stream.
    order: Order of the rows of an epoch; None takes rows in sequence.
    documents: Text that identifies the documents that rows are made of, if the fingerprint of the
      corpus does not: their boundaries may come from other files.
  """

  history: tuple[()] = ()

  def __init__(
      self,
      source: RowSource,
      *,
      name: str,
      seed: int,
      num_epochs: int | None = None,
      order: base.Order | None = None,
      documents: str = "",
  ):
    self.source = source
    self.name = name
    self.seed = seed
    self.num_epochs = num_epochs
    self.order = order
    self.documents = documents

  @property
  def fingerprint(self) -> str:
    """The fingerprint of the data."""
    return self.source.fingerprint

  @property
  def sequence_length(self) -> int:
    """Tokens per row."""
    return self.source.row_length

  @property
  def endless(self) -> bool:
    """True if the stream has no end."""
    return self.num_epochs is None

  @property
  def num_positions(self) -> int | None:
    """The number of rows until the end; None if there is no end, or it is not counted yet."""
    if self.num_epochs is None:
      return None
    if self.order is not None:
      return self.order.epochs.start(self.num_epochs)
    total = 0
    for epoch in range(self.num_epochs):
      rows = self.source.num_rows(epoch)
      if rows is None:
        return None
      total += rows
    return total

  @property
  def epochs(self) -> epochs_lib.Epochs | None:
    """The lengths of epochs; None if rows are counted as they are needed."""
    return None if self.order is None else self.order.epochs

  @property
  def drops_tails(self) -> bool:
    """True if a batch that would cross the end of an epoch starts at the next epoch instead."""
    return self.order is not None and self.order.drops_tails

  @property
  def batch_epochs(self) -> epochs_lib.Epochs | None:
    """The epochs whose ends no batch crosses; None if batches may span epochs."""
    return self.epochs if self.drops_tails else None

  def identity(self) -> dict[str, Any]:
    """Returns the values that decide which row is at which position."""
    identity = {"fingerprint": self.fingerprint, "order": self.name, "seed": self.seed}
    return {**identity, "documents": self.documents} if self.documents else identity

  def has(self, position: int) -> bool:
    """Returns whether there is a row at a position; counts rows as far as needed."""
    if self.num_epochs is None:
      return True
    end = self.num_positions
    if end is not None:
      return position < end
    start = 0
    for epoch in range(self.num_epochs):
      start += self._count(epoch, position - start)
      if position < start:
        return True
    return False

  def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the epoch and the row at each position."""
    positions = np.asarray(positions, np.int64)
    if self.order is not None:
      epochs, places = self.order.locate(positions)
      rows = np.empty_like(places)
      for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        rows[here] = self.order.ids(epoch, places[here])
      return epochs, rows
    epochs = np.zeros(positions.shape, np.int64)
    rows = positions.copy()
    last = int(positions.max(initial=0))
    epoch, start = 0, 0
    counted = 0
    while last - start >= (count := self._count(epoch, last - start)):
      start += count
      epoch += 1
      counted += self.source.num_rows(epoch) is None
      if counted > _MOST_EPOCHS_AT_ONCE:
        raise errors.OrderError(
            f"Position {last} lies more than {_MOST_EPOCHS_AT_ONCE} epochs ahead, and these rows"
            " are counted epoch by epoch. Check initial_step and olmo_initial_position."
        )
      later = positions >= start
      epochs[later] = epoch
      rows[later] = positions[later] - start
    return epochs, rows

  def positions(self, epoch: int, rows: np.ndarray) -> np.ndarray:
    """Returns the position of each row in an epoch; -1 if the epoch does not have it."""
    rows = np.asarray(rows, np.int64)
    if self.order is not None:
      places = self.order.places(epoch, rows)
      return np.where(places < 0, -1, places + self.order.epochs.start(epoch))
    last = int(rows.max(initial=0))
    counts = [self._count(earlier, sys.maxsize) for earlier in range(epoch)]
    within = (rows >= 0) & (rows < self._count(epoch, last))
    return np.where(within, rows + sum(counts), -1)

  def visits(self, epoch: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns all positions of rows in an epoch: indices into `rows`, and the positions."""
    positions = self.positions(epoch, rows)
    which = np.flatnonzero(positions >= 0)
    return which, positions[which]

  def positions_of(
      self, source: int, first: int, count: int, end: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns the epochs and the positions below `end` that hold a token of a range of a file."""
    return positions_of(self.source, self, source, first, count, end)

  def prepare(self, position: int) -> None:
    """Prepares the order of a position's epoch; rows are counted when they are requested."""
    if self.order is not None:
      self.order.prepare(position)

  def look_ahead(self, position: int) -> None:
    """Lets the source prepare what a resume near a position would need, in the background."""
    look_ahead = getattr(self.source, "look_ahead", None)
    if look_ahead is not None:
      look_ahead(position, self.num_epochs)

  def close(self) -> None:
    """Stops the background work of the source, and closes the files of the order."""
    if self.order is not None:
      self.order.close()
    close = getattr(self.source, "close", None)
    if close is not None:
      close()

  def _count(self, epoch: int, row: int) -> int:
    """Returns the number of rows of an epoch or, if not all are counted, a number above `row`."""
    count = self.source.num_rows(epoch)
    if count is None:
      counter = getattr(self.source, "count_rows", None)
      count = row + 1 if counter is None else counter(epoch, row)
    if not count:
      raise errors.CorpusError("No document of the corpus has a token: there is nothing to pack.")
    return count


def positions_of(
    rows: RowSource, stream: Any, source: int, first: int, count: int, end: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the epochs and the positions below `end` that hold a token of a range of a file.

  Args:
    rows: Row source to search.
    stream: Stream, which maps positions to rows.
    source: File of the range.
    first: First token of the range.
    count: Number of tokens of the range.
    end: Position at which the search ends.
  """
  if isinstance(stream, staged_stream.StagedStream):
    return _positions_in_stages(rows, stream, source, first, count, end)
  search = getattr(rows, "positions_of", None)  # A mixture, whose members have epochs of their own.
  if search is not None:
    epochs, positions = search(source, first, count, end)
    return epochs, positions
  search = getattr(rows, "rows_of", None)
  if search is None:
    raise errors.OrderError(f"Rows of {type(rows).__name__} cannot be searched: no `rows_of`.")
  found, epoch = [(np.zeros(0, np.int64),) * 2], 0
  last_epoch = int(stream.locate(np.array([end - 1]))[0][0]) if end > 0 else -1
  for epoch in range(last_epoch + 1):
    _, positions = stream.visits(epoch, search(epoch, source, first, count))
    positions = np.sort(positions[positions < end])
    found.append((np.full(len(positions), epoch), positions))
  epochs, positions = (np.concatenate(column) for column in zip(*found))
  return epochs, positions


def _positions_in_stages(
    rows: RowSource,
    stream: staged_stream.StagedStream,
    source: int,
    first: int,
    count: int,
    end: int,
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the epochs and the positions below `end`, stage by stage."""
  found = [(np.zeros(0, np.int64),) * 2]
  for number, stage in enumerate(stream.stages):
    if stage.position >= end:
      break
    length = stream.length(number)
    own_end = end - stage.position if length is None else min(end - stage.position, length)
    own_rows, files = rows, [source]
    if hasattr(rows, "of_stage"):
      own_rows, numbers = rows.of_stage(number)
      files = np.flatnonzero(numbers == source).tolist()
    for file in files:
      search = positions_of(own_rows, stream.stream(number), file, first, count, own_end)
      found.append((search[0] + stream.first_epoch(number), search[1] + stage.position))
  epochs, positions = (np.concatenate(column) for column in zip(*found))
  return epochs, positions


def stages_of(stream: Any, epochs: np.ndarray) -> list[tuple[int, int]]:
  """Returns the stage of each epoch of a run, and the number of the epoch within that stage."""
  stage_of_epoch = getattr(stream, "stage_of_epoch", None)
  if stage_of_epoch is None:
    return [(0, epoch) for epoch in epochs.tolist()]
  return [(0, -1) if epoch < 0 else stage_of_epoch(epoch) for epoch in epochs.tolist()]


def parts_at(source: RowSource, stream: RowStream, positions: np.ndarray) -> parts_lib.Parts:
  """Returns the parts of the rows at positions, which may span epochs."""
  return parts_of(source, *stream.locate(positions))


def parts_of(source: RowSource, epochs: np.ndarray, rows: np.ndarray) -> parts_lib.Parts:
  """Returns the parts of rows, each of its own epoch; row number -1 is padding."""
  real = rows >= 0
  numbers = np.unique(epochs[real]).tolist()
  if len(numbers) == 1 and real.all():
    return _parts_of_epoch(source, numbers[0], rows)
  tables, places = [], []
  for epoch in numbers:
    here = np.flatnonzero((epochs == epoch) & real)
    tables.append(_parts_of_epoch(source, epoch, rows[here]))
    places.append(here)
  return parts_lib.join(tables, places, len(rows))


def _parts_of_epoch(source: RowSource, epoch: int, rows: np.ndarray) -> parts_lib.Parts:
  """Returns the parts of rows of one epoch; raises if the row source violates the protocol."""
  parts = source.parts(epoch, rows)
  longest, shortest = int(parts.used.max(initial=0)), int(parts.count.min(initial=1))
  if parts.num_rows != len(rows):
    wrong = f"{parts.num_rows} rows, but {len(rows)} were requested"
  elif shortest < 1:
    wrong = f"a part of {shortest} tokens; empty parts must be left out"
  elif longest > source.row_length:
    wrong = f"a row of {longest} tokens; its rows have {source.row_length}"
  else:
    return parts
  raise errors.CorpusError(f"The row source {type(source).__name__} made {wrong}.")
