"""Figures (statistics) of rows, and their distance from the figures of usual rows.

    rarity        mean surprise of the tokens, in bits, given the token counts of the usual rows
    distinct      number of distinct tokens divided by the number of tokens
    repetition    whether the repetition filter rejects the row, or would if it were on
    ends          number of documents that end in the row
    length        mean length of the documents, if there is a document index
    padding       share of the row that is padding
    duplicates    share of the tokens in documents of which the compared steps also read a copy at a
                  different place in the corpus; the same place in a later epoch does not count

Each figure of a row has a score: its distance from the median of the usual rows, in units of their
spread. The score of a row is the largest score of its figures, and the figure with that score shows
why the row stands out.
"""

from __future__ import annotations

import bisect
import collections
import concurrent.futures
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from maxtext_olmo.cores import available_cores
from maxtext_olmo.rows import repetition

FIGURES = ("rarity", "distinct", "repetition", "ends", "length", "padding", "duplicates")
_WORDS = {
    "rarity": ("surprise of a token", "{:.2f} bits"),
    "distinct": ("distinct tokens", "{:.1%}"),
    "repetition": ("rejected by the repetition filter", "{:.0%}"),
    "ends": ("documents that end in a row", "{:.1f}"),
    "length": ("length of a document", "{:,.0f} tokens"),
    "padding": ("padding", "{:.1%}"),
    "duplicates": ("tokens in duplicates", "{:.0%}"),
}
# Scores up to this may occur by chance among hundreds of rows.
NOTABLE = 4.0
# The minimum spread of each figure, because some figures hardly vary among usual rows. Counts are
# compared by their base-2 logarithms.
_FLOORS = np.array([0.1, 0.01, 0.1, 0.5, 0.5, 0.02, 0.1])
_COUNTS = np.array([name in ("ends", "length") for name in FIGURES])
_LARGE_STEP = 1 << 20  # Tokens; starting threads takes longer than measuring a smaller step.
_SHORT = 16  # Shorter documents may be equal by chance.


def describe(figure: str, found: float, usual: float) -> tuple[str, str, str]:
  """Returns the description of a figure, its value, and its usual value, as text."""
  noun, form = _WORDS[figure]
  return noun, form.format(found), form.format(usual)


class Piece(NamedTuple):
  """The tokens of a row that come from one document, or from one file.

  Attributes:
    label: The label of the file.
    file: The path of the file.
    document: The number of the document; -1 if unknown.
    column: The column of the row where the tokens begin.
    size: The number of tokens.
    length: The number of tokens of the whole document; 0 if unknown.
    first: The index of the first token in the file.
  """

  label: str
  file: str
  document: int
  column: int
  size: int
  length: int
  first: int


class HashedDocument(NamedTuple):
  """The hash of a document, or of the part of a document that a row holds.

  Attributes:
    key: A hash of the tokens; None for a short document.
    size: The number of tokens.
    place: The place in the corpus: the file, and the index of the first token in the file.
  """

  key: int | None
  size: int
  place: tuple[str, int]


class StepRows(NamedTuple):
  """The rows of a step.

  Attributes:
    tokens: The tokens of each row, without padding.
    width: The number of tokens in a row, including padding.
    trained: Whether each row contributes to the loss.
    pieces: The pieces of each row; empty for a padding row.
  """

  tokens: Sequence[np.ndarray]
  width: int
  trained: Sequence[bool]
  pieces: Sequence[Sequence[Piece]]


@dataclasses.dataclass(frozen=True)
class FigureScore:
  """One figure over all rows of a spike.

  Attributes:
    name: One of `FIGURES`.
    found: The mean of the figure over the rows of the spike.
    usual: The mean of the figure over the usual rows.
    notable: The number of rows whose value of this figure stands out.
    score: The difference of the means, in standard errors.
  """

  name: str
  found: float
  usual: float
  notable: int
  score: float


