"""The row source: what a dataset type has to say about its rows, and nothing more.

A row source maps row numbers to parts. Orders, batches, prefetch, state, resume and metrics are
written once and work for every row source: fixed windows (`windows`), packed documents (`planned`),
one document per row (`document_rows`), and mixtures of these (`mixture`). `docs/guides/design.md`
shows how to write another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np

from maxtext_olmo.rows import parts as parts_lib
from maxtext_olmo.rows import segments


@runtime_checkable
class RowSource(Protocol):
  """Row number → parts; the same on every host, safe for threads, and picklable.

  Attributes:
    row_length: Tokens of a row, padding included.
    pad_id: What follows the parts of a row that is not full.
    segment_rule: Where segments begin.
    filter_sees_padding: Whether the repetition filter takes padding for tokens.
    mask_paths: For each token file, the file of its loss mask: a byte per token, 0 where no loss is
      taken on the token. None where every token counts.
    block_rows: For how many rows of global batches parts are asked for at once, about: an order
      costs much the same for 64 places as for a thousand, and a packing plan pauses to pack.
    fingerprint: Names the data that rows are made of; a state of other data is refused.
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
    """Returns the number of rows of an epoch; None while it has not been counted."""

  def parts(self, epoch: int, rows: np.ndarray) -> parts_lib.Parts:
    """Returns the parts of some rows of an epoch, in the given order."""


class RowSourceDefaults:
  """Defaults for a row source whose rows are one segment each, without padding or masks."""

  pad_id = 0
  segment_rule = segments.SegmentRule()
  filter_sees_padding = False
  block_rows: ClassVar[int] = 8192
  mask_paths: Sequence[str] | None = None
