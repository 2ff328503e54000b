"""The loops of `token_scan` and `token_counts` that numba compiles (extra `[fast]`).

Importing numba takes a while, so only a builder that runs in a background thread imports this
module. The loops are in one file, because numba's cache notices a change in the file of a compiled
function, but not in the files of the functions that it calls.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from maxtext_olmo import compiled

_BLOCK = 128  # Tokens that are tested together; most documents are longer, so most tests fail.

_pread = compiled.declare_pread()


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
  # Everything is cast to the tokens' type, so that a vector register holds many of them. The inner
  # loops have no branches, and their indices are unsigned (an index that may be negative costs a
  # test), so that the compiler vectorizes them.
  kind = tokens.dtype.type
  one, zero = kind(1), kind(0)
  top = zero
  whole = len(tokens) // _BLOCK * _BLOCK
  for number in range(0, whole, _BLOCK):
    first = np.uint64(number)
    highest, found = zero, zero
    for i in range(_BLOCK):
      token = tokens[first + np.uint64(i)]
      highest = max(highest, token)
      found = kind(found | kind(token == eos))
    top = max(top, highest)
    if found == zero:
      continue
    # If the block has one EOS, which is the usual case, the sum of the matching places is
    # its place.
    count, place = zero, zero
    for i in range(_BLOCK):
      match = kind(tokens[first + np.uint64(i)] == eos)
      count = kind(count + match)
      place = kind(place + kind(kind(i) & kind(zero - match)))
    if count == one:
      ends[num_ends] = base + number + np.int64(place)
      num_ends += 1
      continue
    for i in range(number, number + _BLOCK):
      if tokens[i] == eos:
        ends[num_ends] = base + i
        num_ends += 1
  for i in range(whole, len(tokens)):
    top = max(top, tokens[i])
    if tokens[i] == eos:
      ends[num_ends] = base + i
      num_ends += 1
  return top, num_ends


@compiled.jit
def count_tokens(tokens, counts):
  """Adds the number of times that each token occurs to `counts` (uint32).

  Nearly all of the time goes into loads and stores at random places. Counters of one byte need less
  cache, but testing them for overflow takes longer than this saves.
  """
  one = np.uint32(1)
  for i in range(len(tokens)):
    counts[np.uint64(tokens[i])] += one


@compiled.jit
def scan_file(descriptor, offset, size, buffer, eos, ends, num_ends, base, counts):
  """Reads tokens one buffer at a time, scans them and, if asked to, counts them.

  Args:
    descriptor: Descriptor of the file.
    offset: First byte to read.
    size: Number of bytes to read, a multiple of the size of a token.
    buffer: Array of tokens, small enough to stay in the processor's cache.
    eos: The EOS, of the tokens' dtype.
    ends: Receives the places, from index `num_ends` on; has room for all tokens.
    num_ends: Number of places in `ends`.
    base: Place of the first token.
    counts: Counters, as for `count_tokens`; empty if tokens are not to be counted.

  Returns:
    Number of bytes that were processed, less than `size` only if a read failed or was short, or
    if there is no counter for a token; the highest id; and the number of places.
  """
  width = buffer.itemsize
  top = buffer.dtype.type(0)
  done = 0
  while done < size:
    count = min(len(buffer), (size - done) // width)
    if _pread(descriptor, buffer.ctypes, count * width, offset + done) != count * width:
      break
    tokens = buffer[:count]
    highest, found = scan_tokens(tokens, eos, ends, num_ends, base + done // width)
    if len(counts):
      if np.uint64(highest) >= np.uint64(len(counts)):
        break
      count_tokens(tokens, counts)
    num_ends = found
    top = max(top, highest)
    done += count * width
  return done, top, num_ends


class Kernels(NamedTuple):
  """The compiled loops; `scan_file` is None if the platform does not support it."""

  scan_tokens: Any
  count_tokens: Any
  scan_file: Any


def build(dtype: np.dtype) -> Kernels:
  """Compiles the loops for a dtype, or loads them from numba's cache."""
  tokens, eos, ends = np.zeros(1, dtype), dtype.type(1), np.zeros(1, np.int64)
  counts = np.zeros(1, np.uint32)
  scan_tokens(tokens, eos, ends, 0, 0)
  count_tokens(tokens, counts)
  if not compiled.can_pread():
    return Kernels(scan_tokens, count_tokens, None)
  scan_file(0, 0, 0, tokens, eos, ends, 0, 0, counts)
  return Kernels(scan_tokens, count_tokens, scan_file)
