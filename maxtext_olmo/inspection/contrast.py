"""What sets the steps of a loss spike apart from the steps around them.

The rows of a spike are compared with the rows of calm steps before it, the usual rows. Each row has
a few figures, and each figure a score: its distance from the median of the usual rows, in units of
their spread. The score of a row is the largest of these, and the figure it comes from says why:

    rarity        mean surprise of its tokens, in bits, under the token counts of the usual rows
    distinct      share of its tokens that differ from each other
    repetition    whether the repetition filter rejects it
    ends          documents that end in it
    padding       share of the row that is padding
    duplicates    rows of these steps that hold the same tokens

Files and labels are ranked by the scores of their rows in the spike, so that a bad file comes first
even if each step holds few of its rows.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

from maxtext_olmo.inspection import losses as losses_lib

FIGURES = ("rarity", "distinct", "repetition", "ends", "padding", "duplicates")
CALM_STEPS = 16
# Scores up to this are chance, also among hundreds of rows.
NOTABLE = 4.0


class StepRows(NamedTuple):
  """The rows of a step.

  Attributes:
    tokens: Token ids (rows, length).
    used: Tokens of each row that are not padding.
    clean: Whether the repetition filter keeps each row.
    files: The file that each row begins with; -1 for a padding row.
  """

  tokens: np.ndarray
  used: np.ndarray
  clean: np.ndarray
  files: np.ndarray


@dataclasses.dataclass(frozen=True)
class RowScore:
  """A row of a spike.

  Attributes:
    step: The step that holds it.
    row: Its place in the global batch.
    file: The file that it begins with.
    score: How far it stands out from the usual rows.
    why: The figure that stands out most.
    found: That figure.
    usual: The median of the usual rows.
  """

  step: int
  row: int
  file: int
  score: float
  why: str
  found: float
  usual: float


@dataclasses.dataclass(frozen=True)
class SourceScore:
  """A file or label, and what it contributes to a spike.

  Attributes:
    source: The number of the file, or the name of the label.
    rows: Its rows in the steps of the spike.
    notable: How many of them stand out.
    share: Its share of the rows of the spike.
    usual_share: Its share of the usual rows.
    score: The sum of its rows' scores above what is chance.
  """

  source: Any
  rows: int
  notable: int
  share: float
  usual_share: float
  score: float


@dataclasses.dataclass(frozen=True)
class Contrast:
  """What sets some steps apart.

  Attributes:
    steps: The steps of the spikes.
    calm_steps: The steps that they are compared with.
    rows: All rows that are not padding, the highest score first.
    files: All files among them, the highest score first.
  """

  steps: tuple[int, ...]
  calm_steps: tuple[int, ...]
  rows: tuple[RowScore, ...]
  files: tuple[SourceScore, ...]

  def labels(self, labels: Sequence[str]) -> list[SourceScore]:
    """Returns the scores by label, given the label of each file; the highest first."""
    found: dict[str, list[SourceScore]] = collections.defaultdict(list)
    for file in self.files:
      found[labels[file.source]].append(file)
    merged = [
        SourceScore(
            label,
            *(sum(getattr(file, name) for file in files) for name in _SUMS),  # type: ignore
        )
        for label, files in found.items()
    ]
    return sorted(merged, key=lambda source: -source.score)


_SUMS = ("rows", "notable", "share", "usual_share", "score")


def steps_to_compare(
    losses: losses_lib.Losses, spikes: Iterable[losses_lib.Spike], most: int = 64
) -> tuple[list[int], list[int]]:
  """Returns the steps of some spikes, and as many calm steps before each as `CALM_STEPS`.

  Args:
    most: Of the steps of all spikes; those of the first spikes are kept.
  """
  spikes = list(spikes)
  loud = np.zeros(len(losses.steps), np.bool_)
  for spike in spikes:
    loud |= (losses.steps >= spike.first) & (losses.steps <= spike.last)
  steps: list[int] = []
  calm: set[int] = set()
  for spike in spikes:
    here = (losses.steps >= spike.first) & (losses.steps <= spike.last)
    steps += losses.steps[here].tolist()
    calm.update(losses.steps[~loud & (losses.steps < spike.first)][-CALM_STEPS:].tolist())
    if len(steps) >= most:
      break
  return sorted(steps[:most]), sorted(calm)[-most:]


def contrast(
    read: Callable[[int], StepRows],
    steps: Sequence[int],
    calm_steps: Sequence[int],
    *,
    eos_id: int = -1,
) -> Contrast:
  """Compares the rows of some steps with those of calm steps.

  Args:
    read: Returns the rows of a step.
    eos_id: The token that ends a document; negative if unknown.
  """
  calm = [read(step) for step in calm_steps]
  loud = [read(step) for step in steps]
  copies = collections.Counter(key for rows in (*calm, *loud) for key in _hashes(rows))
  surprise = _surprise(calm)
  usual = np.concatenate([_figures(rows, surprise, copies, eos_id) for rows in calm])
  usual = usual[np.concatenate([rows.used for rows in calm]) > 0]
  median = np.median(usual, axis=0)
  spread = np.maximum(1.4826 * np.median(np.abs(usual - median), axis=0), _least_spread(usual))
  found: list[RowScore] = []
  for step, rows in zip(steps, loud):
    figures = _figures(rows, surprise, copies, eos_id)
    scores = np.abs(figures - median) / spread
    for row in np.flatnonzero(rows.used > 0).tolist():
      best = int(scores[row].argmax())
      found.append(
          RowScore(
              step,
              row,
              int(rows.files[row]),
              float(scores[row, best]),
              FIGURES[best],
              float(figures[row, best]),
              float(median[best]),
          )
      )
  found.sort(key=lambda row: -row.score)
  calm_files = collections.Counter(int(f) for rows in calm for f in rows.files if f >= 0)
  return Contrast(tuple(steps), tuple(calm_steps), tuple(found), _rank_files(found, calm_files))


def _rank_files(
    rows: Sequence[RowScore], calm_files: collections.Counter[int]
) -> tuple[SourceScore, ...]:
  of_file: dict[int, list[RowScore]] = collections.defaultdict(list)
  for row in rows:
    of_file[row.file].append(row)
  sources = [
      SourceScore(
          file,
          len(its),
          sum(row.score > NOTABLE for row in its),
          len(its) / len(rows),
          calm_files[file] / max(1, calm_files.total()),
          sum(max(0.0, row.score - NOTABLE) for row in its),
      )
      for file, its in of_file.items()
  ]
  return tuple(sorted(sources, key=lambda source: (-source.score, -source.rows)))


def _surprise(calm: Sequence[StepRows]) -> np.ndarray:
  """Returns the surprise, in bits, of each token up to the highest one, and of all others last."""
  tokens = [rows.tokens[i, :n] for rows in calm for i, n in enumerate(rows.used.tolist())]
  counts = np.bincount(np.concatenate([*tokens, np.zeros(0, np.int64)]).astype(np.int64))
  # Every token counts half a time more than it was seen, those that were never seen as one.
  smoothed = np.append(counts, 0) + 0.5
  return -np.log2(smoothed / smoothed.sum())


def _hashes(rows: StepRows) -> list[int]:
  return [
      xxhash.xxh3_64_intdigest(row[:used].tobytes()) if used else -1
      for row, used in zip(rows.tokens, rows.used.tolist())
  ]


def _figures(
    rows: StepRows, surprise: np.ndarray, copies: collections.Counter[int], eos_id: int
) -> np.ndarray:
  """Returns the figures of each row (rows, figures)."""
  found = np.zeros((len(rows.tokens), len(FIGURES)))
  for i, (row, used, key) in enumerate(zip(rows.tokens, rows.used.tolist(), _hashes(rows))):
    tokens = row[:used]
    if used:
      found[i] = (
          surprise[np.minimum(tokens, len(surprise) - 1)].mean(),
          len(np.unique(tokens)) / used,
          not rows.clean[i],
          (tokens == eos_id).sum(),
          1 - used / len(row),
          copies[key] - 1,
      )
  return found


def _least_spread(usual: np.ndarray) -> np.ndarray:
  """Returns the least spread of each figure, for figures that hardly differ among usual rows."""
  floors = np.array([0.1, 0.01, 0.1, 1.0, 0.02, 0.1])
  return np.maximum(floors, 0.25 * usual.std(axis=0))
