"""The loop of `token_scan` that numba compiles (extra `[fast]`).

Importing numba takes a while, so only a builder that runs in a background thread imports this
module.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from maxtext_olmo import compiled

_BLOCK = 128


@compiled.jit
def scan_tokens(tokens, eos, places):
  """Writes the places of the EOS to `places`; returns the highest id and the number of places."""
  # Everything has the tokens' type, so that a vector register holds many of them.
  zero, one = tokens.dtype.type(0), tokens.dtype.type(1)
  top, count = zero, 0
  whole = len(tokens) // _BLOCK * _BLOCK
  for first in range(0, whole, _BLOCK):
    block = tokens[first : first + _BLOCK]
    found = zero
    for i in range(_BLOCK):  # No branches, so that the compiler can vectorize the loop.
      top = max(top, block[i])
      found |= one if block[i] == eos else zero
    if found != zero:
      for i in range(_BLOCK):
        if block[i] == eos:
          places[count] = first + i
          count += 1
  for i in range(whole, len(tokens)):
    top = max(top, tokens[i])
    if tokens[i] == eos:
      places[count] = i
      count += 1
  return top, count


def build(dtype: np.dtype) -> Any:
  """Compiles the loop for a dtype, or loads it from numba's cache."""
  scan_tokens(np.zeros(1, dtype), dtype.type(1), np.zeros(1, np.int64))
  return scan_tokens
