"""Rows of a run with stages: each row comes from the row source of its stage.

Each stage numbers its own rows. The files of all indexes are numbered in one list
(`corpus.joined`), so that one reader can read them all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from maxtext_olmo import errors
from maxtext_olmo.corpus import joined as joined_lib
from maxtext_olmo.order import staged_stream
from maxtext_olmo.rows import parts as parts_lib
from maxtext_olmo.rows import row_sequence
from maxtext_olmo.rows import row_source
from maxtext_olmo.rows import segments
from maxtext_olmo.rows import windows


@dataclasses.dataclass(frozen=True)
class StagedRows:
  """The rows of all stages of a run.

  Attributes:
    first: Rows of the first stage. The rows of all stages have the same length and padding.
    joined: Indexes of all stages.
    segment_rule: Rule for where segments begin.
    stream: Stream that knows the stage of each epoch; None if there is only the first stage.
  """

  first: row_source.RowSource
  joined: joined_lib.Joined
  segment_rule: segments.SegmentRule
  stream: staged_stream.StagedStream | None = None

  def for_stream(self, stream: Any) -> row_source.RowSource:
    """Returns the row source for a stream, which may have no stages."""
    if isinstance(stream, staged_stream.StagedStream):
      return dataclasses.replace(self, stream=stream)
    # The files of the first index have the same numbers in the joined list.
    return stream.source if isinstance(stream, row_sequence.RowSequence) else self.first

  @property
  def row_length(self) -> int:
    """Number of tokens per row."""
    return self.first.row_length

  @property
  def pad_id(self) -> int:
    """The id that fills a row after its parts."""
    return self.first.pad_id

  @property
  def filter_sees_padding(self) -> bool:
    """Whether the repetition filter treats padding as tokens."""
    return self.first.filter_sees_padding

  @property
  def mask_paths(self) -> Sequence[str] | None:
    """The paths of the loss masks; None if every token counts."""
    return self.first.mask_paths

  @property
  def block_rows(self) -> int:
    """Approximate number of rows, over all hosts, whose parts are requested at once."""
    return self.first.block_rows

  @property
  def packs_for_all_hosts(self) -> bool:
    """Whether finding the parts of a row costs as much as those of its neighbours too."""
    return bool(getattr(self.first, "packs_for_all_hosts", False))

  @property
  def fingerprint(self) -> str:
    """The fingerprint of the corpus that the run began with."""
    return self.first.fingerprint

  def num_rows(self, epoch: int) -> int | None:
    """Returns the number of rows of an epoch; None if it has not been counted yet."""
    rows, _, own_epoch = self._of_epoch(epoch)
    return rows.num_rows(own_epoch)

  def parts(self, epoch: int, rows: np.ndarray) -> parts_lib.Parts:
    """Returns the parts of rows of an epoch, in the given order."""
    own_rows, numbers, own_epoch = self._of_epoch(epoch)
    parts = own_rows.parts(own_epoch, rows)
    return dataclasses.replace(parts, source=numbers[parts.source].astype(parts.source.dtype))

  def of_stage(self, number: int) -> tuple[row_source.RowSource, np.ndarray]:
    """Returns the row source of a stage, and the number of each of its files in the joined list."""
    if self.stream is None:
      return self.first, self.joined.numbers[self.first.fingerprint]
    stage = self.stream.stages[number]
    index = self.joined.indexes.get(stage.settings.fingerprint)
    if index is None:
      raise errors.OrderError(
          f"{stage.name} had the index {stage.settings.index_path}, which this config does not"
          " name. Add that stage to olmo_stages again."
      )
    numbers = self.joined.numbers[index.fingerprint]
    if isinstance(self.first, windows.WindowRows):
      return windows.WindowRows(index), numbers
    return self.stream.stream(number).source, numbers

  def _of_epoch(self, epoch: int) -> tuple[row_source.RowSource, np.ndarray, int]:
    """Returns the result of `of_stage` for an epoch's stage, and the epoch within that stage."""
    number, own_epoch = (0, epoch) if self.stream is None else self.stream.stage_of_epoch(epoch)
    return *self.of_stage(number), own_epoch
