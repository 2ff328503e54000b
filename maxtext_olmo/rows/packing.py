"""The ways to pack documents into rows, and best-fit packing for planned rows.

    documents of 5, 3, 6 and 2 tokens in rows of 8

    first_fit           |5 5 5 5 5 3 3 3|  |6 6 6 6 6 6 2 2|     the first row with room
    best_fit            the fullest row with enough room; the result is the same here
    concat_then_split   one long sequence cut every 8 tokens: no padding, but documents are cut
    planned             best fit over a window of documents, longest first (`planned`)

The first three are Grain's (`grain_llm.records`). They work on a stream, so a row depends on all
documents before it.
"""

from __future__ import annotations

import collections
from collections.abc import Callable

import numpy as np

from maxtext_olmo import compiled
from maxtext_olmo.errors import ConfigError

STREAMING = ("first_fit", "best_fit", "concat_then_split")
PACKINGS = (*STREAMING, "planned")
LONG_DOCUMENTS = ("error", "truncate", "split")

# Compiling occupies another core for a second, which pays off only after this many pieces.
_COMPILE_AFTER_PIECES = 20_000


def check_long_documents(choice: str) -> None:
  """Raises ConfigError unless `choice` is one of `LONG_DOCUMENTS`."""
  if choice not in LONG_DOCUMENTS:
    raise ConfigError(
        f"long_documents={choice!r} is unknown; choose from {', '.join(LONG_DOCUMENTS)}."
    )


def best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
  """Packs pieces into bins, the longest first, each into the bin it fills best.

  Returns:
    The bin of each piece, and the number of bins.
  """
  lengths = np.asarray(lengths, np.int64)
  order = np.argsort(-lengths, kind="stable")
  bins = np.empty(len(lengths), np.int64)
  bins[order], count = best_fit_in_order(lengths[order], capacity, queues=False)
  return bins, count


def best_fit_in_order(
    lengths: np.ndarray, capacity: int, *, queues: bool
) -> tuple[np.ndarray, int]:
  """Packs pieces into bins in the given order, each into the bin it fills best.

  Bins are numbered in the order in which they are opened.

  Args:
    lengths: Length of each piece.
    capacity: Length of a bin.
    queues: Which of several bins with equal room is taken. True takes the bin that has had this
      room for the longest time, as OLMo-core does; False takes the most recent one.

  Returns:
    The bin of each piece, and the number of bins.
  """
  lengths = np.asarray(lengths, np.int64)
  if lengths.size and not (lengths.min() > 0 and lengths.max() <= capacity):
    raise ConfigError(
        f"Expected pieces of 1 to {capacity} tokens, found {lengths.min()} to {lengths.max()}."
    )
  bins = np.empty(len(lengths), np.int64)
  pack = _COMPILED.get(len(lengths)) or _best_fit
  return bins, pack(lengths, capacity, queues, bins)


def compile_best_fit() -> bool:
  """Waits until best fit is compiled; returns False if it cannot be compiled."""
  return _COMPILED.wait()


def _best_fit(lengths: np.ndarray, capacity: int, queues: bool, bins: np.ndarray) -> int:
  """Packs pieces in the given order.

  Bins with equal room share a list. The bits of an integer say which lists are not empty, so the
  lowest set bit at or above the length of a piece gives the best bin.
  """
  lists: dict[int, collections.deque[int]] = collections.defaultdict(collections.deque)
  rooms = 0  # Bit r is set if some bin has room for exactly r tokens.
  count = 0
  for piece, length in enumerate(lengths.tolist()):
    fitting = rooms >> length
    if fitting:
      space = length + (fitting & -fitting).bit_length() - 1
      number = lists[space].popleft() if queues else lists[space].pop()
      if not lists[space]:
        rooms ^= 1 << space
    else:
      space, number = capacity, count
      count += 1
    bins[piece] = number
    rest = space - length
    if rest:
      lists[rest].append(number)
      rooms |= 1 << rest
  return count


def _build() -> Callable[[np.ndarray, int, bool, np.ndarray], int]:
  from maxtext_olmo.rows import kernel

  return kernel.build_best_fit()


_COMPILED = compiled.Background(_build, after=_COMPILE_AFTER_PIECES, what="Best-fit packing")
