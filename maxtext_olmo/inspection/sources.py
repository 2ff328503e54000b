"""The sources of a run over its steps: the tokens of each label that it has seen and will see.

A run is a list of stretches, each with one stream and one schedule. Its past and future steps are
divided into at most a few thousand bins, and `count_sources` counts the tokens of each label in
each bin:

    edges      0        700       1400      2100         the steps between which the bins lie
    tokens        web 70 %  web 70 %  web 40 %           the tokens in each bin, by label
                  code 30 % code 30 % code 60 %
    seen       0        1.0 B     2.0 B     3.0 B        the tokens before each edge (all labels)

Counts are exact for mixtures and for corpus order. For a shuffle of a whole corpus, all rows are
counted if there are few; otherwise the shares of a bin come from a sample, and `error` is their
margin of error.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from maxtext_olmo import errors
from maxtext_olmo.inspection import changes as changes_lib
from maxtext_olmo.inspection import counts as counts_lib
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.rows import steps as steps_lib

BINS = 2000
_SAMPLED_BINS = 500
_SAMPLED_ROWS = 1 << 21
_SAMPLED_CALLS = 256  # The limit for packed documents, because each call packs a whole window.
_CONFIDENCE = 1.96  # 95 % of estimates are within this many standard deviations.


@dataclasses.dataclass(frozen=True, eq=False)
class Sources:
  """The tokens of each label that a run has seen and will see.

  Attributes:
    labels: The labels that the run reads.
    available: The tokens of each label that training may see.
    edges: The steps at which bins begin, and the step after the last bin.
    tokens: The tokens of each label in each bin (bins, labels); sampled unless `exact`.
    seen: The tokens of each label before each edge (bins + 1, labels).
    rows: The rows that the run took before each edge.
    complete: For each label, the step after which all its tokens have been seen once. This may be a
      step after the end of the run; None if there is no such step.
    exact: Whether all counts are exact.
    error: The margin of error of a label's share in a bin, at 95 % confidence.
  """

  labels: tuple[str, ...]
  available: np.ndarray
  edges: np.ndarray
  tokens: np.ndarray
  seen: np.ndarray
  rows: np.ndarray
  complete: tuple[int | None, ...]
  exact: bool
  error: float

  @property
  def epochs(self) -> np.ndarray:
    """The epochs of each label before each edge (bins + 1, labels)."""
    return self.seen / np.maximum(self.available, 1)

  @property
  def shares(self) -> np.ndarray:
    """The share of each label in the tokens of each bin (bins, labels)."""
    return self.tokens / np.maximum(self.tokens.sum(axis=1, keepdims=True), 1e-9)

  @property
  def note(self) -> str:
    """A note on how exact the figures are."""
    if self.exact:
      return "All figures are exact."
    return (
        "The share of each label over time is estimated from a sample, with a margin of error of"
        f" {self.error:.1%} at 95 % confidence. Tokens seen and epochs are averages over shuffles,"
        " exact at the ends of epochs."
    )


def count_sources(stretches: Sequence[changes_lib.Stretch], *, bins: int = BINS) -> Sources:
  """Counts the tokens of each label over the steps of a run.

  Args:
    stretches: The stretches of the run, in order. Steps before the first stretch are not counted.
    bins: The approximate maximum number of bins.

  Raises:
    OrderError: The run has no step.
  """
  with_counters = []
  for stretch in stretches:
    counter = counts_lib.make_counter(stretch.stream, stretch.index)
    end = min(stretch.end, steps_lib.end_step(stretch.schedule, counter.num_positions))
    if end > stretch.first:
      with_counters.append((dataclasses.replace(stretch, end=end), counter))
  if not with_counters:
    raise errors.OrderError("The run has no steps to count: it ends before it begins.")
  steps = sum(stretch.end - stretch.first for stretch, _ in with_counters)
  counted = [
      _CountedStretch(stretch, counter, max(1, bins * (stretch.end - stretch.first) // steps))
      for stretch, counter in with_counters
  ]
  labels = tuple(dict.fromkeys(label for part in counted for label in part.counter.labels))
  columns = {label: i for i, label in enumerate(labels)}
  available = np.zeros(len(labels))
  tokens: list[np.ndarray] = []
  seen, rows = [np.zeros((1, len(labels)))], [np.zeros(1, np.int64)]
  consumed, averaged = np.zeros((2, len(labels)))
  complete: list[int | None] = [None] * len(labels)
  for part in counted:
    own = [columns[label] for label in part.counter.labels]
    available[own] = part.counter.available
    tokens.append(np.zeros((len(part.edges) - 1, len(labels))))
    tokens[-1][:, own] = part.tokens
    seen.append(np.repeat(seen[-1][-1:], len(part.edges) - 1, axis=0))
    seen[-1][:, own] += np.cumsum(part.seen, axis=0)
    rows.append(rows[-1][-1] + np.cumsum(part.rows))
    missing = available[own] - consumed[own]
    # Steps after the end of the run are estimated with averages since its beginning. `missing` is
    # exact, so make up for the difference between the average and the exact counts so far.
    beyond = (averaged - consumed)[own] if part is counted[-1] else None
    found = part.steps_of(missing, beyond)
    for column, step, tokens_left in zip(own, found, missing.tolist()):
      if complete[column] is None and tokens_left > 0:
        complete[column] = step
    consumed[own] += part.consumed([part.stretch.end])[0]
    averaged[own] += part.averaged([part.stretch.end])[0]
  return Sources(
      labels=labels,
      available=available,
      edges=np.concatenate([counted[0].edges[:1], *(part.edges[1:] for part in counted)]),
      tokens=np.concatenate(tokens),
      seen=np.concatenate(seen),
      rows=np.concatenate(rows),
      complete=tuple(complete),
      exact=all(part.exact for part in counted),
      error=max(part.error for part in counted),
  )


class _CountedStretch:
  """Counts the tokens of one stretch, of its own labels only, from its first step on.

  Attributes:
    edges: The steps at which its bins begin, and the step after the last bin.
    tokens: The tokens of each label in each bin.
    seen: Like `tokens`, but the average over shuffles if `tokens` is sampled.
    rows: The rows of each bin.
  """

  def __init__(self, stretch: changes_lib.Stretch, counter: counts_lib.Counter, bins: int):
    self.stretch = stretch
    self.counter = counter
    first, end, schedule = stretch.first, stretch.end, stretch.schedule
    total = self._position(end) - self._position(first)
    closed = counter.tally is None
    self._enumerated = not closed and total <= counter.enumerable
    self.exact = closed or self._enumerated
    self.error = 0.0
    if not self.exact:
      calls = _SAMPLED_BINS if counter.rows_per_call == 1 else _SAMPLED_CALLS
      bins = max(1, min(bins, bins * calls // BINS))
    cuts = {change.step for change in changes_lib.schedule_changes(schedule, first, end)}
    even = np.linspace(first, end, min(bins, end - first) + 1).astype(np.int64).tolist()
    self.edges = np.array(sorted({*cuts, *even}), np.int64)
    limit = counter.num_positions
    taken = [_taken(schedule, a, b, limit) for a, b in zip(self.edges[:-1], self.edges[1:])]
    self.rows = np.array([int((ends - firsts).sum()) for firsts, ends in taken], np.int64)
    if self._enumerated:
      self.tokens = np.stack([self._tally(firsts, ends) for firsts, ends in taken])
      self.seen = self.tokens
      return
    # A bin usually begins where the previous one ends, so evaluate each position once.
    flat = np.concatenate([np.concatenate(pair) for pair in taken])
    positions, places = np.unique(flat, return_inverse=True)
    before = counter.before(positions)
    found, place = [], 0
    for firsts, ends in taken:
      a, b = place, place + len(firsts)
      place = b + len(ends)
      found.append((before[places[b:place]] - before[places[a:b]]).sum(axis=0))
    self.seen = self.tokens = np.stack(found)
    if not closed:
      self._sample(taken)

  def _sample(self, taken: list[tuple[np.ndarray, np.ndarray]]) -> None:
    counter = self.counter
    budget = _SAMPLED_ROWS if counter.rows_per_call == 1 else _SAMPLED_CALLS
    each = max(1, budget // len(taken))
    sampled = np.zeros_like(self.seen)
    for number, (firsts, ends) in enumerate(taken):
      sizes = ends - firsts
      rows = int(sizes.sum())
      if not rows:
        continue
      offsets = (np.arange(min(each, rows)) + 0.5) * rows / min(each, rows)
      before = np.cumsum(sizes) - sizes
      piece = np.searchsorted(before, offsets, side="right") - 1
      positions = firsts[piece] + (offsets - before[piece]).astype(np.int64)
      sums, squares, count = counter.sample(positions)  # type: ignore[misc]
      sampled[number] = sums / count * rows * counter.row_length
      variance = np.maximum(squares / count - (sums / count) ** 2, 0)
      spread = np.sqrt(variance / count * max(0.0, 1 - count / rows))
      self.error = max(self.error, float(_CONFIDENCE * spread.max(initial=0)))
    self.tokens = sampled

  def _position(self, step: int) -> int:
    position = self.stretch.schedule.position(step)
    limit = self.counter.num_positions
    return position if limit is None else min(position, limit)

  def _tally(self, firsts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Returns the tokens of each label in the rows of some ranges of positions."""
    total = np.zeros(len(self.counter.labels))
    for first, end in zip(firsts.tolist(), ends.tolist()):
      total += self.counter.tally(np.arange(first, end))[0]  # type: ignore[misc]
    return np.rint(total * self.counter.row_length)

  def consumed(self, steps: Iterable[int]) -> np.ndarray:
    """Returns the tokens of each label consumed before some steps, including skipped samples."""
    if self._counts_rows:
      return np.stack([self._counted_rows(step) for step in steps])
    return self.averaged(steps)

  def averaged(self, steps: Iterable[int]) -> np.ndarray:
    """Returns what `consumed` would be on average over all shuffles."""
    ends = [self._position(step) for step in (self.stretch.first, *steps)]
    before = self.counter.before(np.array(ends))
    return before[1:] - before[0]

  def _counted_rows(self, step: int) -> np.ndarray:
    number = int(np.searchsorted(self.edges, step, side="right")) - 1
    return self._consumed[number] + self._tally_all(int(self.edges[number]), step)

  def _tally_all(self, first: int, end: int) -> np.ndarray:
    """Returns the tokens of each label in steps `first` to `end`, including skipped rows."""
    return self._tally(*(np.array([self._position(step)]) for step in (first, end)))

  @functools.cached_property
  def _counts_rows(self) -> bool:
    """Whether consumed tokens are counted row by row; never if epochs may drop their last rows."""
    return self._enumerated and self.stretch.schedule.epochs is None

  @functools.cached_property
  def _consumed(self) -> np.ndarray:
    """The tokens of each label consumed before each edge."""
    edges = self.edges.tolist()
    if not self._counts_rows:
      return self.averaged(edges)
    counts = self.seen
    if self.stretch.schedule.skips:
      counts = np.stack([self._tally_all(*pair) for pair in itertools.pairwise(edges)])
    return np.concatenate([np.zeros_like(counts[:1]), np.cumsum(counts, axis=0)])

  def steps_of(self, tokens: np.ndarray, beyond: np.ndarray | None) -> list[int | None]:
    """Returns, for each label, the step after which a given number of its tokens is consumed.

    The step is None for a label that never reaches its number of tokens.

    Args:
      tokens: The number of tokens of each label.
      beyond: Added to the averages that are used for steps after the end of the stretch. If None,
        only the stretch is searched.
    """
    tokens = tokens - 0.5  # Averages are fractions, and may fall just short of the number.
    edges, consumed = self.edges.tolist(), self._consumed
    last = min(steps_lib.end_step(self.stretch.schedule, self.counter.num_positions), 1 << 50)
    while beyond is not None and edges[-1] < last and (consumed[-1] < tokens).any():
      edges.append(min(2 * edges[-1], last))
      consumed = np.concatenate([consumed, self.averaged(edges[-1:]) + beyond])
    # Bisect: the tokens consumed before step `low` are too few, those before `high` are enough.
    numbers = np.array([np.searchsorted(c, t) for c, t in zip(consumed.T, tokens)])
    low = np.array([edges[max(0, number - 1)] for number in numbers])
    high = np.array([*edges, edges[-1]])[numbers]
    while len(apart := np.flatnonzero((high - low > 1) & (numbers < len(edges)))):
      middle = (low + high)[apart] // 2
      steps, places = np.unique(middle, return_inverse=True)
      inside = int(np.searchsorted(steps, self.stretch.end, side="right"))
      counts = []
      if inside:
        counts.append(self.consumed(steps[:inside].tolist()))
      if inside < len(steps):
        counts.append(self.averaged(steps[inside:].tolist()) + beyond)
      enough = np.concatenate(counts)[places, apart] >= tokens[apart]
      high[apart] = np.where(enough, middle, high[apart])
      low[apart] = np.where(enough, low[apart], middle)
    return [
        step if number < len(edges) else None
        for step, number in zip(high.tolist(), numbers.tolist())
    ]


def _taken(
    schedule: schedule_lib.BatchSchedule, first: int, end: int, limit: int | None
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the starts and the ends of the position ranges that some steps take."""
  if end <= first:
    return np.zeros(0, np.int64), np.zeros(0, np.int64)
  starts, sizes = schedule.block(int(first), int(end - first))
  breaks = np.flatnonzero(starts[1:] != starts[:-1] + sizes[:-1]) + 1
  firsts = starts[np.concatenate([[0], breaks]).astype(np.int64)]
  ends = (starts + sizes)[np.concatenate([breaks - 1, [len(starts) - 1]]).astype(np.int64)]
  for skipped, _ in schedule.skips.ranges:
    cut = schedule.skips.number(skipped)
    inside = np.flatnonzero((firsts < cut) & (cut < ends))
    firsts = np.insert(firsts, inside + 1, cut)
    ends = np.insert(ends, inside, cut)
  firsts, ends = schedule.skips.positions(firsts), schedule.skips.positions(ends - 1) + 1
  if limit is not None:
    firsts, ends = np.minimum(firsts, limit), np.minimum(ends, limit)
  return firsts, ends
