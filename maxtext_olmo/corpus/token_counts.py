"""Counts how often each token id occurs, and finds the ends of documents, in one pass.

With numba (extra `[fast]`), one compiled loop does both; NumPy gives the same results until it is
ready.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from maxtext_olmo import compiled

# No tokenizer has more ids. Damaged files have, and a table of all of them would not fit in memory.
MOST_IDS = 1 << 22
_COMPILE_AFTER_TOKENS = 1 << 24
_Kernel = Callable[[np.ndarray, np.ndarray, Any, bool, np.ndarray, int, int], int]


class TokenCounts:
  """Counts the ids of consecutive chunks of up to 2^32 tokens in all.

  >>> counts = TokenCounts(np.dtype("uint16"), eos_id=1)
  >>> counts.add(np.array([3, 1, 3], np.uint16))
  >>> counts.ids.tolist(), counts.ends.tolist()
  ([0, 1, 0, 2], [1])

  Attributes:
    count: Number of tokens counted.
  """

  def __init__(self, dtype: np.dtype, eos_id: int | None = None):
    """Starts counting.

    Args:
      dtype: Unsigned dtype of the tokens.
      eos_id: Token whose places are collected, which the dtype can hold; None collects none.
    """
    self._dtype = np.dtype(dtype)
    self._eos = self._dtype.type(eos_id or 0)
    self._finds_ends = eos_id is not None
    # The last entry counts all higher ids. Entries take no memory until they are used.
    self._table = np.zeros(min(int(np.iinfo(dtype).max), MOST_IDS - 1) + 2, np.uint32)
    self._ends = np.empty(0, np.int64)
    self._num_ends = 0
    self.count = 0

  @property
  def ids(self) -> np.ndarray:
    """The count of each id, up to the highest that occurs (uint32)."""
    return np.trim_zeros(self._table[:-1], "b")

  @property
  def outside(self) -> int:
    """Number of tokens whose id is `MOST_IDS` or more."""
    return int(self._table[-1])

  @property
  def ends(self) -> np.ndarray:
    """Places of the EOS, counted from the first token (int64)."""
    return self._ends[: self._num_ends]

  def add(self, tokens: np.ndarray) -> None:
    """Counts the next tokens."""
    kernel = _compiled(self._dtype.str).get(len(tokens))
    if kernel is not None:
      self._make_room(len(tokens) if self._finds_ends else 0)
      self._num_ends = kernel(
          tokens,
          self._table,
          self._eos,
          self._finds_ends,
          self._ends,
          self._num_ends,
          self.count,
      )
    else:
      clipped = np.minimum(tokens, MOST_IDS) if len(self._table) > MOST_IDS else tokens
      found = np.bincount(clipped.astype(np.int64, copy=False))
      self._table[: len(found)] += found.astype(np.uint32)
      if self._finds_ends:
        places = np.flatnonzero(tokens == self._eos) + self.count
        self._make_room(len(places))
        self._ends[self._num_ends : self._num_ends + len(places)] = places
        self._num_ends += len(places)
    self.count += len(tokens)

  def _make_room(self, more: int) -> None:
    if self._num_ends + more > len(self._ends):
      self._ends = np.concatenate([self.ends, np.empty(self._num_ends + 2 * more, np.int64)])


@functools.cache
def _compiled(dtype: str) -> compiled.Background[_Kernel]:
  def build() -> _Kernel:
    from maxtext_olmo.corpus import token_counts_kernel

    return token_counts_kernel.build(np.dtype(dtype))

  return compiled.Background(build, after=_COMPILE_AFTER_TOKENS, what="Counting tokens")