@dataclasses.dataclass(frozen=True, eq=False)
class Measured:
  """The figures of the rows of a step that contribute to the loss.

  Attributes:
    places: The index of each row in the global batch.
    figures: The rows' figures except `duplicates`, which depends on other steps.
    documents: The documents in each row.
    pieces: The pieces of each row.
    surprises: The mean surprise of each piece.
  """

  places: list[int]
  figures: np.ndarray
  documents: list[list[HashedDocument]]
  pieces: list[Sequence[Piece]]
  surprises: list[list[float]]

  def figures_with(self, copies: Mapping[int | None, int]) -> np.ndarray:
    """Returns the figures of each row (rows, figures), given the result of `count_copies`."""
    shares = [
        sum(d.size for d in row if copies.get(d.key, 0) > 1) / sum(d.size for d in row)
        for row in self.documents
    ]
    return np.column_stack([self.figures, np.array(shares, np.float64)])

  def furthest_piece(self, number: int, usual: float) -> Piece:
    """Returns the piece of a row whose surprise is least usual; longer pieces count more."""
    pieces = self.pieces[number]
    distances = [
        abs(surprise - usual) * math.sqrt(piece.size)
        for surprise, piece in zip(self.surprises[number], pieces)
    ]
    return pieces[int(np.argmax(distances))]


