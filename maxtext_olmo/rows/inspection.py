"""What is looked for in the tokens of a batch: ids outside the vocabulary, and rows that repeat too much.

A batch is larger than the processor's cache. Read first and looked at afterwards, it comes from memory twice more; so with numba
(extra `[fast]`) one compiled call reads a row and looks at it while it is in the cache:

    read all rows, highest id of all, repetitions of all         memory → cache three times
    for each row: read, highest id, repetitions                  once

The rows of a large batch are shared by a few threads (`crew`), since one core alone does not get all that the memory can give.

NumPy serves until that is compiled, and wherever rows do not come from local files; the findings are the same.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from maxtext_olmo import compiled
from maxtext_olmo.rows import crew as crew_lib
from maxtext_olmo.rows import repetition

_COMPILE_AFTER_TOKENS = 1 << 22

# Least and most period, and repeats, that find nothing.
_NO_SEARCH = (1, 0, 1)
_search_bounds = functools.cache(repetition.search_bounds)

# The files of instances, and the byte offsets in them.
Located = tuple[np.ndarray, np.ndarray]

# (descriptors, offsets, rows, min_period, max_period, repeats, highest, clean, post, helpers) -> a row that was not read, or
# -1 less the naps.
ReadAndLook = Callable[..., int]


class _Compiled(NamedTuple):
  """Reading and looking, and who helps with it."""

  read: ReadAndLook
  crew: crew_lib.Crew


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
    threads: How many read them beside each other.
    naps: How often the one that asked slept while it waited for the others.
  """

  highest: int
  clean: np.ndarray | None
  threads: int = 1
  naps: int = 0


class Inspector:
  """Reads rows and looks at them.

  Args:
    source: Where rows come from.
    ngram_filter: Whether to look for repetitions.
    threads: How many read a large batch together; 0 for up to four, as there are cores.
  """

  def __init__(self, source: WindowSource, *, ngram_filter: bool, threads: int = 0):
    self._source = source
    self._ngram_filter = ngram_filter
    self._threads = threads or crew_lib.threads_beside(0)
    # Of a source of local files, which compiled code may read.
    self._files: Any = source if hasattr(source, "open_rows") else None

  def locate(self, instance_ids: np.ndarray) -> Located | None:
    """Where instances lie, for `read`; None where the source does not say."""
    return None if self._files is None else self._files.locate(instance_ids)

  def read(
      self, instance_ids: np.ndarray, tokens: np.ndarray, located: Located | None = None
  ) -> Findings | None:
    """Reads rows into `tokens`; None where they are yet to be looked at.

    Args:
      instance_ids: Of the rows.
      tokens: What is read into.
      located: What `locate` gave for them, if they were located before.
    """
    kernel = _compiled(tokens.dtype.itemsize).get(tokens.size) if self._files is not None else None
    if kernel is not None:
      file_ids, offsets = located or self._files.locate(instance_ids)
      opened = self._files.open_rows(file_ids)
      found = opened and self._read_and_look(kernel, opened, offsets, tokens)
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
      self, kernel: _Compiled, files: Any, offsets: np.ndarray, tokens: np.ndarray
  ) -> Findings | None:
    rows, length = tokens.shape
    highest = np.empty(rows, np.uint64)
    clean = np.empty(rows, np.bool_)
    bounds = _search_bounds(length) if self._ngram_filter else _NO_SEARCH
    unsigned = tokens if tokens.dtype.kind == "u" else tokens.view(f"u{tokens.dtype.itemsize}")
    crew = kernel.crew
    helpers = crew.take_on(tokens.nbytes, min(self._threads, rows))
    try:
      outcome = kernel.read(
          files.descriptors, offsets, unsigned, *bounds, highest, clean, crew.post(helpers), helpers
      )
    finally:
      crew.let_go(helpers)
    if outcome >= 0:
      return None
    kept = clean if self._ngram_filter else None
    return Findings(int(highest.max(initial=0)), kept, helpers + 1, -1 - outcome)


def compile_reads(dtype: Any = np.uint32) -> bool:
  """Waits until reading and looking is compiled for `dtype`; False where NumPy must do without it."""
  return _compiled(np.dtype(dtype).itemsize).wait()


@functools.cache
def _compiled(itemsize: int) -> compiled.Background[_Compiled]:
  def build() -> _Compiled | None:
    from maxtext_olmo.rows import inspection_numba

    reads = inspection_numba.build_reads(itemsize)
    if reads is None:
      return None
    return _Compiled(reads.read, crew_lib.Crew(reads, np.dtype(f"u{itemsize}")))

  return compiled.Background(
      build, after=_COMPILE_AFTER_TOKENS, what="Looking at tokens as they are read"
  )
