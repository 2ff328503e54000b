"""Packed rows: the documents of a group of files, packed as OLMo-core packs them, and padded.

    row 17    file 3 [0, 4800)   file 5 [900, 2200)   padding
    tokens    … EOS … EOS pad pad pad

OLMo-core treats the padding as tokens without loss: the repetition filter sees it, and it is
divided into segments like other tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from maxtext_olmo.rows import packed_plan
from maxtext_olmo.rows import parts as parts_lib
from maxtext_olmo.rows import row_source
from maxtext_olmo.rows import segments


@dataclasses.dataclass(frozen=True)
class PackedRows(row_source.RowSourceDefaults):
  """The rows of a plan, which are the same in each epoch.

  Attributes:
    plan: Plan, which lists the documents of each row.
    pad_id: The id that fills a row after its documents.
    segment_rule: Rule for where segments begin.
    mask_paths: Path of each token file's loss mask; None if every token counts.
  """

  filter_sees_padding = True
  segments_cover_padding = True

  plan: packed_plan.PackedPlan
  pad_id: int = 0
  segment_rule: segments.SegmentRule = segments.SegmentRule()
  mask_paths: Sequence[str] | None = None

  @property
  def row_length(self) -> int:
    """Number of tokens per row."""
    return self.plan.rule.row_length

  @property
  def fingerprint(self) -> str:
    """The fingerprint of the plan, which covers the corpus and the order of ties."""
    return self.plan.fingerprint

  def num_rows(self, epoch: int) -> int:
    """Returns the number of rows, which is the same in each epoch."""
    del epoch
    return self.plan.num_rows

  def parts(self, epoch: int, rows: np.ndarray) -> parts_lib.Parts:
    """Returns the parts of rows."""
    del epoch
    return self.plan.parts(rows)

  def rows_of(self, epoch: int, source: int, first: int, count: int) -> np.ndarray:
    """Returns the rows that contain tokens from the given range of a file."""
    del epoch
    return self.plan.rows_of(source, first, count)
