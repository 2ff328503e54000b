"""The length each batch is padded to: few different ones, since each costs a compilation.

Rounding up to a multiple alone leaves as many shapes as there are multiples; powers of two leave
few, but a quarter of the tokens is padding then. Here all lengths are known before the first batch,
so the best few can be chosen. Five batches, a multiple of 16, and two shapes allowed:

    longest row of the batch    130   70   66   33   20
    rounded up                  144   80   80   48   32
    two shapes                  144   80   80   80   80     112 tokens of padding per row, or
                                144  144  144   48   48     144: so the first

Every host chooses from the same lengths, so all choose the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from maxtext_olmo.evaluation.datasets import round_up

MAX_SHAPES = 12


def plan_lengths(
    longest: Sequence[int],
    multiple: int,
    *,
    max_shapes: int = MAX_SHAPES,
    known: Collection[int] = (),
) -> list[int]:
  """The padded length of each batch, with the least padding that so few shapes allow.

  Args:
    longest: The length of the longest row of each batch.
    multiple: What all lengths are multiples of.
    max_shapes: How many lengths there may be, those of `known` included. Once they are used up, a
      batch that is longer than all of them gets a power of two times `multiple`.
    known: Lengths that have been compiled already and cost nothing more.

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
  """The smallest power of two times `multiple` that is not below `length`.

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
  # Sums over the first j candidates: of batches, and of their tokens.
  count = np.concatenate([[0], np.cumsum(weights)])
  tokens = np.concatenate([[0], np.cumsum(weights * candidates)])
  # least[j, k]: the least padding of the first j candidates with k bought, the last of them chosen.
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
  used = int(np.flatnonzero(weights)[-1]) + 1  # the longest that some batch needs
  ends = [(int(least[j].min()), j) for j in range(used, len(candidates) + 1)]
  j = min(ends)[1]
  k = int(np.argmin(least[j]))
  chosen = set()
  while j:
    length = int(candidates[j - 1])
    chosen.add(length)
    j, k = int(before[j, k]), k - (0 if length in free else 1)
  return chosen
