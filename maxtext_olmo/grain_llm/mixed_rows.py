"""Rows of several sources, interleaved by weight.

The position in each member follows from the position in the mix. With weights 2 and 1:

    position    0   1   2   3   4   5
    row         a0  b0  a1  a2  b1  a3
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from maxtext_olmo.grain_llm import row_source
from maxtext_olmo.order import mixture


class MixedRows:
  """A row source that interleaves others.

  Args:
    sources: The members.
    weights: Their shares.
    repeat: Whether a member that ends starts again, until each has ended once; otherwise the mix
      ends with the first member that ends.
  """

  def __init__(
      self,
      sources: Sequence[row_source.RowSource],
      weights: Sequence[Any],
      *,
      repeat: bool = False,
  ):
    self._sources = list(sources)
    self._interleave = mixture.Interleave(mixture.counts_of_weights(weights))
    self._repeat = repeat

  @property
  def endless(self) -> bool:
    each = [source.endless for source in self._sources]
    return any(each) if self._repeat else all(each)

  @property
  def num_rows(self) -> int | None:
    if self.endless:
      return None
    counts = [source.num_rows for source in self._sources]
    if any(n is None and not source.endless for n, source in zip(counts, self._sources)):
      return None
    return self.total(counts)

  def total(self, counts: Sequence[int | None]) -> int | None:
    """Returns the rows of the mix if its members have `counts` rows; None means without end."""
    if all(count is None for count in counts) or (self._repeat and None in counts):
      return None
    ends = []
    for member, count in enumerate(counts):
      if count is None:
        continue
      if self._repeat:
        ends.append(self._interleave.position_of(member, count - 1) + 1 if count else 0)
      else:
        ends.append(self._interleave.position_of(member, count))
    return max(ends) if self._repeat else min(ends)

  @property
  def epoch_rows(self) -> int | None:
    """Rows until each member has been seen once."""
    counts = [source.epoch_rows for source in self._sources]
    ends = [
        None if count is None else self._interleave.position_of(member, count - 1) + 1
        for member, count in enumerate(counts)
    ]
    return None if None in ends else max(end for end in ends if end is not None)

  def has(self, position: int) -> bool:
    count = self.num_rows
    if count is not None or self.endless:
      return count is None or position < count
    members, indices = self._interleave.locate(np.array([position]))
    return self._sources[int(members[0])].has(int(indices[0]))

  def rows(self, positions: np.ndarray) -> row_source.Rows:
    members, indices = self._interleave.locate(positions)
    made: row_source.Rows = {}
    for member in np.unique(members).tolist():
      here = members == member
      source, wanted = self._sources[member], indices[here]
      if self._repeat and not source.endless and source.num_rows:
        wanted = wanted % source.num_rows
      for name, values in source.rows(wanted).items():
        if name not in made:
          made[name] = np.zeros((len(positions), values.shape[1]), np.int32)
        made[name][here] = values
    return made

  def count_ahead(self, position: int) -> None:
    for source, taken in zip(self._sources, self._interleave.taken(position)):
      source.count_ahead(taken)

  def settle(self, limit: int) -> bool:
    settled = [source.settle(limit) for source in self._sources]
    return all(settled)

  def close(self) -> None:
    for source in self._sources:
      source.close()
