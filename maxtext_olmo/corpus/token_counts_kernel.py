"""The loop of `token_counts` that numba compiles (extra `[fast]`).

Importing numba takes a while, so only a builder that runs in a background thread imports this
module.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from maxtext_olmo import compiled


@compiled.jit
def count_tokens(tokens, low, high):
  """Counts each token in `low` (uint8), and adds 256 to `high` (uint32) whenever `low` overflows.

  Nearly all of the time goes into stores to random places. One-byte counters make the table of a
  whole vocabulary so small that most of these places are in the processor's first-level cache.
  """
  one, zero, full = np.uint8(1), np.uint8(0), np.uint32(256)
  for i in range(len(tokens)):
    token = np.uint64(tokens[i])
    count = np.uint8(low[token] + one)
    low[token] = count
    if count == zero:
      high[token] += full


def build(dtype: np.dtype) -> Any:
  """Compiles the loop for a dtype, or loads it from numba's cache."""
  count_tokens(np.zeros(1, dtype), np.zeros(1, np.uint8), np.zeros(1, np.uint32))
  return count_tokens
