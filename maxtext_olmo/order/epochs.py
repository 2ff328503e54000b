"""Epochs, which map each position of a run to an epoch and a place. Epochs may differ in length.

If files are appended to a corpus, its epochs are longer from some epoch on:

    Epochs(((0, 5), (2, 8)))       epoch      0  1  2   3
                                   length     5  5  8   8
                                   start      0  5  10  18
"""

from __future__ import annotations

import bisect
import dataclasses
import functools

import numpy as np

from maxtext_olmo import errors


@dataclasses.dataclass(frozen=True)
class Epochs:
  """Maps positions to (epoch, place) and back, by bisection over the lengths of epochs.

  Attributes:
    lengths: `(first epoch, places)` pairs, sorted by epoch. A pair applies from its epoch until the
      next pair; the first pair is for epoch 0.
    cut: Epochs that end early because the next stage begins. Such an epoch may be shorter than a
      batch, which then skips the epoch.
  """

  lengths: tuple[tuple[int, int], ...]
  cut: tuple[int, ...] = ()

  def __post_init__(self) -> None:
    firsts = [first for first, _ in self.lengths]
    if not firsts or firsts[0] != 0 or any(a >= b for a, b in zip(firsts, firsts[1:])):
      raise errors.OrderError(
          "Lengths of epochs must start with epoch 0 and be sorted by epoch, got"
          f" {list(self.lengths)}."
      )
    ends = [first - 1 for first in firsts[1:]]
    if any(epoch not in firsts or epoch not in ends for epoch in self.cut):
      raise errors.OrderError(
          "A cut epoch must have its own entry in the lengths and must not be the last, got the cut"
          f" epochs {self.cut} and the lengths {list(self.lengths)}."
      )
    if any(length < 1 for _, length in self.lengths):
      raise errors.OrderError(f"An epoch must have at least one place, got {list(self.lengths)}.")

  @classmethod
  def constant(cls, length: int) -> Epochs:
    """Returns epochs that all have `length` places."""
    return cls(((0, length),))

  @functools.cached_property
  def parts(self) -> tuple[tuple[int, int, int], ...]:
    """The (first position, first epoch, length) of each entry of `lengths`."""
    found, start = [], 0
    for i, (first, length) in enumerate(self.lengths):
      if i:
        before, length_before = self.lengths[i - 1]
        start += (first - before) * length_before
      found.append((start, first, length))
    return tuple(found)

  @property
  def shortest(self) -> int:
    """The length of the shortest epoch that is not cut."""
    return min(length for first, length in self.lengths if first not in self.cut)

  def length(self, epoch: int) -> int:
    """Returns the number of places of an epoch."""
    return self._part_of_epoch(epoch)[2]

  def start(self, epoch: int) -> int:
    """Returns the position of an epoch's first place."""
    start, first, length = self._part_of_epoch(epoch)
    return start + (epoch - first) * length

  def epoch(self, position: int) -> int:
    """Returns the epoch of a position."""
    if position < 0:
      raise errors.OrderError(f"Positions count from 0, got {position}.")
    start, first, length = self.parts[
        bisect.bisect_right([part[0] for part in self.parts], position) - 1
    ]
    return first + (position - start) // length

  def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the epoch of each position and its place within that epoch (int64)."""
    positions = np.asarray(positions, np.int64)
    if len(self.parts) == 1:
      epochs, places = np.divmod(positions, self.parts[0][2])
      return epochs, places
    starts, firsts, lengths = (np.array(column, np.int64) for column in zip(*self.parts))
    part = np.searchsorted(starts, positions, side="right") - 1
    epochs, places = np.divmod(positions - starts[part], lengths[part])
    return epochs + firsts[part], places

  def _part_of_epoch(self, epoch: int) -> tuple[int, int, int]:
    if epoch < 0:
      raise errors.OrderError(f"Epochs count from 0, got {epoch}.")
    return self.parts[bisect.bisect_right([first for first, _ in self.lengths], epoch) - 1]
