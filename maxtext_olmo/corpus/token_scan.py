"""Finds the ends of documents and the highest id, in tokens that are in the processor's cache.

With numba (extra `[fast]`), one loop finds both, once it is compiled. Until then, NumPy does. NumPy
compares many tokens at a time, but collects the places of matches one by one. Matches are rare, so
it first finds the groups of eight tokens that contain any:

    tokens == EOS      0 0 0 0 0 0 0 0   0 0 0 1 0 0 0 0   0 0 0 0 0 0 0 0   as bytes
    as 8-byte words    0                 not 0             0
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from maxtext_olmo import compiled

_GROUP = 8
_COMPILE_AFTER_TOKENS = 1 << 26  # Compiling takes a second, in which NumPy scans more than this.
_Kernel = Callable[[np.ndarray, Any, np.ndarray, int, int], tuple[Any, int]]


class TokenScan:
  """Scans consecutive chunks of tokens.

  Attributes:
    count: Number of tokens scanned.
    top: Highest id of the last chunk; 0 if it was empty.
  """

  def __init__(self, dtype: np.dtype, eos_id: int | None):
    """Starts a scan.

    Args:
      dtype: Dtype of the tokens.
      eos_id: Token to find; None finds nothing.
    """
    self._dtype = np.dtype(dtype)
    # Comparing with an id that the dtype cannot hold would find nothing, slowly.
    wanted = eos_id is not None and 0 <= eos_id <= np.iinfo(dtype).max
    self._eos: Any = self._dtype.type(eos_id) if wanted else None
    self._compiled = _compiled(self._dtype.str)
    self._matches = np.zeros(0, bool)
    self._ends = np.empty(0, np.int64)
    self._num_ends = 0
    self.count = 0
    self.top = 0

  @property
  def ends(self) -> np.ndarray:
    """Places of the EOS, counted from the first token that was scanned (int64)."""
    return self._ends[: self._num_ends]

  def add(self, tokens: np.ndarray) -> None:
    """Scans the next tokens."""
    kernel = self._compiled.get(len(tokens))
    if self._eos is not None and kernel is not None:
      self._make_room(len(tokens))
      top, self._num_ends = kernel(tokens, self._eos, self._ends, self._num_ends, self.count)
      self.top = int(top)
    else:
      self.top = int(tokens.max(initial=0))
      if self._eos is not None:
        found = self._find(tokens)
        self._make_room(len(found))
        self._ends[self._num_ends : self._num_ends + len(found)] = found + self.count
        self._num_ends += len(found)
    self.count += len(tokens)

  def _make_room(self, more: int) -> None:
    if self._num_ends + more > len(self._ends):
      self._ends = np.concatenate([self.ends, np.empty(self._num_ends + 2 * more, np.int64)])

  def _find(self, tokens: np.ndarray) -> np.ndarray:
    size = -(-len(tokens) // _GROUP) * _GROUP
    if len(self._matches) < size:
      self._matches = np.zeros(size, bool)
    matches = self._matches[:size]
    matches[len(tokens) :] = False
    np.equal(tokens, self._eos, out=matches[: len(tokens)])
    groups = np.flatnonzero(matches.view(np.uint64) != 0)
    inside = np.flatnonzero(matches.reshape(-1, _GROUP)[groups])
    found: np.ndarray = groups[inside // _GROUP] * _GROUP + inside % _GROUP
    return found


def compile_now(dtype: np.dtype) -> bool:
  """Compiles the loop for a dtype, and waits for it; returns False if that is impossible."""
  return _compiled(np.dtype(dtype).str).wait()


@functools.cache
def _compiled(dtype: str) -> compiled.Background[_Kernel]:
  def build() -> _Kernel:
    from maxtext_olmo.corpus import token_scan_kernel

    return token_scan_kernel.build(np.dtype(dtype))

  return compiled.Background(build, after=_COMPILE_AFTER_TOKENS, what="Scanning tokens")
