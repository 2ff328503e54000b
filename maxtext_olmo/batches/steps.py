"""The step dataset: element k is this host's share of global batch k.

A Grain element here is a whole batch, not a record, so its content cannot depend on how many workers or threads make
batches, and the work per row is one read call:

    schedule: step 5 starts at position 40 and takes 8 samples
    rows:     this host holds rows 4..7 of the global batch          → positions 44..47
    stream:   positions 44..47 are instances 17, 3, 98, 61           → one vectorised call
    source:   their windows are read straight into one (4, L) array
    filter, vocabulary check and shift run on the whole array

Rows past the schedule's size (a trainer may load more rows than it trains on) and past the end of the stream are padding:
zero everywhere, so no loss is taken on them.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Protocol, overload

import grain
import numpy as np

from maxtext_olmo import errors
from maxtext_olmo.batches import repetition
from maxtext_olmo.batches import transforms
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.order import stream as stream_lib

_INT32_VOCABULARY = 2**31


class WindowSource(Protocol):
  """Instance id → window of tokens; `OlmoNpyDataSource` is one."""

  @property
  def dtype(self) -> np.dtype:
    """Of the tokens."""

  def read(self, instance_ids: np.ndarray) -> np.ndarray:
    """The windows of some instances, one row each."""

  def where(self, instance_id: int, column: int = 0) -> str:
    """Where a token comes from, for error messages."""


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


class StepDataset(grain.MapDataset[dict[str, np.ndarray]]):
  """Step → this host's rows, as the six arrays a trainer takes.

  Args:
    source: Where the windows are read from.
    stream: Which instance each position holds.
    schedule: Where each step starts and how many samples it takes.
    rows: For each batch size of the schedule, the rows of the global batch that this host holds.
    first_step: The step that element 0 is.
    content: What is done with the tokens.
  """

  def __init__(
      self,
      source: WindowSource,
      stream: stream_lib.Stream,
      schedule: schedule_lib.BatchSchedule,
      rows: Mapping[int, np.ndarray],
      *,
      first_step: int = 0,
      content: Content = Content(),
  ):
    super().__init__()
    self._source = source
    self._stream = stream
    self._schedule = schedule
    self._rows = dict(rows)
    self._first_step = first_step
    self._content = content

  def __len__(self) -> int:
    end = self._stream.num_positions
    if end is None:
      return sys.maxsize
    if end <= self._schedule.start(self._first_step):
      return 0
    return self._schedule.step_at(end - 1) + 1 - self._first_step

  @overload
  def __getitem__(self, index: slice) -> grain.MapDataset[dict[str, np.ndarray]]:
    ...

  @overload
  def __getitem__(self, index: int) -> dict[str, np.ndarray]:
    ...

  def __getitem__(self, index):
    if isinstance(index, slice):
      return self.slice(index)
    if not 0 <= index < len(self):
      raise errors.OrderError(f"Step {self._first_step + index} lies outside the stream.")
    step = self._first_step + index
    tokens, real = self.read(step)
    keep = real
    if self._content.ngram_filter:
      keep = real & repetition.clean_rows(tokens)
    return transforms.make_rows(
        tokens,
        keep,
        real=None if real.all() else real,
        eos_id=self._content.document_eos_id,
    )

  def instance_ids(self, step: int) -> np.ndarray:
    """The instance of each of this host's rows at a step; -1 for a padding row."""
    positions, real = self._positions(step)
    ids = np.full(len(positions), -1, np.int64)
    ids[real] = self._stream.instance_ids(positions[real])
    return ids

  def read(self, step: int) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of this host's rows, (rows, L), and which rows are real."""
    ids = self.instance_ids(step)
    real = ids >= 0
    length = self._stream.sequence_length
    if real.all():
      tokens = self._source.read(ids)
    else:
      tokens = np.zeros((len(ids), length), self._source.dtype)
      if real.any():
        tokens[real] = self._source.read(ids[real])
    self._check_vocabulary(tokens, ids, step)
    return tokens, real

  def _positions(self, step: int) -> tuple[np.ndarray, np.ndarray]:
    size = self._schedule.size(step)
    rows = self._rows[size]
    positions = self._schedule.start(step) + rows
    real = rows < size
    if self._stream.num_positions is not None:
      real &= positions < self._stream.num_positions
    return positions, real

  def _check_vocabulary(self, tokens: np.ndarray, ids: np.ndarray, step: int) -> None:
    limit = self._content.vocab_size or _INT32_VOCABULARY
    if tokens.size == 0 or int(tokens.max()) < limit:
      return
    row, column = np.argwhere(tokens >= limit)[0]
    host_rows = self._rows[self._schedule.size(step)]
    raise errors.CorpusError(
        f"Token id {tokens[row, column]} at step {step}, row {host_rows[row]}, column {column} is"
        f" outside the vocabulary of {limit}: {self._source.where(int(ids[row]), int(column))}"
        f" (instance {ids[row]}). Either vocab_size is wrong, or the file has another dtype than"
        f" {self._source.dtype}, or it is damaged: run `maxtext-olmo verify` on the index."
    )
