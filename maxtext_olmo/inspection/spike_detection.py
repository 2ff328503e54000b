"""The steps at which the loss of a run jumps.

A spike is a step whose loss stands out from the steps before it: its robust z-score, the distance
from a line through their medians in units of the median absolute deviation from that line, exceeds
a threshold. Medians keep one spike from hiding the next. Spiking steps that are adjacent, or nearly
so, form one spike:

    loss    2.1  2.0  2.1  6.3  4.8  2.2  2.0
    spike                  ---------             steps 3 to 4, the highest at step 3
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from maxtext_olmo.inspection import losses as losses_lib

WINDOW = 100
THRESHOLD = 6.0
# Steps that spike with at most this many calm steps in between belong together.
_CALM = 2
_LEAST_HISTORY = 8
# For early steps, whose usual window contains the initial fall of the loss.
_SHORT_WINDOWS = (8, 16, 32, 64)
# A window of n losses has its spread multiplied by 1 + _UNSURE / n: few losses may agree by chance.
_UNSURE = 24
_CHUNK = 1 << 14
_LINES = 1 << 17


@dataclasses.dataclass(frozen=True)
class Spike:
  """Consecutive steps whose loss stands out.

  Attributes:
    first: The first step.
    last: The last step.
    peak: The step with the highest score.
    loss: The loss at the peak.
    usual: The loss expected from the steps before.
    score: The robust z-score at the peak.
  """

  first: int
  last: int
  peak: int
  loss: float
  usual: float
  score: float


def find_spikes(
    losses: losses_lib.Losses, *, window: int = WINDOW, threshold: float = THRESHOLD
) -> list[Spike]:
  """Returns the spikes of a run, the highest score first.

  Args:
    window: The number of logged steps before a step that define its usual loss.
    threshold: The lowest robust z-score of a spike; losses that are not finite always exceed it.
  """
  usual, scores = _scores(losses.values, window)
  places = np.flatnonzero(scores > threshold)
  spikes = []
  for group in np.split(places, np.flatnonzero(np.diff(places) > _CALM + 1) + 1):
    if len(group):
      peak = group[np.argmax(scores[group])]
      spikes.append(
          Spike(
              first=int(losses.steps[group[0]]),
              last=int(losses.steps[group[-1]]),
              peak=int(losses.steps[peak]),
              loss=float(losses.values[peak]),
              usual=float(usual[peak]),
              score=float(scores[peak]),
          )
      )
  return sorted(spikes, key=lambda spike: -spike.score)


def highest_score(losses: losses_lib.Losses) -> tuple[float, int] | None:
  """Returns the highest robust z-score of a run and its step; None if there are too few losses."""
  if len(losses.values) <= _LEAST_HISTORY:
    return None
  _, scores = _scores(losses.values, WINDOW)
  place = int(np.argmax(scores))
  return float(scores[place]), int(losses.steps[place])


def _scores(values: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the usual loss at each step, and the robust z-score; 0 for the first few.

  The usual loss continues the line through the medians of both halves of the window, so that early
  steps, whose losses fall fast, do not hide a spike. Steps near the beginning are also compared
  with the last half of the losses before them; the higher score counts.
  """
  usual, scores = np.zeros(len(values)), np.zeros(len(values))
  if len(values) <= _LEAST_HISTORY:
    return usual, scores
  padded = np.concatenate([np.full(window, np.nan), np.where(np.isfinite(values), values, np.nan)])
  before = np.lib.stride_tricks.sliding_window_view(padded, window)
  # In a long log, a few neighbouring steps share a line.
  every = 1 + len(values) // _LINES
  firsts = np.arange(_LEAST_HISTORY, len(values), every)
  lines = [
      _lines(before[firsts[start : start + _CHUNK]]) for start in range(0, len(firsts), _CHUNK)
  ]
  level, slope, spread = (
      np.repeat(np.concatenate(part), every)[: len(values) - _LEAST_HISTORY] for part in zip(*lines)
  )
  here = slice(_LEAST_HISTORY, len(values))
  usual[here] = level + slope * (np.arange(len(level)) % every)
  scores[here] = _score(values[here], usual[here], spread)
  for size in _SHORT_WINDOWS:
    first = _LEAST_HISTORY if size == _SHORT_WINDOWS[0] else 2 * size
    some = slice(first, min(4 * size, len(values)))
    if first >= len(values) or size >= window:
      break
    level, _, spread = _lines(before[some, -size:])
    score = _score(values[some], level, spread * (1 + _UNSURE / size))
    higher = score > scores[some]
    usual[some] = np.where(higher, level, usual[some])
    scores[some] = np.where(higher, score, scores[some])
  return usual, scores


def _score(values: np.ndarray, usual: np.ndarray, spread: np.ndarray) -> np.ndarray:
  """Returns the robust z-score of each loss; infinity for those that are not finite."""
  # losses_lib.Losses that were logged with few digits may all be equal.
  spread = np.maximum(spread, 1e-3 * np.abs(usual) + 1e-12)
  finite = np.isfinite(values)
  return np.where(finite, (np.where(finite, values, 0.0) - usual) / spread, math.inf)


def _lines(known: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns the line through each window: its value after the window, its slope, and the spread."""
  window = known.shape[1]
  half = window // 2
  distance = np.arange(window) - window
  older, newer = _median(known[:, :half]), _median(known[:, half:])
  # A window that is not full has no slope; losses that were not finite leave gaps.
  slope = np.where(np.isnan(known[:, :half]).any(axis=1), 0.0, (newer - older) / (window / 2))
  slope = np.nan_to_num(slope)
  level = np.where(np.isnan(newer), np.nan_to_num(older), newer - slope * distance[half:].mean())
  spread = 1.4826 * _median(np.abs(known - level[:, None] - slope[:, None] * distance))
  return level, slope, np.nan_to_num(spread)


def _median(values: np.ndarray) -> np.ndarray:
  """Returns the median of each row without its NaNs; NaN for a row of only NaNs."""
  if not np.isnan(values).any():
    return np.median(values, axis=1)  # Several times faster.
  found = np.full(len(values), np.nan)
  some = ~np.isnan(values).all(axis=1)
  found[some] = np.nanmedian(values[some], axis=1)
  return found
