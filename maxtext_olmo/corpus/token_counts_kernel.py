"""The loop of `token_counts` that numba compiles (extra `[fast]`).

Importing numba takes a while, so only a builder that runs in a background thread imports this
module.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from maxtext_olmo import compiled


@compiled.jit
def count_tokens(tokens, table, eos, finds_ends, ends, num_ends, base):
  """Counts each token in `table`, and appends the places of the EOS; returns their number.

  Args:
    tokens: Tokens to count.
    table: Counts (uint32); tokens that are too high for it count in its last entry.
    eos: The EOS, of the tokens' dtype.
    finds_ends: Whether to look for it.
    ends: Receives the places, from index `num_ends` on; has room for all tokens.
    num_ends: Number of places in `ends`.
    base: Place of the first token.
  """
  one, last = np.uint32(1), np.uint64(len(table) - 1)
  for i in range(len(tokens)):
    token = tokens[i]
    if finds_ends & (token == eos):
      ends[num_ends] = base + i
      num_ends += 1
    table[min(np.uint64(token), last)] += one
  return num_ends


def build(dtype: np.dtype) -> Any:
  """Compiles the loop for a dtype, or loads it from numba's cache."""
  count_tokens(
      np.zeros(1, dtype), np.zeros(2, np.uint32), dtype.type(1), True, np.zeros(1, np.int64), 0, 0
  )
  return count_tokens
