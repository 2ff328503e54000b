"""Interleaving of the members of a mixture, in proportion to their shares.

For each position, `Interleave` computes the member and the index within that member. A binary tree
over the members decides. If the left half of a node has A of every D elements, it takes
⌊(m·A + D/2) / D⌋ of the node's first m elements. So it takes element m if this count is larger for
m + 1 than for m:

    counts 3 : 1      position   0  1  2  3  4  5  6  7
                      member     0  0  1  0  0  0  1  0
                      index      0  1  0  2  3  4  1  5

This needs only integer arithmetic on the position, so access is random and nothing is stored. Over
each period (the sum of the counts) the proportions are exact. Over any range, the number of
elements of a member differs from its exact share by less than two per level of the tree.
"""

from __future__ import annotations

import fractions
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from maxtext_olmo import errors

# With a longer period, the product of two numbers below the period overflows int64.
_INT64_PERIOD = 1 << 31
MAX_PERIOD = 1 << 44


class Interleave:
  """Maps positions to (member, index within the member), for arrays of positions.

  Args:
    counts: Number of elements of each member per period; each at least 1.
  """

  def __init__(self, counts: Sequence[int]):
    if not counts or any(count < 1 for count in counts):
      raise errors.ConfigError(
          f"Every member of a mixture must have a share above 0, got {list(counts)}."
      )
    if sum(counts) > MAX_PERIOD:
      raise errors.ConfigError(
          f"A mixture must repeat after at most 2**44 samples, got {sum(counts)}."
      )
    self.counts = tuple(int(count) for count in counts)
    self.period = sum(self.counts)
    self._depth = max(1, math.ceil(math.log2(len(self.counts))))
    # For each node: its total, the total of its left half, and its two children. A leaf is its own
    # child, and its left half is the whole leaf.
    self._total: list[int] = []
    self._left_total: list[int] = []
    self._children: list[tuple[int, int]] = []
    self._member: list[int] = []
    self._add(0, len(self.counts))
    columns = (self._total, self._left_total, self._children, self._member)
    self._arrays = [np.array(column, np.int64) for column in columns]

  def _add(self, first: int, end: int) -> int:
    node = len(self._total)
    total = sum(self.counts[first:end])
    self._total.append(total)
    self._left_total.append(total)
    self._children.append((node, node))
    self._member.append(first)
    if end - first > 1:
      middle = (first + end + 1) // 2
      self._left_total[node] = sum(self.counts[first:middle])
      left = self._add(first, middle)
      self._children[node] = left, self._add(middle, end)
    return node

  def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the member at each position, and the index within that member (both int64)."""
    totals, lefts, children, members = self._arrays
    positions = np.asarray(positions, np.int64)
    periods, rest = np.divmod(positions, self.period)
    nodes = np.zeros(positions.shape, np.int64)
    for _ in range(self._depth):
      total, left = totals[nodes], lefts[nodes]
      before, remainder = self._divide(rest, left, total // 2, total)
      goes_left = (remainder + left >= total) | (left == total)
      rest = np.where(goes_left, before, rest - before)
      nodes = np.where(goes_left, children[nodes, 0], children[nodes, 1])
    found = members[nodes]
    counts = np.array(self.counts, np.int64)
    return found, periods * counts[found] + rest

  def taken(self, position: int) -> list[int]:
    """Returns the number of elements of each member before a position."""
    periods, rest = divmod(int(position), self.period)
    found = [0] * len(self.counts)
    pending = [(0, rest)]
    while pending:
      node, rest = pending.pop()
      left, right = self._children[node]
      if left == node:
        found[self._member[node]] = rest
        continue
      before = (rest * self._left_total[node] + self._total[node] // 2) // self._total[node]
      pending += [(left, before), (right, rest - before)]
    return [periods * count + rest for count, rest in zip(self.counts, found)]

  def taken_before(self, positions: np.ndarray) -> np.ndarray:
    """Returns the result of `taken` for each position, in an array (positions, members)."""
    periods, rest = np.divmod(np.asarray(positions, np.int64), self.period)
    found = np.empty((len(periods), len(self.counts)), np.int64)
    pending = [(0, rest)]
    while pending:
      node, rest = pending.pop()
      left, right = self._children[node]
      if left == node:
        found[:, self._member[node]] = rest
        continue
      total = self._total[node]
      before, _ = self._divide(rest, self._left_total[node], total // 2, total)
      pending += [(left, before), (right, rest - before)]
    return periods[:, None] * np.array(self.counts, np.int64) + found

  def position_of(self, member: int, index: int) -> int:
    """Returns the position of a member's element: the inverse of `locate`."""
    return int(self.positions_of(member, np.array([index], np.int64))[0])

  def positions_of(self, member: int, indices: np.ndarray) -> np.ndarray:
    """Returns the positions (int64) of elements of a member: the inverse of `locate`.

    Follows each element from its leaf up to the root. Element i of a left half is element m - 1 of
    its node, where m is the smallest number for which ⌊(m·A + D/2) / D⌋ exceeds i. The right half
    works likewise.
    """
    periods, rest = np.divmod(np.asarray(indices, np.int64), self.counts[member])
    for total, left, goes_left in reversed(self._path(member)):
      if goes_left:
        rest, _ = self._divide(rest + 1, total, -(total // 2) - 1, left)
      else:
        rest, _ = self._divide(rest, total, total // 2, total - left)
    return periods * self.period + rest

  def _divide(self, a: np.ndarray, b: Any, c: Any, d: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the quotients and remainders of (a·b + c) / d.

    For a long period, a·b needs up to 88 bits, which overflows int64. The quotient is then
    estimated in float64, where it is off by at most one. The remainder that belongs to the estimate
    is small, so int64 arithmetic, which is modulo 2**64, computes it exactly. Its value shows
    whether the estimate must be corrected.
    """
    if self.period < _INT64_PERIOD:
      value = a * b + c
      quotient = value // d
      return quotient, value - quotient * d
    quotient = np.floor((a.astype(np.float64) * b + c) / d).astype(np.int64)
    remainder = a * b + c - quotient * d
    off = (remainder >= d).astype(np.int64) - (remainder < 0)
    return quotient + off, remainder - off * d

  def _path(self, member: int) -> list[tuple[int, int, bool]]:
    """Returns (total, left total, whether the path goes left) of each node above a member."""
    path, node, first, end = [], 0, 0, len(self.counts)
    while end - first > 1:
      middle = (first + end + 1) // 2
      goes_left = member < middle
      path.append((self._total[node], self._left_total[node], goes_left))
      node = self._children[node][0 if goes_left else 1]
      first, end = (first, middle) if goes_left else (middle, end)
    return path


def counts_of_weights(weights: Sequence[float | fractions.Fraction]) -> list[int]:
  """Returns the smallest integers in the same proportion as the weights.

  A float counts as the decimal number that it prints as: 0.1 is exactly 1/10.
  """
  if any(not weight > 0 or weight == math.inf for weight in weights):
    raise errors.ConfigError(f"Weights must be positive and finite, got {list(weights)}.")
  exact = [
      weight if isinstance(weight, fractions.Fraction) else fractions.Fraction(str(weight))
      for weight in weights
  ]
  scale = math.lcm(*(weight.denominator for weight in exact))
  counts = [int(weight * scale) for weight in exact]
  common = math.gcd(*counts)
  counts = [count // common for count in counts]
  if sum(counts) > MAX_PERIOD // 2:
    # The shares are rounded to shorten a period of more than 2**43 samples.
    total = sum(counts)
    counts = [max(1, count * (MAX_PERIOD // 4) // total) for count in counts]
  return counts
