"""NumPy's shuffle, pinned: what `Generator(PCG64(seed)).shuffle` does today, under any NumPy.

NumPy promises the raw 64-bit outputs of PCG64 for all versions, but not what `Generator.shuffle`
makes of them. Today's algorithm is:

    u32()    the low half of a raw output first, then its high half
    for i = n-1 … 1:  j = u32() & (2**bitlength(i) - 1), drawn again until j <= i;  swap a[i], a[j]

NumPy's own shuffle is used if a small array shows that it still follows this algorithm; otherwise
the loop runs in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from absl import logging

from maxtext_olmo import errors

MAX_SIZE = (1 << 32) - 1
_RAW_BLOCK = 1 << 17
# 0 … 20 as seed 34521 shuffles them: small enough to check each time, and drawn with masks of all
# lengths up to 5 bits.
_CHECK_SEED = 34521
_CHECK = (20, 8, 0, 6, 17, 15, 3, 19, 9, 2, 11, 12, 7, 1, 16, 4, 5, 18, 13, 14, 10)


def shuffled(n: int, seed: int) -> np.ndarray:
  """Returns 0 … n-1 as uint32, shuffled by a seed, using no memory but the array's own."""
  if not 1 <= n < MAX_SIZE:
    raise errors.OrderError(f"A stored order has from 1 to 2**32 - 2 places, got {n}.")
  numbers = np.arange(n, dtype=np.uint32)
  choose()(numbers, seed)
  return numbers


def with_numpy(numbers: np.ndarray, seed: int) -> None:
  """Shuffles in place as NumPy does at present; releases the GIL."""
  np.random.Generator(np.random.PCG64(seed)).shuffle(numbers)


def with_python(numbers: np.ndarray, seed: int) -> None:
  """Shuffles in place in plain Python: minutes for 100 million, and right in any NumPy."""
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


def _halves(raw: np.ndarray) -> np.ndarray:
  return raw.astype("<u8", copy=False).view("<u4")


def choose() -> Callable[[np.ndarray, int], None]:
  """Returns the fastest shuffle that is known to be right."""
  if numpy_shuffles_as_before():
    return with_numpy
  logging.warning(
      "NumPy %s shuffles differently from the version that defined this order, so the order is"
      " built in Python, which takes minutes for a large corpus. Install an older NumPy to build it"
      " faster.",
      np.__version__,
  )
  return with_python


def numpy_shuffles_as_before() -> bool:
  """Returns whether the installed NumPy shuffles as the NumPy of OLMo-core's runs did."""
  numbers = np.arange(len(_CHECK), dtype=np.uint32)
  with_numpy(numbers, _CHECK_SEED)
  return tuple(numbers.tolist()) == _CHECK
