"""The step dataset: element k is this host's share of global batch k.

A Grain element here is a whole batch, not a record, so its content cannot depend on how many workers or threads make
batches, and the work per row is one read call:

    schedule: step 5 starts at position 40 and takes 8 samples
    rows:     this host holds rows 4..7 of the global batch          → positions 44..47
    stream:   positions 44..47 are instances 17, 3, 98, 61           → for a block of steps, in one vectorised call
    source:   their windows are read straight into one (4, L) array, whose memory is used again
    filter and vocabulary check run on the whole array

An element is compact: the tokens as they lie in the files, and one flag per row. What a trainer takes, inputs, targets,
positions and segmentations, follows from these, on the device or by `to_arrays`.

Rows past the schedule's size (a trainer may load more rows than it trains on) and past the end of the stream are padding:
zero everywhere, so no loss is taken on them.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, overload

import grain
import numpy as np

from maxtext_olmo import errors
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.order import stream as stream_lib
from maxtext_olmo.rows import batch as batch_lib
from maxtext_olmo.rows import buffers
from maxtext_olmo.rows import inspection
from maxtext_olmo.rows import readahead

# What a row is for. Padding has no tokens; a masked row is seen, but no loss is taken on it.
PADDING, MASKED, TRAINED = 0, 1, 2

_INT32_VOCABULARY = 2**31
# Ids computed at once: a permutation costs much the same for 64 places as for a thousand.
_BLOCK_IDS = 8192
_NO_IDS = np.zeros(0, np.int64)


@dataclasses.dataclass(frozen=True)
class Content:
  """What is done with the tokens of a row; it changes what a row holds, never which row it is.

  Attributes:
    vocab_size: Ids at or above it stop the run; 0 checks only that ids fit into int32.
    ngram_filter: Whether rows with long repetitions are masked out of the loss.
    document_eos_id: The id that ends a document, where attention is to stay within documents; else None.
  """

  vocab_size: int = 0
  ngram_filter: bool = True
  document_eos_id: int | None = None

  def record(self) -> dict[str, int | bool | None]:
    """The part that a checkpoint records, so that a change is noticed."""
    return {"ngram_filter": self.ngram_filter, "document_eos_id": self.document_eos_id}


class _Rows(NamedTuple):
  """This host's rows of a step: their instances, whether any is padding, and where they lie, if that is known."""

  ids: np.ndarray
  padded: bool
  located: inspection.Located | None


