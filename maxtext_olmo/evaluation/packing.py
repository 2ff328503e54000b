"""Plans which requests are scored in which row of which batch, for all requests at once.

A request alone in its row leaves the rest of the row empty, and few lengths to compile (`lengths`)
leave much of it empty. A model that keeps segments apart, as packed training requires, can score
several requests in a row:

    inputs_segmentation    1 1 1 1 1 2 2 2 3 3 . .      three requests, two tokens of padding
    inputs_position        0 1 2 3 4 0 1 2 0 1 . .

The longest request opens a batch: `batch_size` empty rows of one length, a few times its own. Each
next one goes to the open row that it fills best, and opens a batch if it fits none. So short
requests fill the gaps that long ones left, and only the last batch, which has short rows, has rows
without a request.

Several choices of row length are tried, one request per row among them, and the cheapest is used.
Every host knows all lengths, so all compute the same plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from maxtext_olmo.evaluation import lengths as lengths_lib
from maxtext_olmo.evaluation import requests as requests_lib
from maxtext_olmo.evaluation.datasets import round_up
from maxtext_olmo.rows import llm_batch

# Rows may always have this many tokens, however short the longest request is. Otherwise no row is
# longer than the longest request, so packing needs no more memory than one request per row does.
_ALWAYS_ALLOWED = 256
# Rows are this many times as long as the request that opens them...
_TIMES = (1, 2, 4)
# ...rounded up to one of a series, each half of the one before, that begins at this share of the
# longest row.
_SERIES = (0.5, 0.75, 0.875)
# Extra room that makes it likely that all remaining requests fit into one batch.
_ROOM = 1.02
# In rows of this many tokens, attention costs as much as the rest of the model: six times its
# width.
_ATTENTION = 6 * 2048
# What a shape must save to be worth its compilation.
_PER_SHAPE = 0.005


@dataclasses.dataclass(frozen=True)
class Step:
  """A global batch: the length of its rows, and who is in each; rows at its end may be missing."""

  length: int
  rows: tuple[tuple[int, ...], ...]

  @property
  def is_packed(self) -> bool:
    """Whether some row has several requests."""
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
  """Plans all batches, the longest first; each number below `len(lengths)` is in exactly one row.

  Args:
    lengths: Tokens of each request.
    batch_size: Rows of a batch.
    multiple: All lengths of rows are multiples of it, except `max_length`.
    pack: Whether several may share a row.
    max_length: The longest row.
    known: Lengths that have been compiled already. In all there are at most
      `lengths_lib.MAX_SHAPES`, as long as that is enough for one request per row.
    overhead: Extra runs of the shortest batch if there are shared rows at all.

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
      if len(used | set(known)) > lengths_lib.MAX_SHAPES and not used <= set(known):
        continue
      extra = [min(steps, key=lambda step: step.length)] * overhead
      cost = _cost([*steps, *extra], batch_size, known)
      if cost < best_cost:
        best, best_cost = steps, cost
  return best


def step_batch(
    step: Step, rows: Sequence[requests_lib.Row], first: int, count: int
) -> llm_batch.LLMIndexedBatch:
  """Makes the arrays of some rows of a step.

  `document_idx` and `sequence_idx` are those of the first request in a row.

  Args:
    rows: What the numbers of the step stand for.
    first: The first row of the step to be made; beyond its last, rows are empty.
    count: How many.
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
  return llm_batch.LLMIndexedBatch(
      inputs=made["inputs"],
      targets=made["targets"],
      inputs_position=made["position"],
      targets_position=made["position"],
      inputs_segmentation=segments,
      targets_segmentation=made["mask"],
      document_idx=document_idx,
      sequence_idx=sequence_idx,
      # A row begins with a border, also one without a request.
      _document_borders=np.diff(segments, axis=1, prepend=-1) != 0,
  )


def row_starts(step: Step, rows: Sequence[requests_lib.Row]) -> tuple[list[int], list[int]]:
  """Returns the numbers of a step, row after row, and the cell that each begins at."""
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
  padded = lengths_lib.plan_lengths(longest, multiple, known=known)
  if max_length is not None:
    padded = [min(length, max_length) for length in padded]
  return [
      Step(length, tuple((number,) for number in group)) for length, group in zip(padded, groups)
  ]


def _all_series(
    longest: int, multiple: int, max_length: int | None, known: Collection[int]
) -> Iterable[list[int]]:
  """Lengths of rows to choose from; the last of each holds the longest request."""
  if longest <= max(known, default=0):
    yield sorted(known)
  top = max(round_up(max(longest, 1), multiple), round_up(_ALWAYS_ALLOWED, multiple))
  if max_length is not None:
    top = min(top, max_length)
  for share in _SERIES:
    series = {top}
    length = top * share
    while length >= multiple and len(series) < lengths_lib.MAX_SHAPES:
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
  # whether some row has room for r tokens.
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
