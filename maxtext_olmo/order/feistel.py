"""A keyed bijection of [0, n): a shuffle that is computed, not stored.

A number x below n is written as a pair (left, right) in a grid of a × b cells, where a = ⌈√n⌉ and b
= ⌈n / a⌉, so the grid has at most a - 1 cells more than n. Each round moves one half by a keyed
hash of the other:

    left  ← (left  + hash(right, key)) mod a        rounds 0, 2, 4
    right ← (right + hash(left,  key)) mod b        rounds 1, 3, 5

Each round can be undone by subtracting the same hash, so all rounds together are a bijection of the
grid. A result that is not below n (one of the extra cells) goes through the rounds again until it
lands below n ("cycle walking"). This walk ends, because the orbit of x returns to x, which is below
n. So the result is a bijection of [0, n). Fewer than one number in √n needs a second pass.

Up to n = 2**24, each round looks up its hashes in a table with one entry per value of the other
half. This is faster than hashing each number, and gives the same permutation. Below 2**16 the whole
permutation is a table of at most 512 KiB, computed in a few milliseconds.

For n = 10 the grid is 4 × 3, and x = 7 is the cell (2, 1). If the rounds map it to (3, 2), the
result is 11, which is not below 10, so the rounds are applied to 11. If they map 11 to (1, 0), the
result is 3, so 7 maps to 3.
"""

from __future__ import annotations

import functools
import hashlib
import math

import numpy as np

from maxtext_olmo import errors

MAX_SIZE = 1 << 40
# Six rounds mix a large grid well. A small grid needs more rounds, which are cheap there.
_ROUNDS_LARGE = 6
_ROUNDS_SMALL = 16
_SMALL = 1 << 16
# Tables of at most 2**12 entries per round stay in the processor's cache.
_LARGEST_WITH_TABLES = 1 << 24
_MULTIPLIER_1 = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_2 = np.uint64(0xD6E8FEB86659FD93)
_FOLD = np.uint64(32)
_DROP = np.uint64(21)
_SCALE = np.uint64(43)


def _round_keys(n: int, parts: tuple[object, ...]) -> list[np.uint64]:
  """Hashes the parts into one 64-bit key per round; keys of different parts are unrelated."""
  text = "\x1f".join(["maxtext_olmo feistel 1", *map(str, parts)])
  rounds = _ROUNDS_SMALL if n < _SMALL else _ROUNDS_LARGE
  digest = hashlib.shake_256(text.encode("utf-8")).digest(8 * rounds)
  return [np.uint64(int.from_bytes(digest[i : i + 8], "little")) for i in range(0, 8 * rounds, 8)]


class Bijection:
  """The permutation of [0, n) that a key defines, as a function over arrays.

  Args:
    n: Size of the permutation, from 1 to 2**40.
    *key: Values with a stable `str`, such as a purpose, a seed and an epoch.
  """

  def __init__(self, n: int, *key: object):
    if not 1 <= n <= MAX_SIZE:
      raise errors.OrderError(f"A permutation needs a size from 1 to 2**40, got {n}.")
    self._n = n
    rows = math.isqrt(n - 1) + 1
    self._rows = np.uint64(rows)
    self._columns = np.uint64(-(-n // rows))
    self._keys = _round_keys(n, key)

  def __call__(self, x: np.ndarray) -> np.ndarray:
    """Maps numbers in [0, n), of any integer dtype, to their images as int64."""
    return self._all[x] if self._n < _SMALL else self._map(x)

  def inverse(self, y: np.ndarray) -> np.ndarray:
    """Maps images in [0, n) back to the original numbers, as int64."""
    return self._all_inverse[y] if self._n < _SMALL else self._map(y, backwards=True)

  @functools.cached_property
  def _all(self) -> np.ndarray:
    """A table of the images of all numbers, for a small permutation."""
    return self._map(np.arange(self._n))

  @functools.cached_property
  def _all_inverse(self) -> np.ndarray:
    """A table of the inverse of a small permutation."""
    return self._map(np.arange(self._n), backwards=True)

  def _map(self, x: np.ndarray, backwards: bool = False) -> np.ndarray:
    y = self._pass(x.astype(np.uint64), backwards)
    outside = np.flatnonzero(y >= np.uint64(self._n))
    while outside.size:
      y[outside] = self._pass(y[outside], backwards)
      outside = outside[y[outside] >= np.uint64(self._n)]
    return y.view(np.int64)

  def _pass(self, x: np.ndarray, backwards: bool) -> np.ndarray:
    left = x // self._columns
    right = x - left * self._columns
    drawn = np.empty_like(x)
    spare = np.empty_like(x)
    move, correct = (np.subtract, np.add) if backwards else (np.add, np.subtract)
    rounds = range(len(self._keys))
    for i in reversed(rounds) if backwards else rounds:
      moving, still, size = (
          (left, right, self._rows) if i % 2 == 0 else (right, left, self._columns)
      )
      if self._tables:
        # All indices are in range; mode "clip" avoids the copy that "raise" makes.
        np.take(self._tables[i], still.view(np.int64), out=drawn, mode="clip")
      else:
        _draw(still, self._keys[i], size, drawn, spare)
      move(moving, drawn, out=moving)
      # A negative difference wraps to a huge uint64, so the minimum is the value modulo `size`.
      correct(moving, size, out=spare)
      np.minimum(moving, spare, out=moving)
    np.multiply(left, self._columns, out=left)
    np.add(left, right, out=left)
    return left

  @functools.cached_property
  def _tables(self) -> list[np.ndarray]:
    """One table per round: the hash of each value of the other half. Empty for a large grid."""
    tables: list[np.ndarray] = []
    if self._n > _LARGEST_WITH_TABLES:
      return tables
    for i, key in enumerate(self._keys):
      others, size = (self._columns, self._rows) if i % 2 == 0 else (self._rows, self._columns)
      drawn = np.empty(int(others), np.uint64)
      _draw(np.arange(others, dtype=np.uint64), key, size, drawn, np.empty_like(drawn))
      tables.append(drawn)
    return tables


def _draw(
    still: np.ndarray, key: np.uint64, size: np.uint64, out: np.ndarray, spare: np.ndarray
) -> None:
  """Hashes each element of `still` with a key to a value in [0, size), which goes to `out`."""
  np.add(still, key, out=out)
  np.multiply(out, _MULTIPLIER_1, out=out)
  np.right_shift(out, _FOLD, out=spare)
  np.bitwise_xor(out, spare, out=out)
  np.multiply(out, _MULTIPLIER_2, out=out)
  # The upper 43 bits times a size of at most 21 bits stay below 2**64, so nothing overflows, and
  # the upper bits of the product are uniform over [0, size).
  np.right_shift(out, _DROP, out=out)
  np.multiply(out, size, out=out)
  np.right_shift(out, _SCALE, out=out)
