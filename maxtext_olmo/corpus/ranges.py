"""In which of many ranges, side by side, numbers lie: a look into a table instead of a search, where many are asked for.

The numbers are cut into cells of a power of two, about half as large as a range. The table has the range in which each cell begins;
from there it is a step or two:

    ranges     0         │ 1      │ 2              │ 3
    cells      ·    ·    · │  ·    ·    ·    ·    ·    ·        table  0 0 0 1 1 2 2 2 3
    number                     x   in cell 3, which begins in range 1, and x is below the start of range 2

A search takes some hundred nanoseconds per number, since no processor guesses its turns. Where ranges are so uneven that many begin in
one cell, it searches all the same.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

_MOST_STEPS = 4
_MANY = 512


class _Table(NamedTuple):
  shift: int
  first: np.ndarray


class Ranges:
  """Ranges of numbers from 0 to `total`, by where each starts.

  Args:
    starts: Ascending; an empty range starts where the next one does.
    total: Where the last one ends.
  """

  def __init__(self, starts: np.ndarray, total: int):
    self._starts = starts
    self._total = total

  def find(self, numbers: np.ndarray) -> np.ndarray:
    """The range (int64) that holds each of some numbers, which all lie in one."""
    table = self._table if numbers.size >= _MANY else None
    if table is None:
      # The last of equals is the one that is not empty.
      return np.searchsorted(self._starts, numbers, side="right") - 1
    found = table.first[numbers >> table.shift]
    for _ in range(_MOST_STEPS):
      beyond = numbers >= self._ends[found]
      if not beyond.any():
        break
      found += beyond
    return found

  @functools.cached_property
  def _ends(self) -> np.ndarray:
    return np.append(self._starts[1:], self._total)

  @functools.cached_property
  def _table(self) -> _Table | None:
    """None where it would not do."""
    if not self._total:
      return None
    shift = max(0, (self._total // (2 * len(self._starts))).bit_length() - 1)
    cells = np.arange(((self._total - 1) >> shift) + 1, dtype=np.int64) << shift
    first = np.searchsorted(self._starts, cells, side="right") - 1
    last = np.searchsorted(self._starts, [self._total - 1], side="right") - 1
    steps = np.diff(first, append=last)
    return _Table(shift, first) if steps.max() <= _MOST_STEPS else None
