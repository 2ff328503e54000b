"""Fixed windows: row i is instance i of the index, a single part that fills the row."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.rows import parts as parts_lib
from maxtext_olmo.rows import row_source
from maxtext_olmo.rows import segments


@dataclasses.dataclass(frozen=True)
class WindowRows(row_source.RowSourceDefaults):
  """The instances of an index as rows.

  Attributes:
    index: Index of the corpus.
    segment_rule: Rule for where segments begin: nowhere, or after each EOS.
    mask_paths: Path of each token file's loss mask; None if every token counts.
  """

  index: index_lib.OlmoNpyIndex
  segment_rule: segments.SegmentRule = segments.SegmentRule()
  mask_paths: Sequence[str] | None = None

  @property
  def row_length(self) -> int:
    """Number of tokens per instance."""
    return self.index.sequence_length

  @property
  def fingerprint(self) -> str:
    """The fingerprint of the corpus."""
    return self.index.fingerprint

  @functools.cached_property
  def _data_offsets(self) -> np.ndarray:
    return np.array([entry.data_offset for entry in self.index.files], np.int64)

  def num_rows(self, epoch: int) -> int:
    """Returns the number of instances, which is the same in each epoch."""
    del epoch
    return self.index.total_instances

  def parts(self, epoch: int, rows: np.ndarray) -> parts_lib.Parts:
    """Returns one part for each instance."""
    del epoch
    files, offsets = self.index.locate(rows)
    first = (offsets - self._data_offsets[files]) // self.index.token_dtype.itemsize
    count = np.full(len(files), self.index.sequence_length, np.int32)
    return parts_lib.Parts.one_per_row(files, first, count)

  def rows_of(self, epoch: int, source: int, first: int, count: int) -> np.ndarray:
    """Returns the instances that contain tokens from the given range of a file."""
    del epoch
    entry, length = self.index.files[source], self.index.sequence_length
    end = min(-(-(first + count) // length), entry.n_instances)
    return entry.instance_offset + np.arange(first // length, end)
