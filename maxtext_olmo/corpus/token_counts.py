"""Counts how often each token id occurs, and finds the ends of documents.

Each chunk is scanned while it is in the processor's cache (`token_scan`), which also finds its
highest id. It can then be counted without any checks. With numba (extra `[fast]`), a compiled loop
does the counting; until it is ready, NumPy gives the same results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from maxtext_olmo.corpus.token_scan import TokenScan

if TYPE_CHECKING:
  from maxtext_olmo.corpus import token_scan_kernel

# No tokenizer has more ids. Damaged files may, and a table of all of them would not fit in memory.
MOST_IDS = 1 << 22


class TokenCounts(TokenScan):
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
    super().__init__(dtype, eos_id)
    # Entries take no memory until they are used.
    self._counts = np.zeros(min(int(np.iinfo(dtype).max) + 1, MOST_IDS), np.uint32)
    self._num_ids = 0
    self.outside = 0

  @property
  def ids(self) -> np.ndarray:
    """The count of each id, up to the highest that occurs (uint32)."""
    return self._counts[: self._num_ids]

  def add(self, tokens: np.ndarray) -> None:
    """Counts the next tokens."""
    super().add(tokens)
    top = self.top
    if top >= MOST_IDS:
      inside = tokens[tokens < MOST_IDS]
      self.outside += len(tokens) - len(inside)
      tokens, top = inside, int(inside.max(initial=0))
    if not len(tokens):
      return
    self._num_ids = max(self._num_ids, top + 1)
    kernels = self._compiled.ready
    if kernels is not None:
      kernels.count_tokens(tokens, self._counts)
    else:
      found = np.bincount(tokens.astype(np.int64, copy=False))
      self._counts[: len(found)] += found.astype(np.uint32)

  def _read_compiled(
      self, kernels: token_scan_kernel.Kernels, descriptor: int, start: int, size: int
  ) -> int:
    done = super()._read_compiled(kernels, descriptor, start, size)
    if done:
      self._num_ids = max(self._num_ids, self.top + 1)
    return done
