"""Rows of a run whose stages have different indexes: each row is an instance of its stage's index.

Row numbers are those of the stage's own index. Files are numbered in one list for all indexes
(`corpus.joined`), so that one reader reads them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from maxtext_olmo import errors
from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.corpus import joined as joined_lib
from maxtext_olmo.order import staged_stream
from maxtext_olmo.rows import parts as parts_lib
from maxtext_olmo.rows import windows


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagedRows(windows.WindowRows):
  """The instances of the indexes of a run's stages as rows; `index` is that of the first stage.

  Attributes:
    joined: Indexes of all stages.
    stream: Stream, which says which stage an epoch belongs to; None if there is only the first.
  """

  joined: joined_lib.Joined
  stream: staged_stream.StagedStream | None = None

  def for_stream(self, stream: Any) -> StagedRows:
    """Returns the rows of a stream."""
    staged = stream if isinstance(stream, staged_stream.StagedStream) else None
    return dataclasses.replace(self, stream=staged)

  def num_rows(self, epoch: int) -> int:
    """Returns the number of instances of the index of an epoch."""
    return self._index_of(epoch).total_instances

  def parts(self, epoch: int, rows: np.ndarray) -> parts_lib.Parts:
    """Returns one part for each instance."""
    index = self._index_of(epoch)
    parts = windows.WindowRows(index).parts(epoch, rows)
    numbers = self.joined.numbers[index.fingerprint]
    return dataclasses.replace(parts, source=numbers[parts.source].astype(parts.source.dtype))

  def rows_of(self, epoch: int, source: int, first: int, count: int) -> np.ndarray:
    """Returns the instances of an epoch that have a token of a range of a file."""
    index = self._index_of(epoch)
    rows = windows.WindowRows(index)
    found = [np.zeros(0, np.int64)]
    for own in np.flatnonzero(self.joined.numbers[index.fingerprint] == source).tolist():
      found.append(rows.rows_of(epoch, own, first, count))
    return np.concatenate(found)

  def _index_of(self, epoch: int) -> index_lib.OlmoNpyIndex:
    if self.stream is None:
      return self.index
    stage = self.stream.stages[self.stream.stage_of_epoch(epoch)[0]]
    index = self.joined.indexes.get(stage.settings.fingerprint)
    if index is None:
      raise errors.OrderError(
          f"{stage.name} had the index {stage.settings.index_path}, which this config does not"
          " name. Add that stage to olmo_stages again."
      )
    return index
