"""What is looked for in the tokens of a batch: ids outside the vocabulary, and rows that repeat too much.

A batch is larger than the processor's cache. Read first and looked at afterwards, it comes from memory twice more; so with numba
(extra `[fast]`) one compiled call reads a row and looks at it while it is in the cache:

    read all rows, highest id of all, repetitions of all         memory → cache three times
    for each row: read, highest id, repetitions                  once

NumPy serves until that is compiled, and wherever rows do not come from local files; the findings are the same.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from maxtext_olmo import compiled
from maxtext_olmo.batches import repetition

_COMPILE_AFTER_TOKENS = 1 << 22

# (descriptors, offsets, rows, min_period, max_period, repeats, highest, clean) -> the first row that was not read, or -1.
ReadAndLook = Callable[..., int]


class WindowSource(Protocol):
  """Instance id → window of tokens; `OlmoNpyDataSource` is one."""

  @property
  def dtype(self) -> np.dtype:
    """Of the tokens."""

  def read(self, instance_ids: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """The windows of some instances, one row each, in `out` where it is given."""

  def where(self, instance_id: int, column: int = 0) -> str:
    """Where a token comes from, for error messages."""


@dataclasses.dataclass(frozen=True)
class Findings:
  """Of some rows.

  Attributes:
    highest: Their highest id; 0 where there are no tokens.
    clean: For each row, whether the repetition filter keeps it; None where it was not asked.
  """

  highest: int
  clean: np.ndarray | None


class Inspector:
  """Reads rows and looks at them.

  Args:
    source: Where rows come from.
    ngram_filter: Whether to look for repetitions.
  """

  def __init__(self, source: WindowSource, *, ngram_filter: bool):
    self._source = source
    self._ngram_filter = ngram_filter
    self._open_rows = getattr(source, "open_rows", None)

  def read(self, instance_ids: np.ndarray, tokens: np.ndarray) -> Findings | None:
    """Reads rows into `tokens`; None where they are yet to be looked at."""
    if self._open_rows is not None:
      kernel = _compiled(tokens.dtype.itemsize).get(tokens.size)
      opened = None if kernel is None else self._open_rows(instance_ids)
      if kernel is not None and opened is not None:
        files, offsets = opened
        found = self._read_and_look(kernel, files, offsets, tokens)
        if found is not None:
          return found
    # Also what was interrupted: row by row it is read to its end, or an error says what is wrong.
    self._source.read(instance_ids, tokens)
    return None

  def look(self, tokens: np.ndarray) -> Findings:
    """Looks at rows that have been read."""
    highest = int(tokens.max()) if tokens.size else 0
    return Findings(highest, repetition.clean_rows(tokens) if self._ngram_filter else None)

  def _read_and_look(
      self, kernel: ReadAndLook, files: Any, offsets: np.ndarray, tokens: np.ndarray
  ) -> Findings | None:
    rows, length = tokens.shape
    highest = np.zeros(rows, np.uint64)
    clean = np.empty(rows, np.bool_)
    bounds = repetition.search_bounds(length) if self._ngram_filter else (1, 0, 1)
    unsigned = tokens.view(f"u{tokens.dtype.itemsize}")
    offsets = np.ascontiguousarray(offsets, np.int64)
    if kernel(files.descriptors, offsets, unsigned, *bounds, highest, clean) >= 0:
      return None
    return Findings(int(highest.max(initial=0)), clean if self._ngram_filter else None)


def compile_reads(dtype: Any = np.uint32) -> bool:
  """Waits until reading and looking is compiled for `dtype`; False where NumPy must do without it."""
  return _compiled(np.dtype(dtype).itemsize).wait()


@functools.cache
def _compiled(itemsize: int) -> compiled.Background[ReadAndLook]:
  def build() -> ReadAndLook | None:
    from maxtext_olmo.batches import inspection_numba

    return inspection_numba.build_reads(itemsize)

  return compiled.Background(
      build, after=_COMPILE_AFTER_TOKENS, what="Looking at tokens as they are read"
  )
