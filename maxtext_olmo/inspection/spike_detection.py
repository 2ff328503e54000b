"""Finds the steps at which the loss of a run jumps.

A step spikes if its robust z-score exceeds a threshold. The score compares the loss of the step
with a window of losses before it. A line through the medians of both halves of the window gives the
usual loss. The score is the distance from the usual loss, in units of the median absolute deviation
of the window from that line. Medians keep one spike from hiding the next. Spiking steps that are
adjacent, or nearly so, form one spike:

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
# Spiking steps with at most this many calm steps in between form one spike.
_CALM = 2
_LEAST_HISTORY = 8
# Windows for early steps, because a full window would contain the initial fall of the loss.
_SHORT_WINDOWS = (8, 16, 32, 64)
# The spread of n losses is multiplied by 1 + _UNSURE / n, because a few losses may be close to each
# other by chance.
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
    usual: The loss expected from the preceding steps.
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
    window: How many preceding logged steps determine the usual loss of a step.
    threshold: A step spikes if its robust z-score is higher than this. Losses that are not finite
      have an infinite score.
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
  """Returns the usual loss and the robust z-score of each step; the first few scores are 0.

  The usual loss continues the line through the medians of both halves of the window, so that the
  fast initial fall of the loss does not hide a spike. Steps near the beginning are also compared
  with a shorter window, of a size from `_SHORT_WINDOWS`; the higher score counts.
  """
  usual, scores = np.zeros(len(values)), np.zeros(len(values))
  if len(values) <= _LEAST_HISTORY:
    return usual, scores
  padded = np.concatenate([np.full(window, np.nan), np.where(np.isfinite(values), values, np.nan)])
  before = np.lib.stride_tricks.sliding_window_view(padded, window)
  # To save time in a long log, a few neighbouring steps share a line.
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
  """Returns the robust z-score of each loss; infinity for a loss that is not finite."""
  # The spread needs a minimum, because losses that were logged with few digits may all be equal.
  spread = np.maximum(spread, 1e-3 * np.abs(usual) + 1e-12)
  finite = np.isfinite(values)
  return np.where(finite, (np.where(finite, values, 0.0) - usual) / spread, math.inf)


def _lines(known: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns the line through each window: its value after the window, its slope, and its spread.

  The spread is that of the losses around the line.
  """
  window = known.shape[1]
  half = window // 2
  distance = np.arange(window) - window
  older, newer = _median(known[:, :half]), _median(known[:, half:])
  # The slope is 0 if losses are missing in the older half of the window, because the run has just
  # begun or because some losses are not finite.
  slope = np.where(np.isnan(known[:, :half]).any(axis=1), 0.0, (newer - older) / (window / 2))
  slope = np.nan_to_num(slope)
  level = np.where(np.isnan(newer), np.nan_to_num(older), newer - slope * distance[half:].mean())
  spread = 1.4826 * _median(np.abs(known - level[:, None] - slope[:, None] * distance))
  return level, slope, np.nan_to_num(spread)


def _median(values: np.ndarray) -> np.ndarray:
  """Returns the median of each row without its NaNs; NaN for a row of only NaNs."""
  if not np.isnan(values).any():
    return np.median(values, axis=1)  # Several times faster than `nanmedian`.
  found = np.full(len(values), np.nan)
  some = ~np.isnan(values).all(axis=1)
  found[some] = np.nanmedian(values[some], axis=1)
  return found
