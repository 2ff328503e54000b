"""The step dataset: element k is this host's share of global batch k.

Each Grain element is a whole batch, not a record. So its content cannot depend on the number of
workers or threads that make batches, and reading it takes one call:

    schedule   step 5 starts at position 40 and takes 8 samples
    rows       this host holds rows 4..7 of the global batch             → positions 44..47
    stream     positions 44..47 are rows 17, 3, 98, 61 of epoch 0
    source     the parts of these rows, for a block of steps at once
    reader     the parts of this step, into one (4, L) array whose memory is reused

The vocabulary check, repetition filter, segments and loss mask work on that array in the same way
for every row source. An element is a compact batch (see `batch`).

A trainer may load more rows than it trains on. Rows beyond the schedule's batch size, or past the
end of the stream, are padding: all zeros, so they do not contribute to the loss. If the end of a
stream was not known at first, elements past the end are empty dicts.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, overload

import grain
import numpy as np

from maxtext_olmo import errors
from maxtext_olmo.corpus import token_files
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.order import skips as skips_lib
from maxtext_olmo.rows import batch as batch_lib
from maxtext_olmo.rows import buffers
from maxtext_olmo.rows import content as content_lib
from maxtext_olmo.rows import loss_mask
from maxtext_olmo.rows import parts as parts_lib
from maxtext_olmo.rows import read_ahead
from maxtext_olmo.rows import reader as reader_lib
from maxtext_olmo.rows import row_source
from maxtext_olmo.rows import segments as segments_lib

_INT32_VOCABULARY = 2**31

CompactBatch = dict[str, np.ndarray]


def end_step(schedule: schedule_lib.BatchSchedule, num_positions: int | None) -> int:
  """Returns the step after the last one that has a row; `sys.maxsize` if the stream has no end."""
  if num_positions is None:
    return sys.maxsize
  if num_positions <= schedule.anchor_position:
    return schedule.anchor_step
  last = schedule.step_at(num_positions - 1)
  # If the schedule skips the last places, `step_at` returns a step that starts after the end.
  return last + (schedule.start(last) < num_positions)


class _Step(NamedTuple):
  """The rows of one step on this host."""

  parts: parts_lib.Parts
  numbers: np.ndarray  # Number of each row; -1 for a padding row.
  used: np.ndarray  # Number of tokens of each row, without padding.
  num_tokens: int
  masked: np.ndarray | None  # Whether each row is masked in the loss; None masks no row.


class StepDataset(grain.MapDataset[CompactBatch]):
  """Maps a step to this host's rows of the global batch, as a compact batch with a `cost`.

  In worker processes, a batch also has `traffic`: what the worker has counted since the last one.

  Args:
    source: Row source, which returns the parts of rows.
    reader: Reader of the parts.
    stream: Stream, which maps positions to rows.
    schedule: Schedule, which says where each step starts and how many samples it takes.
    rows: For each batch size of the schedule, the rows of the global batch that this host holds.
    first_step: Step of element 0.
    content: Settings for processing the tokens.
    labels: For each file, the number of its label; needed for the extra array `labels`.
    masked: Positions whose rows are masked in the loss.
    block_steps: Number of steps whose parts are located at once; 0 follows the row source.

  Attributes:
    block_steps: Number of steps whose parts are located at once.
  """

  def __init__(
      self,
      source: row_source.RowSource,
      reader: reader_lib.Reader,
      stream: row_source.RowStream,
      schedule: schedule_lib.BatchSchedule,
      rows: Mapping[int, np.ndarray],
      *,
      first_step: int = 0,
      content: content_lib.Content = content_lib.Content(),
      labels: np.ndarray | None = None,
      masked: skips_lib.Skips = skips_lib.Skips(),
      block_steps: int = 0,
  ):
    super().__init__()
    self._source = source
    self._reader = reader
    self._stream = stream
    self._schedule = schedule
    self._rows = dict(rows)
    self._first_step = first_step
    self._content = content
    self._labels = labels
    self._masked = masked
    self._checks = reader_lib.Checks(
        source.pad_id, content.ngram_filter, source.filter_sees_padding, content.repetition
    )
    self.block_steps = block_steps or row_source.steps_per_block(source, self._rows)
    self._end_is_open = stream.num_positions is None and not stream.endless
    self._row_length = source.row_length
    self._covers_padding = getattr(source, "segments_cover_padding", False)
    self._dtype = reader.dtype
    self._vocabulary = content.vocab_size or _INT32_VOCABULARY
    self._length = self._count_steps()
    self._check_values()
    self._connect()

  def _check_values(self) -> None:
    limit, pad_id = np.iinfo(self._dtype).max, self._source.pad_id
    if not 0 <= pad_id <= limit:
      raise errors.ConfigError(
          f"The padding id {pad_id} does not fit tokens of {self._dtype}; expected 0 to {limit}."
      )
    if "labels" in self._content.extras and self._labels is None:
      raise errors.ConfigError("olmo_batch_extras: 'labels' needs files with labels; remove it.")
    rows = self._source.num_rows(0) or 0
    if "row_ids" in self._content.extras and rows > 2**31:
      raise errors.ConfigError(
          f"olmo_batch_extras: 'row_ids' is int32, but there are {rows:,} rows; remove it."
      )

  def _connect(self) -> None:
    """Creates the attributes that belong to one process and are not pickled."""
    self._blocks: dict[int, list[_Step]] = {}
    self._pool = buffers.BufferPool()
    self._always_ahead = self._reader.wants_concurrency > 0
    self._local = read_ahead.LocalReads()
    self._reads = read_ahead.ReadAhead(self._reader, self._prepare)
    self._masks = loss_mask.MaskReader.of(self._source, self._reader, self._pool)
    self._mask_reads: read_ahead.ReadAhead | None = None
    self._traffic: Any = None  # In a worker process, the counters that its batches bring along.
    if self._masks is not None and self._always_ahead:
      self._mask_reads = read_ahead.ReadAhead(self._masks.reader, self._prepare_masks)

  def __getstate__(self):
    connected = ("_blocks", "_pool", "_local", "_reads", "_masks", "_mask_reads", "_traffic")
    return {name: value for name, value in self.__dict__.items() if name not in connected}

  def __setstate__(self, state):
    self.__dict__.update(state)
    self._connect()
    # The storage of a copy has its own counters, which the trainer's iterator cannot see.
    for files in self.files[:1]:
      self._traffic = getattr(files.storage, "traffic", None)

  def close(self) -> None:
    """Stops the reading threads and frees their buffers; the dataset remains usable."""
    self._reads.close()
    if self._mask_reads is not None:
      self._mask_reads.close()
    self._pool.clear()
    self._blocks = {}

  def _count_steps(self) -> int:
    end = end_step(self._schedule, self._stream.num_positions)
    return end if end == sys.maxsize else max(0, end - self._first_step)

  def __len__(self) -> int:
    return self._length

  @overload
  def __getitem__(self, index: slice) -> grain.MapDataset[CompactBatch]:
    ...

  @overload
  def __getitem__(self, index: int) -> CompactBatch:
    ...

  def __getitem__(self, index):
    if isinstance(index, slice):
      return self.slice(index)
    if not self._length:
      self._raise_outside_stream(self._first_step + index)
    step = self._first_step + index % self._length  # Wraps around, as in all Grain datasets.
    began = time.perf_counter()
    if self._end_is_open and not self._stream.has(self._schedule.start(step)):
      return {}
    parts, numbers, used, num_tokens, masked = self._step(step)
    ordered = time.perf_counter()
    tokens, found, read = self._read(step, parts)
    if found.highest >= self._vocabulary:
      self._raise_outside_vocabulary(tokens, parts, step)
    trained = found.clean if masked is None else found.clean & ~masked
    covered = np.where(used > 0, self._row_length, 0) if self._covers_padding else used
    batch = {"tokens": tokens, "used": covered, "trained": trained}
    if (rule := self._source.segment_rule).begins != "nowhere":
      batch["starts"] = segments_lib.start_bits(tokens, covered, rule, parts)
    if self._masks is not None:
      masks = None if self._mask_reads is None else self._mask_reads.take(step)
      batch["loss"] = self._masks.read(parts, tokens.shape, masks)
    elif self._covers_padding:
      batch["loss"] = segments_lib.bits_below(used, self._row_length)
    if self._content.exclusions is not None:
      allowed = self._content.exclusions.loss_bits(parts, self._row_length)
      batch["loss"] = batch["loss"] & allowed if "loss" in batch else allowed
    if "row_ids" in self._content.extras:
      batch["row_ids"] = numbers.astype(np.int32)
    if "labels" in self._content.extras:
      batch["labels"] = self._labels_of(parts)
    done = time.perf_counter()
    size = num_tokens * tokens.itemsize
    cost = (ordered - began, read - ordered, done - read, size, len(parts.source))
    batch["cost"] = np.array(cost)
    if self._traffic is not None:
      batch["traffic"] = np.array(self._traffic.take())
    return batch

  @property
  def _element_spec(self) -> dict[str, Any]:
    """The spec for `grain.experimental.get_element_spec`: the arrays of the first step."""
    import jax

    rows = len(self._rows[self._schedule.size(self._first_step)])
    words = (rows, segments_lib.num_words(self._row_length))
    spec = {
        "tokens": ((rows, self._row_length), self._dtype),
        "used": ((rows,), np.int64),
        "trained": ((rows,), np.bool_),
        "cost": ((len(batch_lib.COST),), np.float64),
    }
    if self._source.segment_rule.begins != "nowhere":
      spec["starts"] = (words, np.uint32)
    if self._masks is not None or self._covers_padding or self._content.exclusions is not None:
      spec["loss"] = (words, np.uint32)
    spec |= dict.fromkeys(self._content.extras, ((rows,), np.int32))
    return {name: jax.ShapeDtypeStruct(*shape_and_dtype) for name, shape_and_dtype in spec.items()}

  @property
  def files(self) -> list[token_files.TokenFiles]:
    """The token files and loss masks that parts refer to; empty if rows are records."""
    if not isinstance(self._reader, reader_lib.FileReader):
      return []
    return [self._reader.files, *([] if self._masks is None else [self._masks.reader.files])]

  @property
  def frontier(self) -> int:
    """The last step that this process has begun to read ahead; -1 if there is none."""
    return self._reads.frontier

  def has(self, step: int) -> bool:
    """Returns whether the stream has a step."""
    if not 0 <= step - self._first_step < self._length:
      return False
    return not self._end_is_open or self._stream.has(self._schedule.start(step))

  def parts(self, step: int) -> parts_lib.Parts:
    """Returns the parts of this host's rows at a step."""
    if not 0 <= step - self._first_step < self._length:
      self._raise_outside_stream(step)
    return self._step(step).parts

  def row_numbers(self, step: int) -> np.ndarray:
    """Returns the row numbers of the rows that this host holds at a step; -1 for a padding row."""
    if not 0 <= step - self._first_step < self._length:
      self._raise_outside_stream(step)
    return self._step(step).numbers

  def _read(
      self, step: int, parts: parts_lib.Parts
  ) -> tuple[np.ndarray, reader_lib.Findings, float]:
    """Returns the tokens of a step, the findings of the checks, and the time when reading ended."""
    if self._always_ahead or step < self._local.ahead_until:
      tokens = self._reads.take(step)
      read = time.perf_counter()
      return tokens, self._reader.check(parts, tokens, self._checks), read
    if self._reads.holds_batches:
      self._reads.close()
    tokens = self._pool.take((len(parts.bounds) - 1, self._row_length), self._dtype)
    waits, began = read_ahead.waits_of_thread(), time.perf_counter()
    found = self._reader.read(parts, tokens, self._checks)
    read = time.perf_counter()
    if read - began > read_ahead.SLOW_SECONDS_PER_PART * len(parts.source):
      waits = read_ahead.waits_of_thread() - waits
      self._local.slow_batch(step, waits, len(parts.source))
    else:
      self._local.slow_batches = 0
    return tokens, found, read

  def _prepare(self, step: int) -> tuple[parts_lib.Parts, np.ndarray] | None:
    return self._with_array(step, self._dtype)

  def _prepare_masks(self, step: int) -> tuple[parts_lib.Parts, np.ndarray] | None:
    return self._with_array(step, np.uint8)

  def _with_array(self, step: int, dtype: Any) -> tuple[parts_lib.Parts, np.ndarray] | None:
    """Returns the parts of a step, and an array to read them into; None past the end."""
    if not self.has(step):
      return None
    parts = self.parts(step)
    return parts, self._pool.take((parts.num_rows, self._row_length), dtype)

  def _raise_outside_stream(self, step: int) -> None:
    first, length = self._first_step, self._length
    last = end_step(self._schedule, self._stream.num_positions) - 1
    what = f"has steps {first} to {last}" if length else f"ends with step {last}"
    raise errors.OrderError(f"Step {step} is outside the stream, which {what}.")

  def _step(self, step: int) -> _Step:
    number, place = divmod(step - self._first_step, self.block_steps)
    block = self._blocks.get(number)
    if block is None:
      block = self._make_block(number)
      # Threads prefetch a few steps around the current step, so two blocks are enough. The dict is
      # replaced and never modified, so threads need no lock.
      self._blocks = {**dict(list(self._blocks.items())[-1:]), number: block}
    return block[place]

  def _make_block(self, number: int) -> list[_Step]:
    """Returns a block of consecutive steps; making it costs little more than making one step."""
    first_step = self._first_step + number * self.block_steps
    count = min(self.block_steps, self._first_step + self._length - first_step)
    starts, sizes = self._schedule.block(first_step, count)
    by_size = {size: np.flatnonzero(sizes == size) for size in np.unique(sizes).tolist()}
    ends = np.zeros(count + 1, np.int64)
    for size, here in by_size.items():
      ends[here + 1] = len(self._rows[size])
    np.cumsum(ends, out=ends)
    positions = np.empty(ends[-1], np.int64)
    for size, here in by_size.items():
      places = ends[here, np.newaxis] + np.arange(len(self._rows[size]))
      positions[places] = self._positions(starts[here], size)
    positions = self._schedule.skips.positions(positions)
    real = self._within_stream(positions)
    numbers = np.full(len(positions), -1, np.int64)
    epochs = np.zeros(len(positions), np.int64)
    epochs[real], numbers[real] = self._stream.locate(positions[real])
    parts = row_source.parts_of(self._source, epochs, numbers)
    used = parts.used
    before = np.zeros(len(used) + 1, np.int64)
    np.cumsum(used, out=before[1:])
    num_tokens = np.diff(before[ends]).tolist()
    masked = self._masked.contains(positions) if self._masked else None
    return [
        _Step(
            step_parts,
            numbers[start:end],
            used[start:end],
            tokens,
            None if masked is None else masked[start:end],
        )
        for step_parts, (start, end), tokens in zip(
            parts.split(ends), itertools.pairwise(ends.tolist()), num_tokens
        )
    ]

  def _positions(self, starts: np.ndarray, size: int) -> np.ndarray:
    """Returns the positions of this host's rows in steps of one size; -1 for rows beyond it."""
    rows = self._rows[size]
    positions = starts[:, np.newaxis] + rows
    positions[:, rows >= size] = -1
    return positions

  def _within_stream(self, positions: np.ndarray) -> np.ndarray:
    real = positions >= 0
    end = self._stream.num_positions
    if end is not None:
      real &= positions < end
    elif real.any() and not self._stream.has(int(positions.max())):
      # The end is in this block, so all rows up to the end have been counted by now.
      end = self._stream.num_positions
      real &= positions < (end if end is not None else 0)
    return real

  def _labels_of(self, parts: parts_lib.Parts) -> np.ndarray:
    """Returns the label of the first file of each row; -1 for a padding row."""
    labels = np.full(parts.num_rows, -1, np.int32)
    filled = np.diff(parts.bounds) > 0
    labels[filled] = self._labels[parts.source[parts.bounds[:-1][filled]]]  # type: ignore[index]
    return labels

  def _raise_outside_vocabulary(
      self, tokens: np.ndarray, parts: parts_lib.Parts, step: int
  ) -> None:
    limit, held = self._vocabulary, self._rows[self._schedule.size(step)]
    inside = np.arange(tokens.shape[1]) < parts.used[:, np.newaxis]
    outside = (reader_lib.as_unsigned(tokens) >= limit) & inside
    row, column = (int(place) for place in np.argwhere(outside)[0])
    part = int(np.flatnonzero((parts.row == row) & (parts.column <= column))[-1])
    token = int(parts.first[part]) + column - int(parts.column[part])
    where = self._reader.where(int(parts.source[part]), token)
    raise errors.CorpusError(
        f"Token id {tokens[row, column]} at step {step}, row {held[row]}, column {column} is"
        f" outside the vocabulary of {limit}: {where} (row {self.row_numbers(step)[row]} of the"
        " corpus). Either vocab_size is wrong, the dtype of the file is not"
        f" {self._reader.dtype}, or the file is damaged: run `maxtext-olmo verify` on the index."
    )
