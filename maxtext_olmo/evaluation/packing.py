"""Plans which requests are scored in which row of which batch, for all requests at once.

If each row holds a single request, the rest of the row is padding, and the fewer row lengths are
compiled, the more padding there is. A model that keeps segments apart, as packed training requires,
can score several requests in one row:

    inputs_segmentation    1 1 1 1 1 2 2 2 3 3 . .      three requests, two tokens of padding
    inputs_position        0 1 2 3 4 0 1 2 0 1 . .

The longest request opens a batch: `batch_size` empty rows, each a few times as long as the request.
Each following request goes to the open row that it fills best, or opens a new batch if it fits into
none. So short requests fill the gaps after long requests, and only the last batch, whose rows are
short, has rows without a request.

Several row lengths are tried, as well as one request per row, and the cheapest plan is used. Every
host knows all lengths, so all hosts compute the same plan.

Each batch is padded to one of a few lengths, because each length costs a compilation. Rounding each
length up to a multiple of 16 would give many shapes. Powers of two would give few shapes, but make
a quarter of all tokens padding. Here all lengths are known before the first batch, so the best few
can be chosen. For example, with five batches, multiples of 16, and at most two shapes:

    longest row of the batch    130   70   66   33   20
    rounded up                  144   80   80   48   32
    two shapes                  144   80   80   80   80     80 tokens more than rounded up (chosen)
                                144  144  144   48   48     144 tokens more

Every host chooses from the same lengths, so all hosts make the same choice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from maxtext_olmo.evaluation import requests as requests_lib
from maxtext_olmo.evaluation.datasets import round_up
from maxtext_olmo.rows import batch

MAX_SHAPES = 12


def plan_lengths(
    longest: Sequence[int],
    multiple: int,
    *,
    max_shapes: int = MAX_SHAPES,
    known: Collection[int] = (),
) -> list[int]:
  """Returns the padded length of each batch, chosen for the least padding with few shapes.

  Args:
    longest: The length of the longest row of each batch.
    multiple: All lengths are multiples of this.
    max_shapes: The maximum number of lengths, including `known`. If `known` already has that many,
      a batch that is longer than all of them is padded to a power of two times `multiple`.
    known: Lengths that are already compiled and therefore free.

  >>> plan_lengths([130, 70, 66, 33, 20], 16, max_shapes=2)
  [144, 80, 80, 80, 80]
  >>> plan_lengths([200, 70, 40], 16, max_shapes=2, known={80, 144})
  [256, 80, 80]
  """
  rounded = [round_up(max(length, 1), multiple) for length in longest]
  if not rounded:
    return []
  budget = max_shapes - len(set(known))
  top = max(rounded)
  free = set(known)
  if budget < 1 and top > max(free, default=0):
    free.add(power_of_two(top, multiple))
  candidates = np.array(sorted({*rounded, *free}), np.int64)
  chosen = np.array(sorted(_choose(candidates, rounded, free, max(budget, 0))), np.int64)
  return chosen[np.searchsorted(chosen, rounded)].tolist()


def power_of_two(length: int, multiple: int) -> int:
  """Returns the smallest power of two times `multiple` that is at least `length`.

  >>> [power_of_two(length, 16) for length in (1, 16, 17, 65)]
  [16, 16, 32, 128]
  """
  steps = -(-max(length, 1) // multiple)
  return multiple << (steps - 1).bit_length()


def _choose(
    candidates: np.ndarray, rounded: Sequence[int], free: Collection[int], budget: int
) -> set[int]:
  """Returns all free lengths and at most `budget` others, chosen for the least padding."""
  places = np.searchsorted(candidates, rounded)
  weights = np.bincount(places, minlength=len(candidates))
  # count[j], tokens[j]: the number of batches whose length is one of the first j candidates, and
  # the sum of their lengths.
  count = np.concatenate([[0], np.cumsum(weights)])
  tokens = np.concatenate([[0], np.cumsum(weights * candidates)])
  # least[j, k]: the least padding for the first j candidates, if the j-th is chosen and k lengths
  # are compiled.
  impossible = np.iinfo(np.int64).max // 4
  least = np.full((len(candidates) + 1, budget + 1), impossible, np.int64)
  before = np.zeros((len(candidates) + 1, budget + 1), np.int64)
  least[0] = 0
  for j, length in enumerate(candidates.tolist(), start=1):
    padding = (count[j] - count[:j]) * length - (tokens[j] - tokens[:j])
    bought = 0 if length in free else 1
    for k in range(bought, budget + 1):
      totals = least[:j, k - bought] + padding
      before[j, k] = np.argmin(totals)
      least[j, k] = totals[before[j, k]]
  used = int(np.flatnonzero(weights)[-1]) + 1  # The longest choice must fit the longest batch.
  ends = [(int(least[j].min()), j) for j in range(used, len(candidates) + 1)]
  j = min(ends)[1]
  k = int(np.argmin(least[j]))
  chosen = set()
  while j:
    length = int(candidates[j - 1])
    chosen.add(length)
    j, k = int(before[j, k]), k - (0 if length in free else 1)
  return chosen


# Rows may have this many tokens even if all requests are shorter. Apart from that, no row is longer
# than the longest request, so packing needs no more memory than one request per row.
_ALWAYS_ALLOWED = 256
# Plans to try: rows are this many times as long as the request that opens them.
_TIMES = (1, 2, 4)
# Each plan rounds row lengths up to the next length of a series, and several series are tried. A
# series consists of the longest row, this share of it, half of that share, a quarter, and so on.
_SERIES = (0.5, 0.75, 0.875)
# Extra room, so that all remaining requests are likely to fit into one batch.
_ROOM = 1.02
# The row length at which attention costs as much as the rest of the model: six times the width of
# the model, which is assumed to be 2048.
_ATTENTION = 6 * 2048
# The share of the cost that a new shape must save to be worth its compilation.
_PER_SHAPE = 0.005


@dataclasses.dataclass(frozen=True)
class Step:
  """A global batch: its row length, and the indices of the requests in each row.

  Empty rows are omitted.
  """

  length: int
  rows: tuple[tuple[int, ...], ...]

  @property
  def is_packed(self) -> bool:
    """Whether any row has several requests."""
    return any(len(row) > 1 for row in self.rows)


def plan_steps(
    lengths: Sequence[int],
    batch_size: int,
    multiple: int,
    *,
    pack: bool,
    max_length: int | None = None,
    known: Collection[int] = (),
    overhead: int = 0,
) -> list[Step]:
  """Plans all batches, the longest first; each request is in exactly one row.

  Args:
    lengths: Number of tokens of each request.
    batch_size: Rows per batch.
    multiple: All row lengths are multiples of this, except `max_length`.
    pack: Whether several requests may share a row.
    max_length: The maximum row length.
    known: Lengths that are already compiled. Together with these, the plan uses at most
      `MAX_SHAPES` lengths, or one more if the longest request fits into none of them.
    overhead: Number of test runs, each of the shortest batch, to add to the cost of a packed plan.

  >>> for step in plan_steps([16, 9, 8, 7, 4, 3, 1], 2, 8, pack=True, max_length=16):
  ...   print(step)
  Step(length=16, rows=((0,), (1, 3)))
  Step(length=8, rows=((2,), (4, 5, 6)))
  """
  order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
  alone = _one_per_row(lengths, order, batch_size, multiple, max_length, known)
  if not pack or not lengths:
    return alone
  best, best_cost = alone, _cost(alone, batch_size, known)
  for series in _all_series(max(lengths), multiple, max_length, known):
    for times in _TIMES:
      steps = _pack(lengths, order, batch_size, series, times)
      used = {step.length for step in steps}
      if len(used | set(known)) > MAX_SHAPES and not used <= set(known):
        continue
      extra = [min(steps, key=lambda step: step.length)] * overhead
      cost = _cost([*steps, *extra], batch_size, known)
      if cost < best_cost:
        best, best_cost = steps, cost
  return best


def step_batch(
    step: Step, rows: Sequence[requests_lib.Row], first: int, count: int
) -> batch.LLMIndexedBatch:
  """Returns the arrays of `count` rows of a step.

  `document_idx` and `sequence_idx` are those of the first request in a row.

  Args:
    rows: The rows to score, one per request. `step.rows` contains indices of this list.
    first: The first row of the step to make; rows past the end of the step are empty.
    count: The number of rows to make.
  """
  shape = (count, step.length)
  made = {name: np.zeros(shape, np.int32) for name in ("inputs", "targets", "position", "mask")}
  segments = np.zeros(shape, np.int32)
  document_idx, sequence_idx = np.zeros(count, np.int32), np.zeros(count, np.int32)
  for place, members in enumerate(step.rows[first : first + count]):
    document_idx[place] = rows[members[0]].request + 1
    sequence_idx[place] = rows[members[0]].sequence
    begin = 0
    for segment, number in enumerate(members, start=1):
      row = rows[number]
      end = begin + row.length
      made["inputs"][place, begin:end] = row.tokens[:-1]
      made["targets"][place, begin:end] = row.tokens[1:]
      made["position"][place, begin:end] = np.arange(row.length)
      made["mask"][place, end - row.scored : end] = segment
      segments[place, begin:end] = segment
      begin = end
  return batch.LLMIndexedBatch(
      inputs=made["inputs"],
      targets=made["targets"],
      inputs_position=made["position"],
      targets_position=made["position"],
      inputs_segmentation=segments,
      targets_segmentation=made["mask"],
      document_idx=document_idx,
      sequence_idx=sequence_idx,
      # Every row begins with a border, even an empty row.
      _document_borders=np.diff(segments, axis=1, prepend=-1) != 0,
  )


def row_starts(step: Step, rows: Sequence[requests_lib.Row]) -> tuple[list[int], list[int]]:
  """Returns the requests of a step, row by row, and where each begins in the flattened batch."""
  numbers, starts = [], []
  for place, members in enumerate(step.rows):
    begin = place * step.length
    for number in members:
      numbers.append(number)
      starts.append(begin)
      begin += rows[number].length
  return numbers, starts


def _one_per_row(
    lengths: Sequence[int],
    order: Sequence[int],
    batch_size: int,
    multiple: int,
    max_length: int | None,
    known: Collection[int],
) -> list[Step]:
  groups = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
  longest = [lengths[group[0]] for group in groups]
  padded = plan_lengths(longest, multiple, known=known)
  if max_length is not None:
    padded = [min(length, max_length) for length in padded]
  return [
      Step(length, tuple((number,) for number in group)) for length, group in zip(padded, groups)
  ]


def _all_series(
    longest: int, multiple: int, max_length: int | None, known: Collection[int]
) -> Iterable[list[int]]:
  """Yields series of row lengths; the longest request fits into the last length of each series."""
  if longest <= max(known, default=0):
    yield sorted(known)
  top = max(round_up(max(longest, 1), multiple), round_up(_ALWAYS_ALLOWED, multiple))
  if max_length is not None:
    top = min(top, max_length)
  for share in _SERIES:
    series = {top}
    length = top * share
    while length >= multiple and len(series) < MAX_SHAPES:
      series.add(min(round_up(int(length), multiple), top))
      length /= 2
    yield sorted(series)


def _pack(
    lengths: Sequence[int],
    order: Sequence[int],
    batch_size: int,
    series: Sequence[int],
    times: int,
) -> list[Step]:
  # As in `rows.packing.best_fit`: rows with equal room are on one stack, and bit r of `room` says
  # whether some row has room for exactly r tokens.
  waiting: list[list[list[int]]] = [[] for _ in range(series[-1] + 1)]
  room = 0
  left = sum(lengths)
  batches: list[tuple[int, list[list[int]]]] = []
  for number in order:
    length = lengths[number]
    if not room >> length:
      wanted = max(length, min(times * length, left * _ROOM / batch_size))
      opened = next((size for size in series if size >= wanted), series[-1])
      rows: list[list[int]] = [[] for _ in range(batch_size)]
      batches.append((opened, rows))
      waiting[opened] += reversed(rows)
      room |= 1 << opened
    fitting = room >> length
    space = length + (fitting & -fitting).bit_length() - 1
    row = waiting[space].pop()
    if not waiting[space]:
      room ^= 1 << space
    row.append(number)
    if space > length:
      waiting[space - length].append(row)
      room |= 1 << (space - length)
    left -= length
  return [Step(size, tuple(tuple(row) for row in rows if row)) for size, rows in batches]


def _cost(steps: Sequence[Step], batch_size: int, known: Collection[int]) -> float:
  work = sum(step.length * (1 + step.length / _ATTENTION) for step in steps) * batch_size
  new = {step.length for step in steps} - set(known)
  return work * (1 + _PER_SHAPE * len(new))
