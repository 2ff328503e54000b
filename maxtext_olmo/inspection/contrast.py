"""Compares the steps of a loss spike with calm steps nearby.

The rows of the calm steps are the usual rows. Each row of a spike is scored by how far its figures
(see `figures`) are from those of the usual rows. A row with several documents is attributed to the
document whose tokens are least usual. Files, labels and documents are ranked by the scores of their
rows, so that a bad file comes first even if each step holds few of its rows. Rows without loss
cannot raise the loss, so they are not scored.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from maxtext_olmo.inspection import figures as figures_lib
from maxtext_olmo.inspection import losses as losses_lib
from maxtext_olmo.inspection import spike_detection

_MOST_STEPS = 16  # Maximum number of steps of a spike that are read.
_CALM_STEPS = (4, 64)  # Minimum and maximum number of calm steps.
_CALM_ROWS = 512  # Beyond the minimum, calm steps are read until there are this many rows.


@dataclasses.dataclass(frozen=True)
class RowScore:
  """A row of a spike.

  Attributes:
    step: The step that holds the row.
    row: The index of the row in the global batch.
    label: The label of `file`.
    file: The file that the row is attributed to.
    document: The document in the file; -1 if unknown.
    score: How far the row stands out from the usual rows.
    why: The name of the figure that stands out most.
    found: The value of that figure in this row.
    usual: The median of that figure over the usual rows.
  """

  step: int
  row: int
  label: str
  file: str
  document: int
  score: float
  why: str
  found: float
  usual: float

  @property
  def reason(self) -> str:
    """A description of why the row stands out."""
    noun, found, usual = figures_lib.describe(self.why, self.found, self.usual)
    return f"{noun} {found}, usually {usual}"


@dataclasses.dataclass(frozen=True)
class SourceScore:
  """A label, file or document, and what it contributes to a spike.

  Attributes:
    source: `(label,)`, `(label, file)` or `(label, file, document)`.
    notable: The number of rows that stand out and are attributed to this source.
    share: The source's share of the tokens of the spike.
    usual_share: The source's share of the tokens of the calm steps.
    score: The sum of the scores of the `notable` rows, each minus `NOTABLE`.
  """

  source: tuple[Any, ...]
  notable: int
  share: float
  usual_share: float
  score: float


@dataclasses.dataclass(frozen=True, eq=False)
class Contrast:
  """The result of comparing the steps of a spike with calm steps.

  Attributes:
    steps: The steps of the spike.
    calm_steps: The steps with which the spike is compared.
    rows: All rows with loss, the highest score first.
    without_loss: The number of rows without loss.
    figures: The score of each figure.
    tokens: Tokens of each label, file and document in the spike.
    usual_tokens: Tokens of each label and file in the calm steps.
  """

  steps: tuple[int, ...]
  calm_steps: tuple[int, ...]
  rows: tuple[RowScore, ...]
  without_loss: int
  figures: tuple[figures_lib.FigureScore, ...]
  tokens: collections.Counter[tuple[Any, ...]]
  usual_tokens: collections.Counter[tuple[Any, ...]]

  @property
  def notable(self) -> int:
    """The number of rows that stand out."""
    return sum(row.score > figures_lib.NOTABLE for row in self.rows)

  @functools.cached_property
  def labels(self) -> tuple[SourceScore, ...]:
    """All labels, the highest score first."""
    return self._rank(1)

  @functools.cached_property
  def files(self) -> tuple[SourceScore, ...]:
    """All files, the highest score first."""
    return self._rank(2)

  @functools.cached_property
  def documents(self) -> tuple[SourceScore, ...]:
    """The documents to which notable rows are attributed, the highest score first."""
    return tuple(d for d in self._rank(3) if d.notable and d.source[2] >= 0)

  def _rank(self, depth: int) -> tuple[SourceScore, ...]:
    sums: dict[tuple[Any, ...], list[float]] = collections.defaultdict(list)
    for row in self.rows:
      key = (row.label, row.file, row.document)[:depth]
      if row.score > figures_lib.NOTABLE:
        sums[key].append(row.score - figures_lib.NOTABLE)
    found, usual = (_to_depth(counts, depth) for counts in (self.tokens, self.usual_tokens))
    total, usual_total = max(1, found.total()), max(1, usual.total())
    sources = [
        SourceScore(key, len(sums[key]), count / total, usual[key] / usual_total, sum(sums[key]))
        for key, count in found.items()
    ]
    return tuple(sorted(sources, key=lambda s: (-s.score, s.usual_share - s.share, s.source)))


def _to_depth(
    counts: collections.Counter[tuple[Any, ...]], depth: int
) -> collections.Counter[tuple[Any, ...]]:
  merged: collections.Counter[tuple[Any, ...]] = collections.Counter()
  for key, count in counts.items():
    merged[key[:depth]] += count
  return merged


def steps_to_compare(
    losses: losses_lib.Losses, spike: spike_detection.Spike, spikes: Iterable[spike_detection.Spike]
) -> tuple[list[int], list[int]]:
  """Returns the steps of a spike, and the calm steps to compare them with.

  The steps of a spike include those before it that may have caused it. If every step is logged,
  that is the step before the spike, because the update of a step affects the loss of the next one.
  If not every step is logged, a logged loss may be the mean since the previous logged step, so all
  steps since then are included.

  The calm steps come before the spike or, if there are too few, after it.

  Args:
    spikes: All spikes of the run; none of their steps counts as calm.
  """
  steps = losses.steps
  loud = np.zeros(len(steps), np.bool_)
  for other in spikes:
    loud[np.searchsorted(steps, other.first) : np.searchsorted(steps, other.last, "right")] = True
  first, peak = np.searchsorted(steps, [spike.first, spike.peak]).tolist()
  last = int(np.searchsorted(steps, spike.last))

  def since(place: int) -> range:
    """Returns the steps that a logged loss may cover."""
    before = int(steps[place - 1]) if place else int(steps[place]) - 1
    return range(max(before + 1, int(steps[place]) - _MOST_STEPS + 1), int(steps[place]) + 1)

  chosen = set(since(peak))
  if steps[first] > 0 and len(since(first)) == 1:
    chosen.add(int(steps[first]) - 1)
  for place in range(first, last + 1):
    if len(chosen) + len(since(place)) > _MOST_STEPS:
      break
    chosen.update(since(place))
  calm = steps[~loud & (steps < spike.first)][::-1]
  if len(calm) < _CALM_STEPS[0]:
    calm = steps[~loud & (steps > spike.last)]
  nearest = [step for step in calm[: _CALM_STEPS[1] + 1].tolist() if step not in chosen]
  return sorted(chosen), nearest[: _CALM_STEPS[1]]


def contrast(
    read: Callable[[int], figures_lib.StepRows],
    steps: Sequence[int],
    calm_steps: Sequence[int],
    *,
    eos_id: int = -1,
) -> Contrast:
  """Compares the rows of a spike with the rows of calm steps.

  Args:
    read: Returns the rows of a step.
    steps: The steps of a spike.
    calm_steps: The calm steps, the nearest first; reading stops once there are enough rows.
    eos_id: The id of the token that ends a document; negative if unknown.
  """
  calm: list[figures_lib.StepRows] = []
  for step in calm_steps:
    calm.append(read(step))
    enough = sum(len(rows.tokens) for rows in calm) >= _CALM_ROWS
    if enough and len(calm) >= _CALM_STEPS[0]:
      break
  surprise = figures_lib.token_surprise(calm)
  usual = [figures_lib.measure(rows, surprise, eos_id) for rows in calm]
  usual_tokens = _count_tokens(calm, depth=2)
  del calm  # Steps are large; from here on, only one is in memory at a time.
  tokens: collections.Counter[tuple[Any, ...]] = collections.Counter()
  measured: list[figures_lib.Measured] = []
  without_loss = 0
  for step in steps:
    rows = read(step)
    measured.append(figures_lib.measure(rows, surprise, eos_id))
    tokens += _count_tokens([rows], depth=3)
    real = sum(bool(pieces) for pieces in rows.pieces)
    without_loss += real - len(measured[-1].places)
  copies = figures_lib.count_copies([*usual, *measured])
  scale = figures_lib.Scale.of(np.concatenate([step.figures_with(copies) for step in usual]))
  found: list[RowScore] = []
  figures = [step.figures_with(copies) for step in measured]
  for step, own, values in zip(steps, measured, figures):
    scores = scale.scores(values)
    for number, place in enumerate(own.places):
      best = int(scores[number].argmax())
      piece = own.furthest_piece(number, scale.median[0])
      found.append(
          RowScore(
              step,
              place,
              piece.label,
              piece.file,
              piece.document,
              float(scores[number, best]),
              figures_lib.FIGURES[best],
              float(values[number, best]),
              float(scale.median[best]),
          )
      )
  found.sort(key=lambda row: (-row.score, row.step, row.row))
  return Contrast(
      tuple(steps),
      tuple(calm_steps[: len(usual)]),
      tuple(found),
      without_loss,
      scale.figure_scores(np.concatenate(figures)),
      tokens,
      usual_tokens,
  )


def merge(contrasts: Sequence[Contrast]) -> Contrast:
  """Combines the comparisons of several spikes, each with its own calm steps, into one."""
  rows: dict[tuple[int, int], RowScore] = {}
  for row in sorted((row for one in contrasts for row in one.rows), key=lambda row: -row.score):
    rows.setdefault((row.step, row.row), row)
  weights = np.array([len(one.rows) for one in contrasts], np.float64) + 1e-9
  figures = []
  for number, name in enumerate(figures_lib.FIGURES):
    its = [one.figures[number] for one in contrasts]
    found, usual = (
        float(np.average([getattr(f, key) for f in its], weights=weights))
        for key in ("found", "usual")
    )
    score = sum(f.score for f in its) / math.sqrt(len(its))
    figures.append(figures_lib.FigureScore(name, found, usual, sum(f.notable for f in its), score))
  return Contrast(
      tuple(sorted({step for one in contrasts for step in one.steps})),
      tuple(sorted({step for one in contrasts for step in one.calm_steps})),
      tuple(rows.values()),
      sum(one.without_loss for one in contrasts),
      tuple(figures),
      sum((one.tokens for one in contrasts), collections.Counter()),
      sum((one.usual_tokens for one in contrasts), collections.Counter()),
  )


def _count_tokens(
    steps: Iterable[figures_lib.StepRows], depth: int
) -> collections.Counter[tuple[Any, ...]]:
  counts: collections.Counter[tuple[Any, ...]] = collections.Counter()
  for rows in steps:
    for pieces in rows.pieces:
      for piece in pieces:
        counts[piece[:depth]] += piece.size
  return counts
