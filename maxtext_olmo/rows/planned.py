"""Planned packing: documents in rows, of which any is found without packing those before it.

The number of rows depends on how the documents of an epoch fit together, so it is unknown until it
is counted (`plan`).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from maxtext_olmo.rows import parts as parts_lib
from maxtext_olmo.rows import plan as plan_lib
from maxtext_olmo.rows import row_source
from maxtext_olmo.rows import segments


@dataclasses.dataclass(frozen=True)
class PlannedRows(row_source.RowSourceDefaults):
  """Rows of packed documents; each document, or piece of one, is a segment.

  Attributes:
    plan: Which documents are in which row.
    row_length: Tokens of a row.
    fingerprint: The fingerprint of the corpus.
  """

  block_rows: ClassVar[int] = 1024

  plan: plan_lib.PackingPlan
  row_length: int
  fingerprint: str
  segment_rule: segments.SegmentRule = segments.SegmentRule("part")

  def num_rows(self, epoch: int) -> int | None:
    """Returns the rows of an epoch; None while they have not all been counted."""
    return self.plan.epoch_rows(epoch)

  def count_rows(self, epoch: int, row: int) -> int:
    """Counts the rows of an epoch until there are more than `row`, or all; returns their number."""
    return self.plan.count_rows(epoch, row)

  def parts(self, epoch: int, rows: np.ndarray) -> parts_lib.Parts:
    """Returns the documents in some rows."""
    return self.plan.parts(epoch, rows)

  def look_ahead(self, position: int, num_epochs: int | None = None) -> None:
    """Counts the rows of the epoch of a position, and of the next one, in the background."""
    self.plan.count_ahead(position, num_epochs)

  def close(self) -> None:
    """Ends counting in the background."""
    self.plan.close()
