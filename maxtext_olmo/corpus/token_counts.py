"""Counts how often each token id occurs, and finds the ends of documents.

Each chunk is scanned while it is in the processor's cache (`token_scan`), which also finds its
highest id. It can then be counted without any checks. With numba (extra `[fast]`), a compiled loop
does the counting; until it is ready, NumPy gives the same results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from maxtext_olmo import compiled
from maxtext_olmo.corpus.token_scan import TokenScan

# No tokenizer has more ids. Damaged files may, and a table of all of them would not fit in memory.
MOST_IDS = 1 << 22
_COMPILE_AFTER_TOKENS = 1 << 24
_Kernel = Callable[[np.ndarray, np.ndarray, np.ndarray], None]


class TokenCounts:
  """Counts the ids of consecutive chunks of up to 2^32 tokens in all.

  >>> counts = TokenCounts(np.dtype("uint16"), eos_id=1)
  >>> counts.add(np.array([3, 1, 3], np.uint16))
  >>> counts.ids.tolist(), counts.ends.tolist()
  ([0, 1, 0, 2], [1])

  Attributes:
    outside: Number of tokens whose id is `MOST_IDS` or more.
  """

  def __init__(self, dtype: np.dtype, eos_id: int | None = None):
    """Starts counting.

    Args:
      dtype: Unsigned dtype of the tokens.
      eos_id: Token whose places are collected; it must fit the dtype. None collects no places.
    """
    self._compiled = _compiled(np.dtype(dtype).str)
    self._scan = TokenScan(dtype, eos_id)
    # The count of an id is the sum of both. Entries take no memory until they are used.
    size = min(int(np.iinfo(dtype).max) + 1, MOST_IDS)
    self._low, self._high = np.zeros(size, np.uint8), np.zeros(size, np.uint32)
    self._num_ids = 0
    self.outside = 0

  @property
  def count(self) -> int:
    """Number of tokens counted."""
    return self._scan.count

  @property
  def ids(self) -> np.ndarray:
    """The count of each id, up to the highest that occurs (uint32)."""
    return self._high[: self._num_ids] + self._low[: self._num_ids]

  @property
  def ends(self) -> np.ndarray:
    """Places of the EOS, counted from the first token (int64)."""
    return self._scan.ends

  def add(self, tokens: np.ndarray) -> None:
    """Counts the next tokens."""
    self._scan.add(tokens)
    top = self._scan.top
    if top >= MOST_IDS:
      inside = tokens[tokens < MOST_IDS]
      self.outside += len(tokens) - len(inside)
      tokens, top = inside, int(inside.max(initial=0))
    if not len(tokens):
      return
    self._num_ids = max(self._num_ids, top + 1)
    kernel = self._compiled.get(len(tokens))
    if kernel is not None:
      kernel(tokens, self._low, self._high)
    else:
      found = np.bincount(tokens.astype(np.int64, copy=False))
      self._high[: len(found)] += found.astype(np.uint32)


def compile_now(dtype: np.dtype) -> bool:
  """Compiles the loop for a dtype, and waits for it; returns False if that is impossible."""
  return _compiled(np.dtype(dtype).str).wait()


@functools.cache
def _compiled(dtype: str) -> compiled.Background[_Kernel]:
  def build() -> _Kernel:
    from maxtext_olmo.corpus import token_counts_kernel

    return token_counts_kernel.build(np.dtype(dtype))

  return compiled.Background(build, after=_COMPILE_AFTER_TOKENS, what="Counting tokens")