class StepDataset(grain.MapDataset[dict[str, np.ndarray]]):
  """Step → this host's rows: `tokens` (rows, L), and `flags` (rows,), PADDING, MASKED or TRAINED.

  Beside them, `cost` says what the batch took: seconds for order, reads and filter, bytes read, and reads.

  Args:
    source: Where the windows are read from.
    stream: Which instance each position holds.
    schedule: Where each step starts and how many samples it takes.
    rows: For each batch size of the schedule, the rows of the global batch that this host holds.
    first_step: The step that element 0 is.
    content: What is done with the tokens.
    read_threads: How many threads read a large batch together; 0 for up to four, as there are cores.
  """

  def __init__(
      self,
      source: inspection.WindowSource,
      stream: stream_lib.Stream,
      schedule: schedule_lib.BatchSchedule,
      rows: Mapping[int, np.ndarray],
      *,
      first_step: int = 0,
      content: Content = Content(),
      read_threads: int = 0,
  ):
    super().__init__()
    self._source = source
    self._stream = stream
    self._schedule = schedule
    self._rows = dict(rows)
    self._first_step = first_step
    self._content = content
    self._read_threads = read_threads
    self._block_steps = max(1, _BLOCK_IDS // max(1, *map(len, self._rows.values())))
    self._length = self._count_steps()
    self._connect()

  def _connect(self) -> None:
    """Makes what belongs to one process."""
    self._blocks: dict[int, list[_Rows]] = {}
    self._pool = buffers.BufferPool()
    self._inspector = inspection.Inspector(
        self._source, ngram_filter=self._content.ngram_filter, threads=self._read_threads
    )
    self._reads = readahead.ReadAhead(
        ids_of=self._ids_if_any,
        buffer_of=self._buffer,
        read=self._read,
        row_reader=self._row_reader,
        hint=getattr(self._source, "hint", _no_hint),
    )

  def __getstate__(self):
    connected = ("_blocks", "_pool", "_inspector", "_reads")
    return {name: value for name, value in self.__dict__.items() if name not in connected}

  def __setstate__(self, state):
    self.__dict__.update(state)
    self._connect()

  def close(self) -> None:
    """Ends the threads that read, and lets go of what they have read; the dataset stays usable."""
    self._reads.close()
    self._pool.clear()
    self._blocks = {}

  def _count_steps(self) -> int:
    end = self._stream.num_positions
    if end is None:
      return sys.maxsize
    if end <= self._schedule.start(self._first_step):
      return 0
    last = self._schedule.step_at(end - 1)
    # The last places may be passed over, and the step behind them starts after the end.
    return last - self._first_step + (1 if self._schedule.start(last) < end else 0)

  def __len__(self) -> int:
    return self._length

  @overload
  def __getitem__(self, index: slice) -> grain.MapDataset[dict[str, np.ndarray]]:
    ...

  @overload
  def __getitem__(self, index: int) -> dict[str, np.ndarray]:
    ...

  def __getitem__(self, index):
    if isinstance(index, slice):
      return self.slice(index)
    if not 0 <= index < self._length:
      raise errors.OrderError(f"Step {self._first_step + index} lies outside the stream.")
    step = self._first_step + index
    began = time.perf_counter()
    rows = self._rows_of(step)
    ordered = time.perf_counter()
    ids, tokens, found = self._reads.take(step)
    read = time.perf_counter()
    found = found or self._inspector.look(tokens)
    if found.highest >= (self._content.vocab_size or _INT32_VOCABULARY):
      self._say_what_is_outside_the_vocabulary(tokens, ids, step)
    flags = np.full(len(ids), TRAINED, np.uint8)
    if found.clean is not None and not found.clean.all():
      flags[~found.clean] = MASKED
    if rows.padded:
      flags[ids < 0] = PADDING
    filtered = time.perf_counter()
    cost = (ordered - began, read - ordered, filtered - read, tokens.nbytes, len(ids))
    return {"tokens": tokens, "flags": flags, "cost": np.array(cost)}

  def instance_ids(self, step: int) -> np.ndarray:
    """The instance of each of this host's rows at a step; -1 for a padding row."""
    return self._rows_of(step).ids

  def _rows_of(self, step: int) -> _Rows:
    number, place = divmod(step - self._first_step, self._block_steps)
    block = self._blocks.get(number)
    if block is None:
      block = self._make_block(number)
      # Threads prefetch a few steps around the current one, so two blocks serve; rebinding needs no lock.
      self._blocks = {**dict(list(self._blocks.items())[-1:]), number: block}
    return block[place]

  def _make_block(self, number: int) -> list[_Rows]:
    first = self._first_step + number * self._block_steps
    last = min(first + self._block_steps, self._first_step + self._length)
    sizes = [self._schedule.size(step) for step in range(first, last)]
    starts = np.array([self._schedule.start(step) for step in range(first, last)])
    # A block of one size, as nearly all are, is a matrix; where the size changes inside, steps are taken one by one.
    cuts = [0, len(sizes)] if len(set(sizes)) == 1 else range(len(sizes) + 1)
    parts = [self._positions(starts[i:j], sizes[i]) for i, j in itertools.pairwise(cuts)]
    together = np.concatenate([part.reshape(-1) for part in parts])
    real = together >= 0
    ids = np.full(len(together), -1, np.int64)
    ids[real] = self._stream.instance_ids(together[real])
    if len(parts) == 1:
      return self._locate(ids.reshape(parts[0].shape))
    ends = np.cumsum([part.size for part in parts[:-1]])
    return [row for step in np.split(ids, ends) for row in self._locate(step[np.newaxis])]

  def _locate(self, ids: np.ndarray) -> list[_Rows]:
    """Where the rows of some steps lie, a step to a row."""
    padded: list[bool] = np.any(ids < 0, axis=1).tolist()
    found = None if any(padded) else self._inspector.locate(ids.reshape(-1))
    if found is None:
      return [_Rows(*step, None) for step in zip(ids, padded)]
    file_ids, offsets = (part.reshape(ids.shape) for part in found)
    return [_Rows(step, False, located) for step, located in zip(ids, zip(file_ids, offsets))]

  def _positions(self, starts: np.ndarray, size: int) -> np.ndarray:
    """The position of each of this host's rows, for steps of one size; -1 for a padding row."""
    rows = self._rows[size]
    positions = starts[:, np.newaxis] + rows
    positions[:, rows >= size] = -1
    end = self._stream.num_positions
    if end is not None:
      positions[positions >= end] = -1
    return positions

  def _ids_if_any(self, step: int) -> np.ndarray:
    return self.instance_ids(step) if step < self._first_step + self._length else _NO_IDS

  def _buffer(self, ids: np.ndarray) -> np.ndarray:
    return self._pool.take((len(ids), self._stream.sequence_length), self._source.dtype)

  def _read(self, step: int, tokens: np.ndarray) -> inspection.Findings | None:
    rows = self._rows_of(step)
    if not rows.padded:
      return self._inspector.read(rows.ids, tokens, rows.located)
    self._read_some(rows.ids, tokens)
    return None

  def _read_some(self, ids: np.ndarray, tokens: np.ndarray) -> None:
    real = ids >= 0
    tokens[~real] = 0
    if real.any():
      tokens[real] = self._source.read(ids[real])

  def _row_reader(self, ids: np.ndarray, tokens: np.ndarray) -> Callable[[int], object]:
    find = getattr(self._source, "row_reader", None)
    if find is not None:
      return find(np.maximum(ids, 0), tokens)
    return lambda row: self._read_some(ids[row : row + 1], tokens[row : row + 1])

  def _say_what_is_outside_the_vocabulary(
      self, tokens: np.ndarray, ids: np.ndarray, step: int
  ) -> None:
    limit = self._content.vocab_size or _INT32_VOCABULARY
    row, column = np.argwhere(tokens >= limit)[0]
    host_rows = self._rows[self._schedule.size(step)]
    raise errors.CorpusError(
        f"Token id {tokens[row, column]} at step {step}, row {host_rows[row]}, column {column} is"
        f" outside the vocabulary of {limit}: {self._source.where(int(ids[row]), int(column))}"
        f" (instance {ids[row]}). Either vocab_size is wrong, or the file has another dtype than"
        f" {self._source.dtype}, or it is damaged: run `maxtext-olmo verify` on the index."
    )


def _no_hint(instance_ids: np.ndarray) -> None:
  """For a source that has no use for hints."""


def to_arrays(batch: Mapping[str, np.ndarray], content: Content) -> dict[str, np.ndarray]:
  """The six int32 arrays of a batch, made on the host."""
  flags = batch["flags"]
  real = flags != PADDING
  return batch_lib.make_rows(
      batch["tokens"],
      flags == TRAINED,
      real=None if real.all() else real,
      eos_id=content.document_eos_id,
  )
