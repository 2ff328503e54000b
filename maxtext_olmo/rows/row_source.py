"""Row sources, the only components that differ between dataset types.

A row source maps row numbers to parts. Orders, batches, prefetch, state, resume and metrics are
written once and work for every row source: fixed windows (`windows`), packed documents (`planned`),
one document per row (`document_rows`), and mixtures of these (`mixture`). `docs/guides/design.md`
shows how to write another.

A stream of rows assigns a row of an epoch to each position of a run. `order.stream.Stream` shuffles
rows if their number is known, and `row_sequence` takes rows one after another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from maxtext_olmo import errors
from maxtext_olmo.order import staged_stream
from maxtext_olmo.rows import parts as parts_lib
from maxtext_olmo.rows import segments


@runtime_checkable
class RowSource(Protocol):
  """Maps row numbers to parts.

  A row source must give the same results on every host, and must be thread-safe and picklable.

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
    row_length: Number of tokens per row, including padding.
    pad_id: The id that fills a row after its parts.
    segment_rule: Rule for where segments begin.
    filter_sees_padding: Whether the repetition filter treats padding as tokens.
    mask_paths: Path of each token file's loss mask, which has one byte per token; 0 leaves the
      token out of the loss. None if every token counts.
    block_rows: Approximate number of a host's rows whose parts are requested at once. Large
      requests are cheaper: computing an order costs about the same for 64 places as for a thousand.
    fingerprint: Text that identifies the data of the rows; a state saved with different data is
      rejected.

  A row source may have these optional members. `count_rows(epoch, row)` counts rows on demand.
  `look_ahead(position, num_epochs)` and `close()` start and stop background work (`planned`).
  `rows_of(epoch, source, first, count)` returns, in ascending order, the rows of an epoch that
  contain tokens from a range of a file, so that rows can be searched. If `segments_cover_padding`
  is true, padding belongs to segments, as tokens without loss; otherwise it is segment 0. If
  `packs_for_all_hosts` is true, the parts of a row are found together with those of its neighbours,
  so `block_rows` counts the rows of all hosts.
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
  """Defaults for a row source in which each row is one segment, without padding or masks."""

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
    """The number of positions until the end; None if there is no end or it is not known yet."""

  def has(self, position: int) -> bool:
    """Returns whether there is a row at a position."""

  def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the epoch and the row at each position."""


def steps_per_block(source: RowSource, rows: Mapping[int, np.ndarray]) -> int:
  """Returns the number of steps whose parts a host should request at once.

  Args:
    source: The row source.
    rows: For each batch size, the rows of the global batch that the host holds.
  """
  batch, own = max(rows), max(map(len, rows.values()))
  counted = batch if getattr(source, "packs_for_all_hosts", False) else own
  # At most one epoch, because the order of each epoch is computed separately.
  epoch = source.num_rows(0) or source.block_rows * batch
  return max(1, min(source.block_rows // max(1, counted), epoch // batch))


def positions_of(
    rows: RowSource, stream: Any, source: int, first: int, count: int, end: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the epoch and position of each row that has tokens from a range of a file.

  Args:
    rows: Row source to search.
    stream: Stream, which maps positions to rows.
    source: File of the range.
    first: First token of the range.
    count: Number of tokens of the range.
    end: Position at which the search ends; only rows before it are returned.
  """
  if isinstance(stream, staged_stream.StagedStream):
    return _positions_in_stages(rows, stream, source, first, count, end)
  search = getattr(rows, "positions_of", None)  # Only a mixture has this method.
  if search is not None:
    epochs, positions = search(source, first, count, end)
    return epochs, positions
  search = getattr(rows, "rows_of", None)
  if search is None:
    raise errors.OrderError(f"Rows of {type(rows).__name__} cannot be searched: no method rows_of.")
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
  """Returns the same as `positions_of`, searching stage by stage."""
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
  """Returns the parts of rows, given the epoch of each row; row number -1 is padding."""
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
    wrong = f"a row of {longest} tokens, but its row_length is {source.row_length}"
  else:
    return parts
  raise errors.CorpusError(f"The row source {type(source).__name__} made {wrong}.")
