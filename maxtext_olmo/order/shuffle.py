"""NumPy's shuffle, pinned: the array that `Generator(PCG64(seed)).shuffle` of today leaves, whatever NumPy does tomorrow.

NumPy promises the raw 64-bit outputs of PCG64 for all versions, but not what `Generator.shuffle` makes of them. That is:

    u32()    the low half of a raw output first, then its high half
    for i = n-1 … 1:   j = u32() & (2**bitlength(i) - 1), drawn again until j <= i;   swap a[i], a[j]

Three ways lead there. NumPy's own shuffle, if a small array shows that it is still the one above. For large arrays, with
numba, the loop is ours and compiled: it draws some js ahead and touches their places, so that the cache misses overlap,
and is faster than NumPy. And the loop in Python, where neither will do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np
from absl import logging

from maxtext_olmo import errors

MAX_SIZE = (1 << 32) - 1
_RAW_BLOCK = 1 << 17
_AHEAD = 64
# What seed 34521 makes of 0 … 20: small enough to check each time, and it draws with masks of all lengths up to 5 bits.
_CHECK_SEED = 34521
_CHECK = (20, 8, 0, 6, 17, 15, 3, 19, 9, 2, 11, 12, 7, 1, 16, 4, 5, 18, 13, 14, 10)
# Below so many places NumPy is done before numba is imported.
_WORTH_NUMBA = 10_000_000


def shuffled(n: int, seed: int) -> np.ndarray:
  """0 … n-1, shuffled by a seed, as uint32: the memory of one array, which is also all that is used."""
  if not 1 <= n < MAX_SIZE:
    raise errors.OrderError(f"A stored order has from 1 to 2**32 - 2 places, got {n}.")
  numbers = np.arange(n, dtype=np.uint32)
  choose(n)(numbers, seed)
  return numbers


def with_numpy(numbers: np.ndarray, seed: int) -> None:
  """Shuffles in place as NumPy does at present; releases the GIL."""
  np.random.Generator(np.random.PCG64(seed)).shuffle(numbers)


def with_python(numbers: np.ndarray, seed: int) -> None:
  """Shuffles in place in plain Python: minutes for 100 million, and right for ever."""
  cells = numbers.data
  raw = np.random.PCG64(seed)
  halves: Iterator[int] = iter(())
  for i in range(len(numbers) - 1, 0, -1):
    mask = (1 << i.bit_length()) - 1
    while True:
      draw = next(halves, None)
      if draw is None:
        halves = iter(_halves(raw.random_raw(min(_RAW_BLOCK, i + 16))).tolist())
      elif (j := draw & mask) <= i:
        break
    cells[i], cells[j] = cells[j], cells[i]


def with_numba(numbers: np.ndarray, seed: int) -> None:
  """Shuffles in place with a compiled loop; releases the GIL. ImportError without numba."""
  swap_from = _compiled()
  raw = np.random.PCG64(seed)
  ahead = np.empty(_AHEAD, np.int64)
  i = len(numbers) - 1
  while i > 0:
    i = swap_from(numbers, _halves(raw.random_raw(min(_RAW_BLOCK, i + 16))), i, ahead)


def _halves(raw: np.ndarray) -> np.ndarray:
  return raw.astype("<u8", copy=False).view("<u4")


def choose(n: int) -> Callable[[np.ndarray, int], None]:
  """The quickest way to shuffle n numbers that is known to be right."""
  numpy_is_right = numpy_shuffles_as_before()
  if n >= _WORTH_NUMBA or not numpy_is_right:
    try:
      _compiled()
      return with_numba
    except ImportError:
      pass
  if numpy_is_right:
    return with_numpy
  logging.warning(
      "NumPy %s shuffles differently from the version whose order this is, so it is made in Python, which takes minutes"
      " for large corpora; `pip install maxtext-olmo[fast]` makes it quick.",
      np.__version__,
  )
  return with_python


def numpy_shuffles_as_before() -> bool:
  """Whether the installed NumPy makes of a seed what the NumPy of OLMo-core's runs made of it."""
  numbers = np.arange(len(_CHECK), dtype=np.uint32)
  with_numpy(numbers, _CHECK_SEED)
  return tuple(numbers.tolist()) == _CHECK


@functools.cache
def _compiled():
  import numba

  @numba.njit(nogil=True)
  def swap_from(numbers, draws, i, ahead):
    """Consumes the draws from place i down; returns the place to go on with."""
    used = 0
    while used < draws.size and i > 0:
      count = 0
      touched = 0
      k = i
      mask = np.int64(1)
      while mask < k:
        mask = mask * 2 + 1
      while count < ahead.size and used < draws.size and k > 0:
        # The mask is the least 2**b - 1 that is not below k, and k only goes down.
        while mask >> 1 >= k:
          mask >>= 1
        j = np.int64(draws[used]) & mask
        used += 1
        if j <= k:
          ahead[count] = j
          touched ^= numbers[j]
          count += 1
          k -= 1
      # What was touched has to be used, or the compiler leaves the touching out.
      ahead[0] += np.int64(touched) >> 40
      for place in range(count):
        j = ahead[place]
        numbers[i], numbers[j] = numbers[j], numbers[i]
        i -= 1
    return i

  return swap_from