def measure(rows: StepRows, surprise: np.ndarray, eos_id: int = -1) -> Measured:
  """Returns the figures of those rows of a step that contribute to the loss.

  Args:
    surprise: The result of `token_surprise`.
    eos_id: The id of the token that ends a document; negative if unknown.
  """
  places = [i for i, row in enumerate(rows.tokens) if len(row) and rows.trained[i]]
  if sum(len(rows.tokens[place]) for place in places) < _LARGE_STEP:
    return _measure_block(rows, places, surprise, eos_id)
  cores = available_cores()
  size = -(-len(places) // cores)
  blocks = [places[start : start + size] for start in range(0, len(places), size)]
  # In threads, because NumPy does most of the work on long rows without the interpreter lock.
  with concurrent.futures.ThreadPoolExecutor(cores) as pool:
    measured = list(pool.map(lambda block: _measure_block(rows, block, surprise, eos_id), blocks))
  return Measured(
      places,
      np.concatenate([block.figures for block in measured]),
      [row for block in measured for row in block.documents],
      [row for block in measured for row in block.pieces],
      [row for block in measured for row in block.surprises],
  )


def _measure_block(
    rows: StepRows, places: list[int], surprise: np.ndarray, eos_id: int
) -> Measured:
  """Returns the figures of some rows of a step."""
  figures = np.zeros((len(places), len(FIGURES) - 1))
  clean = _clean([rows.tokens[place] for place in places])
  documents, surprises = [], []
  for number, place in enumerate(places):
    tokens, pieces = rows.tokens[place], rows.pieces[place]
    bits = surprise[np.minimum(tokens.astype(np.int64), len(surprise) - 1)]
    ends = (np.flatnonzero(tokens == eos_id) + 1).tolist() if eos_id >= 0 else []
    lengths = [piece.length for piece in pieces if piece.length]
    figures[number] = (
        bits.mean(),
        _count_distinct(tokens) / len(tokens),
        not clean[number],
        len(ends),
        np.mean(lengths) if lengths else 0,
        1 - len(tokens) / rows.width,
    )
    documents.append(_hash_documents(tokens, ends, pieces))
    surprises.append([float(bits[p.column : p.column + p.size].mean()) for p in pieces])
  return Measured(places, figures, documents, [rows.pieces[i] for i in places], surprises)


def _count_distinct(tokens: np.ndarray) -> int:
  ordered = np.sort(tokens)  # Many times faster than `np.unique`, which hashes in newer NumPys.
  return 1 + int(np.count_nonzero(ordered[1:] != ordered[:-1]))


def _clean(rows: Sequence[np.ndarray]) -> np.ndarray:
  """Returns whether the repetition filter keeps each row."""
  verdicts = np.ones(len(rows), np.bool_)
  lengths = np.array([len(row) for row in rows])
  for length in np.unique(lengths).tolist():  # Full rows share one length; padded rows differ.
    same = np.flatnonzero(lengths == length).tolist()
    verdicts[same] = repetition.clean_rows(np.stack([rows[i] for i in same]))
  return verdicts


def _hash_documents(
    tokens: np.ndarray, ends: Sequence[int], pieces: Sequence[Piece]
) -> list[HashedDocument]:
  bounds = [0, *ends] if ends and ends[-1] == len(tokens) else [0, *ends, len(tokens)]
  columns = [piece.column for piece in pieces]
  found: list[HashedDocument] = []
  for first, end in zip(bounds, bounds[1:]):
    key = None
    if end - first >= min(_SHORT, len(tokens)):
      key = xxhash.xxh3_64_intdigest(np.ascontiguousarray(tokens[first:end]).tobytes())
    piece = pieces[max(0, bisect.bisect_right(columns, first) - 1)]
    place = piece.file, piece.first + first - piece.column
    found.append(HashedDocument(key, end - first, place))
  return found


def count_copies(steps: Iterable[Measured]) -> dict[int | None, int]:
  """Returns, for each hash, from how many places in the corpus the steps read such a document."""
  documents = (document for step in steps for row in step.documents for document in row)
  places = {(document.key, document.place) for document in documents}
  return collections.Counter(key for key, _ in places if key is not None)


def token_surprise(steps: Iterable[StepRows]) -> np.ndarray:
  """Returns the surprise of each token id in bits; the last item applies to all higher ids."""
  counts = np.zeros(1, np.int64)
  for rows in steps:
    # Convert the ids while they are joined: a step is large, so each copy of it takes time.
    empty = np.zeros(0, np.int64)
    own = np.bincount(np.concatenate([empty, *rows.tokens], dtype=np.int64, casting="unsafe"))
    longer, shorter = (own, counts) if len(own) > len(counts) else (counts, own)
    longer[: len(shorter)] += shorter
    counts = longer
  # Add 1/2 to every count. The appended count stands for all ids above the highest one seen.
  smoothed = np.append(counts, 0) + 0.5
  return -np.log2(smoothed / smoothed.sum())


@dataclasses.dataclass(frozen=True, eq=False)
class Scale:
  """The distribution of the figures of usual rows.

  Attributes:
    median: The median of each figure.
    below: The spread of each figure below its median.
    above: The spread of each figure above its median.
    mean: The mean of each figure.
    deviation: The standard deviation of each figure.
  """

  median: np.ndarray
  below: np.ndarray
  above: np.ndarray
  mean: np.ndarray
  deviation: np.ndarray

  @classmethod
  def of(cls, usual: np.ndarray) -> Scale:
    """Returns the distribution of the figures of usual rows, an array of shape (rows, figures)."""
    if not len(usual):
      usual = np.zeros((1, len(FIGURES)))
    scaled = _scaled(usual)
    low, median, high = np.quantile(scaled, (0.05, 0.5, 0.95), axis=0)
    spread = np.maximum(1.4826 * np.median(np.abs(scaled - median), axis=0), _FLOORS)
    # Most figures have a long tail on one side. The median absolute deviation misses it, so use
    # percentiles too: 5 % of a normal distribution lie beyond 1.645 deviations on each side.
    return cls(
        np.median(usual, axis=0),
        np.maximum(spread, (median - low) / 1.645),
        np.maximum(spread, (high - median) / 1.645),
        usual.mean(axis=0),
        np.maximum(usual.std(axis=0), _FLOORS),
    )

  def scores(self, figures: np.ndarray) -> np.ndarray:
    """Returns how far each figure of each row is from the median, in units of the spread."""
    distance = _scaled(figures) - _scaled(self.median)
    return np.where(distance < 0, -distance / self.below, distance / self.above)

  def figure_scores(self, figures: np.ndarray) -> tuple[FigureScore, ...]:
    """Returns the score of each figure over all rows of a spike."""
    notable = (self.scores(figures) > NOTABLE).sum(axis=0)
    means = figures.mean(axis=0) if len(figures) else self.mean
    errors = self.deviation / math.sqrt(max(1, len(figures)))
    scores = (means - self.mean) / errors
    return tuple(
        FigureScore(name, float(means[i]), float(self.mean[i]), int(notable[i]), float(scores[i]))
        for i, name in enumerate(FIGURES)
    )


def _scaled(figures: np.ndarray) -> np.ndarray:
  return np.where(_COUNTS, np.log2(1 + figures), figures)
