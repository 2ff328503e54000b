"""Functions that numba compiles (extra `[fast]`): reading, repetitions, segments, packing.

A batch is larger than the processor's cache, so each row is read, padded and checked while it is in
the cache. Each function has a counterpart without numba (in `reader`, `repetition`, `segments` or
`packing`), which gives the same results and is used until the compiled function is ready.

Importing numba takes a while, so only builders that run in background threads import this module.
Everything is in one file, because numba's cache notices a change in the file of a compiled
function, but not in the files of the functions that it calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from maxtext_olmo import compiled

# Tokens that `mark_after` tests together; documents are usually longer, so most tests fail.
_MARKED_AT_ONCE = 256


_jit = compiled.jit
_pread = compiled.declare_pread()


@_jit
def is_clean(row, length, min_period, max_period, repeats):
  """Returns whether no period repeats for `repeats * period` places in `row[:length]`.

  Searches for a run of `repeats * period` places that each equal the place one period earlier. The
  last place of a possible run is tested first: if it differs, no run covers it, and the next
  possible run begins after it.
  """
  # The indices are unsigned, because an index that may be negative costs an extra test.
  one, end = np.uint64(1), np.uint64(length)
  for number in range(min_period, min(max_period, length // 3) + 1):
    period = np.uint64(number)
    run = np.uint64(repeats) * period
    last = period + run - one  # The possible run is [last - run + 1, last].
    known = period  # Places of the possible run before this one are known to be equal.
    while last < end:
      place = last
      while place >= known and row[place] == row[place - period]:
        place -= one
      if place < known:
        return False
      known = last + one
      last = place + run
  return True


@_jit
def search_rows(rows, min_period, max_period, repeats, keep):
  """Sets `keep[r]` to whether row r is clean."""
  for r in range(rows.shape[0]):
    keep[r] = is_clean(rows[r], rows.shape[1], min_period, max_period, repeats)


@_jit
def execute(
    bounds, sources, firsts, counts, descriptors, offsets, out, pad, search, sees_padding, clean
):
  """Reads the parts of each row, pads the rest, and checks the row.

  Args:
    bounds: Index of the first part of each row, followed by the number of parts. This and the next
      three arrays are the table of parts.
    sources: The file of each part.
    firsts: The first token of each part in its file.
    counts: The number of tokens of each part.
    descriptors: The file descriptor of each file; empty if all tokens are in `out` already.
    offsets: The byte at which the tokens of each file begin.
    out: The array to fill, (rows, length).
    pad: The id that fills a row after its parts.
    search: Shortest period, longest period, and repeats; a longest period of 0 disables the search.
    sees_padding: Whether the search treats padding as tokens.
    clean: Receives, for each row, whether the search keeps it.

  Returns:
    The index of a part that could not be read in full, or -1 if all were read; and the highest
    token id, excluding padding.
  """
  width = out.itemsize
  min_period, max_period, repeats = search
  top = out.dtype.type(0)  # The type of the tokens, so that a vector register holds many of them.
  for r in range(out.shape[0]):
    row = out[r]
    column: Any = 0
    part = bounds[r]
    while part < bounds[r + 1]:
      source, first, count = sources[part], firsts[part], np.int64(counts[part])
      following = part + 1
      while (
          following < bounds[r + 1]
          and sources[following] == source
          and firsts[following] == first + count
      ):
        count += counts[following]
        following += 1
      if len(descriptors):
        if not 0 <= source < len(descriptors):
          return part, top
        size, offset = count * width, offsets[source] + first * width
        if _pread(descriptors[source], row[column:].ctypes, size, offset) != size:
          return part, top
      column += count
      part = following
    for i in range(column):
      top = max(top, row[i])
    row[column:] = pad
    length = row.shape[0] if sees_padding and column else column
    clean[r] = is_clean(row, length, min_period, max_period, repeats)
  return -1, top


@_jit
def _mark(row, first, last, token, words):
  """Sets the bit after each occurrence of a token in columns [first, last)."""
  for i in range(first, last):
    if row[i] == token:
      words[(i + 1) >> 5] |= np.uint32(1) << np.uint32((i + 1) & 31)


@_jit
def mark_after(tokens, token, words):
  """Sets, in the words of each row, the bit of each column after `token`; a word has 32 bits."""
  end = tokens.shape[1] - 1  # Nothing follows the last token.
  whole = end - end % _MARKED_AT_ONCE
  for r in range(tokens.shape[0]):
    row = tokens[r]
    for first in range(0, whole, _MARKED_AT_ONCE):
      block = row[first : first + _MARKED_AT_ONCE]
      found = False
      # A constant length and no branches, so that the compiler vectorizes the loop.
      for i in range(_MARKED_AT_ONCE):
        found |= block[i] == token
      if found:
        _mark(row, first, first + _MARKED_AT_ONCE, token, words[r])
    _mark(row, whole, end, token, words[r])


@_jit
def best_fit(lengths, capacity, queues, bins):
  """Puts each piece, in the given order, into the bin it fills best; returns the number of bins.

  Bins with equal room form a list, linked through `after`. The bits of `rooms` say which lists are
  not empty. Bins are taken from the front of a list, and added at the back (if `queues`) or front.
  """
  front = np.full(capacity + 1, -1, np.int64)
  back = np.full(capacity + 1, -1, np.int64)
  after = np.empty(lengths.shape[0], np.int64)
  rooms = np.zeros((capacity >> 6) + 1, np.uint64)
  one = np.uint64(1)
  number_of_bins = 0
  for i in range(lengths.shape[0]):
    length = lengths[i]
    word = length >> 6
    bits = rooms[word] >> np.uint64(length & 63) << np.uint64(length & 63)
    while bits == 0 and word + 1 < rooms.shape[0]:
      word += 1
      bits = rooms[word]
    if bits == 0:
      space, number = capacity, number_of_bins
      number_of_bins += 1
    else:
      space = word << 6
      while not bits & one:
        bits >>= one
        space += 1
      number = front[space]
      front[space] = after[number]
      if front[space] < 0:
        rooms[space >> 6] ^= one << np.uint64(space & 63)
    bins[i] = number
    rest = space - length
    if rest:
      if front[rest] < 0:
        front[rest] = back[rest] = number
        after[number] = -1
        rooms[rest >> 6] |= one << np.uint64(rest & 63)
      elif queues:
        after[back[rest]] = number
        back[rest] = number
        after[number] = -1
      else:
        after[number] = front[rest]
        front[rest] = number
  return number_of_bins


def build_execute(itemsize: int) -> Callable[..., tuple[int, int]] | None:
  """Compiles `execute` for tokens of `itemsize` bytes; None if the platform does not support it."""
  if not compiled.can_pread():
    return None
  tokens = np.zeros((1, 2), f"u{itemsize}")
  int32, int64 = np.zeros(0, np.int32), np.zeros(0, np.int64)
  parts = np.zeros(2, np.int64), int32, int64, int32
  pad = tokens.dtype.type(0)
  execute(*parts, int32, int64, tokens, pad, (1, 0, 1), False, np.zeros(1, np.bool_))
  return execute


def build_search(itemsize: int) -> Callable[..., np.ndarray]:
  """Compiles the repetition search for tokens of `itemsize` bytes."""

  def search(rows: np.ndarray, min_period: int, max_period: int, repeats: int) -> np.ndarray:
    keep = np.empty(len(rows), np.bool_)
    search_rows(rows, min_period, max_period, repeats, keep)
    return keep

  search(np.zeros((1, 2), f"u{itemsize}"), 1, 0, 1)
  return search


def build_best_fit() -> Callable[[np.ndarray, int, bool, np.ndarray], int]:
  """Compiles best-fit packing."""
  best_fit(np.ones(1, np.int64), 2, False, np.zeros(1, np.int64))
  return best_fit


def build_mark_after(itemsize: int) -> Callable[[np.ndarray, Any, np.ndarray], None]:
  """Compiles `mark_after` for tokens of `itemsize` bytes."""
  tokens = np.zeros((1, 2), f"u{itemsize}")
  mark_after(tokens, tokens.dtype.type(0), np.zeros((1, 1), np.uint32))
  return mark_after


def build_tie_sort() -> Callable[..., None]:
  """Compiles the functions of `tie_sort`, which also run without numba."""
  from numba import extending

  from maxtext_olmo.rows import tie_sort

  for helper in tie_sort.HELPERS:
    extending.register_jitable(helper)
  sort = _jit(tie_sort.tie_sort)
  cells = [np.zeros(size, np.int64) for size in (1, 1, tie_sort.STACK)]
  spare = [np.zeros(tie_sort.SCRATCH, np.int64) for _ in range(2)]
  sort(*cells[:2], 8, cells[2], *spare)
  return sort
