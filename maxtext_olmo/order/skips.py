"""Skipped samples: ranges of positions that no batch takes.

A run that skips bad data continues with the next sample. Positions still count the skipped samples,
so a skip changes neither the position nor the order of the other samples. A schedule numbers only
the remaining samples:

    skipped [4, 7)     position   0  1  2  3  4  5  6  7  8  9
                       number     0  1  2  3  .  .  .  4  5  6

A `Skip` is one range, with the request that it came from. A request in steps is converted to
positions once, with the schedule in force at that time, and the run's history keeps the result.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from maxtext_olmo import errors

MODES = ("drop", "mask")
UNITS = ("steps", "samples")


class Skip(NamedTuple):
  """A range of positions to skip.

  Attributes:
    request: Text of the request, such as `steps 41180:41220`. On resume, a request that is in the
      run's history is not converted to positions again.
    first: First position.
    end: Position after the last one.
    mode: 'drop' removes the samples from the stream; 'mask' delivers them, but they carry no loss.
  """

  request: str
  first: int
  end: int
  mode: str = "drop"


@dataclasses.dataclass(frozen=True)
class Skips:
  """Converts between positions and sample numbers, which count only the samples not skipped.

  Attributes:
    ranges: `(first, end)` pairs of positions, ascending and with gaps between them.
  """

  ranges: tuple[tuple[int, int], ...] = ()

  @classmethod
  def of(cls, ranges: Iterable[tuple[int, int]]) -> Skips:
    """Makes skips from ranges, which may be unsorted and may overlap."""
    merged: list[tuple[int, int]] = []
    for first, end in sorted(ranges):
      if not 0 <= first < end:
        raise errors.ConfigError(
            f"A skipped range must have at least one sample, from position 0 on; got {first} to"
            f" {end}."
        )
      if merged and first <= merged[-1][1]:
        first, end = merged[-1][0], max(end, merged.pop()[1])
      merged.append((first, end))
    return cls(tuple(merged))

  def __bool__(self) -> bool:
    return bool(self.ranges)

  @functools.cached_property
  def _firsts(self) -> np.ndarray:
    return np.array([first for first, _ in self.ranges], np.int64)

  @functools.cached_property
  def _skipped(self) -> np.ndarray:
    """The number of positions that the first 0, 1, 2, … ranges skip."""
    sizes = [end - first for first, end in self.ranges]
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

  def positions(self, numbers: np.ndarray) -> np.ndarray:
    """Returns the positions of samples, given their numbers; negative numbers are unchanged."""
    if not self.ranges:
      return numbers
    skipped = self._skipped[np.searchsorted(self._numbers, numbers, side="right")]
    positions: np.ndarray = numbers + skipped
    return positions

  def position(self, number: int) -> int:
    """Returns the position of a sample, given its number."""
    return int(self.positions(np.array([number]))[0]) if self.ranges else number

  def consumed(self, number: int) -> int:
    """Returns the position after `number` samples, before any skip that begins there."""
    if not self.ranges:
      return number
    return number + int(self._skipped[np.searchsorted(self._numbers, number, side="left")])

  def number(self, position: int) -> int:
    """Returns the number of unskipped samples before a position."""
    if not self.ranges:
      return position
    begun = int(np.searchsorted(self._firsts, position, side="left"))
    inside = max(0, self.ranges[begun - 1][1] - position) if begun else 0
    return position - int(self._skipped[begun]) + inside

  def contains(self, positions: np.ndarray) -> np.ndarray:
    """Returns whether each position is skipped."""
    if not self.ranges:
      return np.zeros(np.shape(positions), np.bool_)
    ends = np.array([end for _, end in self.ranges], np.int64)
    begun = np.searchsorted(self._firsts, positions, side="right")
    return (begun > 0) & (positions < ends[begun - 1])

  @functools.cached_property
  def _numbers(self) -> np.ndarray:
    """The sample number of the first sample after each range."""
    numbers: np.ndarray = self._firsts - self._skipped[:-1]
    return numbers


class Requests(NamedTuple):
  """The skips that a config asks for.

  Attributes:
    ranges: `(first, end)` pairs; `end` itself is not skipped.
    unit: 'steps', as numbered in the run's log, or 'samples'.
    mode: Mode of all ranges, as in `Skip`.
  """

  ranges: tuple[tuple[int, int], ...] = ()
  unit: str = UNITS[0]
  mode: str = MODES[0]

  def resolve(
      self,
      recorded: Sequence[Skip],
      position: int,
      to_positions: Callable[[int, int], tuple[int, int]],
  ) -> tuple[Skip, ...]:
    """Returns all skips of the run, past and future, sorted by position.

    Args:
      recorded: Skips in the run's history. Those that begin before `position` are kept; later ones
        are kept only if they are still requested.
      position: Position at which the run resumes.
      to_positions: Function that converts a range of steps to positions.

    Raises:
      ResumeError: The run has already passed the beginning of a new range.
    """
    found = [skip for skip in recorded if skip.first < position]
    known = {skip.request: skip for skip in recorded}
    for first, end in self.ranges:
      request = f"{self.unit} {first}:{end}"
      skip = known.get(request)
      if skip is None:
        try:
          bounds = to_positions(first, end) if self.unit == "steps" else (first, end)
        except errors.OrderError as error:
          raise errors.ResumeError(
              f"olmo_skip: {request} can no longer be skipped: {error} Resume from a checkpoint"
              f" before step {first}, or remove the range."
          ) from error
        skip = Skip(request, *bounds)
        if skip.first < position:
          before = f"step {first:,}" if self.unit == "steps" else f"position {first:,}"
          raise errors.ResumeError(
              f"olmo_skip: {request} begins at position {skip.first:,}, which this run has already"
              f" passed: it resumes at position {position:,}. Resume from a checkpoint before"
              f" {before}, or remove the range."
          )
      if skip.first >= position:
        found.append(skip._replace(mode=self.mode))
    return tuple(sorted(found, key=lambda skip: (skip.first, skip.end, skip.request)))


def positions_of(skips: Iterable[Skip], mode: str) -> Skips:
  """Returns the positions of the skips of one mode."""
  return Skips.of((skip.first, skip.end) for skip in skips if skip.mode == mode)
