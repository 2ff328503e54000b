"""The loop of `token_scan` that numba compiles (extra `[fast]`).

Importing numba takes a while, so only a builder that runs in a background thread imports this
module.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from maxtext_olmo import compiled

_BLOCK, _PART = 256, 64


@compiled.jit
def scan_tokens(tokens, eos, ends, num_ends, base):
  """Appends the places of the EOS to `ends`; returns the highest id and the number of places.

  Args:
    tokens: Tokens to scan.
    eos: The EOS, of the tokens' dtype.
    ends: Receives the places, from index `num_ends` on; has room for all tokens.
    num_ends: Number of places in `ends`.
    base: Place of the first token.
  """
  # Everything is cast to the tokens' type, so that a vector register holds many of them.
  kind = tokens.dtype.type
  top = kind(0)
  whole = len(tokens) // _BLOCK * _BLOCK
  for first in range(0, whole, _BLOCK):
    block = tokens[first : first + _BLOCK]
    found = kind(0)
    for i in range(_BLOCK):  # No branches, so that the compiler can vectorize the loop.
      top = max(top, block[i])
      found = kind(found | kind(block[i] == eos))
    if found == kind(0):
      continue
    for start in range(first, first + _BLOCK, _PART):
      part = tokens[start : start + _PART]
      found = kind(0)
      for i in range(_PART):
        found = kind(found | kind(part[i] == eos))
      if found != kind(0):
        for i in range(_PART):
          if part[i] == eos:
            ends[num_ends] = base + start + i
            num_ends += 1
  for i in range(whole, len(tokens)):
    top = max(top, tokens[i])
    if tokens[i] == eos:
      ends[num_ends] = base + i
      num_ends += 1
  return top, num_ends


def build(dtype: np.dtype) -> Any:
  """Compiles the loop for a dtype, or loads it from numba's cache."""
  scan_tokens(np.zeros(1, dtype), dtype.type(1), np.zeros(1, np.int64), 0, 0)
  return scan_tokens
