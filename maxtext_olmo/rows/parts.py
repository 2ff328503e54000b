"""Parts: the ranges of token files that make up each row of a batch.

Every dataset is reduced to one table with an entry per range, sorted by row:

    rows of 8 tokens    row 0: file 3 [16, 24)   row 1: file 0 [5, 8), file 2 [0, 4)  row 2: padding

    bounds  0  1  3  3      row r has the parts bounds[r] to bounds[r + 1] - 1
    source  3  0  2         the file (or record) of a part
    first   16 5  0         its first token there
    count   8  3  4         its number of tokens

The parts of a row fill it from column 0 without gaps, and padding fills the rest. So the table
determines the row, the column and the segment (its number within the row, from 1) of each part. No
part is empty, and none crosses the end of a file.

A table is built for a block of steps at once, and `split` returns the entries of each step as
views.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Parts:
  """A table of parts.

  Example:
    >>> parts = Parts.of_rows([[(3, 16, 8)], [(0, 5, 3), (2, 0, 4)], []])
    >>> parts.used.tolist(), parts.row.tolist(), parts.column.tolist(), parts.segment.tolist()
    ([8, 7, 0], [0, 1, 1], [0, 0, 3], [1, 1, 2])

  Attributes:
    bounds: Index of each row's first part, followed by the number of parts (rows + 1, int64).
    source: File or record of each part (int32).
    first: First token of each part in its file or record (int64).
    count: Number of tokens of each part (int32).
  """

  bounds: np.ndarray
  source: np.ndarray
  first: np.ndarray
  count: np.ndarray

  @classmethod
  def one_per_row(cls, source: np.ndarray, first: np.ndarray, count: np.ndarray) -> Parts:
    """Makes a table in which row r consists of part r alone."""
    bounds = np.arange(len(source) + 1)
    return cls(bounds, source.astype(np.int32), first.astype(np.int64), count.astype(np.int32))

  @classmethod
  def of_rows(cls, rows: Sequence[Sequence[tuple[int, int, int]]]) -> Parts:
    """Makes a table from a list of `(source, first, count)` per row; for tests and examples."""
    flat = np.array([part for row in rows for part in row], np.int64).reshape(-1, 3)
    bounds = np.cumsum([0, *map(len, rows)])
    return cls(bounds, flat[:, 0].astype(np.int32), flat[:, 1], flat[:, 2].astype(np.int32))

  @property
  def num_rows(self) -> int:
    """The number of rows, including padding rows."""
    return len(self.bounds) - 1

  @property
  def row(self) -> np.ndarray:
    """The row of each part."""
    return np.repeat(np.arange(self.num_rows), np.diff(self.bounds))

  @property
  def column(self) -> np.ndarray:
    """The column of each part's first token."""
    before = self._before()
    column: np.ndarray = before[:-1] - np.repeat(before[self.bounds[:-1]], np.diff(self.bounds))
    return column

  @property
  def segment(self) -> np.ndarray:
    """The number of each part in its row, from 1."""
    first = np.repeat(self.bounds[:-1], np.diff(self.bounds))
    segment: np.ndarray = np.arange(1, len(self.source) + 1) - first
    return segment

  @property
  def used(self) -> np.ndarray:
    """The number of tokens in each row, excluding padding."""
    if len(self.count) == self.num_rows and self.bounds[-1] == self.num_rows:
      sizes = np.diff(self.bounds)
      if sizes.size and sizes.min() == 1:
        return self.count.astype(np.int64)
    return np.diff(self._before()[self.bounds])

  def _before(self) -> np.ndarray:
    """Returns the number of tokens before each part, followed by the total."""
    before = np.zeros(len(self.count) + 1, np.int64)
    np.cumsum(self.count, out=before[1:])
    return before

  def split(self, ends: np.ndarray) -> list[Parts]:
    """Returns views of the table: rows [ends[0], ends[1]), rows [ends[1], ends[2]), and so on."""
    bounds, source, first, count = self.bounds, self.source, self.first, self.count
    rows, parts = itertools.pairwise(ends.tolist()), itertools.pairwise(bounds[ends].tolist())
    return [
        Parts(bounds[start : end + 1] - low, source[low:high], first[low:high], count[low:high])
        for (start, end), (low, high) in zip(rows, parts)
    ]

  def take(self, rows: np.ndarray) -> Parts:
    """Returns the given rows, in that order; -1 stands for a padding row."""
    sizes = np.diff(self.bounds, append=self.bounds[-1:])[rows]  # -1 selects the appended size, 0.
    bounds = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(sizes, out=bounds[1:])
    here = np.arange(bounds[-1]) + np.repeat(self.bounds[rows] - bounds[:-1], sizes)
    return Parts(bounds, self.source[here], self.first[here], self.count[here])


def join(tables: Sequence[Parts], places: Sequence[np.ndarray], num_rows: int) -> Parts:
  """Joins tables: row r of table t becomes row `places[t][r]`; all other rows are padding.

  Args:
    tables: Tables to join.
    places: For each table, the new numbers of its rows; no number occurs twice.
    num_rows: Number of rows of the result.
  """
  together = Parts(
      np.concatenate([[0], *_shifted_bounds(tables)]),
      _concatenate([table.source for table in tables], np.int32),
      _concatenate([table.first for table in tables], np.int64),
      _concatenate([table.count for table in tables], np.int32),
  )
  order = np.full(num_rows, -1, np.int64)
  if tables:
    order[np.concatenate(places)] = np.arange(together.num_rows)
  return together.take(order)


def _shifted_bounds(tables: Sequence[Parts]) -> list[np.ndarray]:
  """Returns the bounds of each table without the first 0, offset by the parts of earlier tables."""
  found, before = [], 0
  for table in tables:
    found.append(table.bounds[1:] + before)
    before += len(table.source)
  return found


def _concatenate(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
  return np.concatenate([np.zeros(0, dtype), *arrays])
