"""Finds the ends of documents and the highest id, in tokens that are in the processor's cache.

With numba (extra `[fast]`), one compiled loop finds both, and also reads local files. Until it is
compiled, NumPy finds them. NumPy compares many tokens at a time, but collects the places of matches
one by one. Matches are rare, so it first finds the groups of eight tokens that contain any:

    tokens == EOS      0 0 0 0 0 0 0 0   0 0 0 1 0 0 0 0   0 0 0 0 0 0 0 0   as bytes
    as 8-byte words    0                 not 0             0
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from maxtext_olmo import compiled
from maxtext_olmo.corpus.storage import Storage
from maxtext_olmo.corpus.work import reading

if TYPE_CHECKING:
  from maxtext_olmo.corpus import token_scan_kernel

_GROUP = 8
_COMPILE_AFTER_TOKENS = 1 << 25  # Compiling takes a second, in which NumPy scans more than this.
_BUFFER_BYTES = 128 << 10  # Small enough to stay in a second-level cache while it is scanned.
_BLOCK_BYTES = 4 << 20  # Read by one call of compiled code; between calls, a run can be stopped.


class TokenScan:
  """Scans consecutive chunks of tokens.

  Attributes:
    count: Number of tokens scanned.
    top: Highest id in the last call to `add` or `read`; 0 if there were no tokens.
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
    self._counts = np.zeros(0, np.uint32)  # For subclasses that count.
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
    kernels = self._compiled.get(len(tokens))
    if self._eos is not None and kernels is not None:
      self._make_room(len(tokens))
      top, self._num_ends = kernels.scan_tokens(
          tokens, self._eos, self._ends, self._num_ends, self.count
      )
      self.top = int(top)
    else:
      self.top = int(tokens.max(initial=0))
      if self._eos is not None:
        found = self._find(tokens)
        self._make_room(len(found))
        self._ends[self._num_ends : self._num_ends + len(found)] = found + self.count
        self._num_ends += len(found)
    self.count += len(tokens)

  def read(self, storage: Storage, path: str, start: int, end: int) -> None:
    """Reads bytes [start, end) of a file, which are whole tokens, and scans them.

    Raises:
      CorpusError: The file cannot be read, or ends before `end`.
    """
    top = 0
    pinned = storage.pin((path,), np.zeros(1, np.int64)) if self._eos is not None else None
    # Without a descriptor, everything is read in one call, so that the storage can read ahead.
    size = _BLOCK_BYTES if pinned is not None else max(1, end - start)
    for first in range(start, end, size):
      last = min(first + size, end)
      done = 0
      kernels = self._compiled.ready
      if pinned is not None and kernels is not None and kernels.scan_file is not None:
        reading.raise_if_stopped()
        done = self._read_compiled(kernels, int(pinned.descriptors[0]), first, last - first)
        top = max(top, self.top)
      # Reads what the compiled loop did not process (for example after a short read), or raises an
      # error that names the file and the bytes.
      for chunk in reading.read_range(storage, path, first + done, last):
        self.add(chunk.view(self._dtype))
        top = max(top, self.top)
    self.top = top

  def _read_compiled(
      self, kernels: token_scan_kernel.Kernels, descriptor: int, start: int, size: int
  ) -> int:
    """Reads and scans a block; returns the number of bytes that could be read."""
    self._make_room(size // self._dtype.itemsize)
    buffer = reading.thread_buffer()[:_BUFFER_BYTES].view(self._dtype)
    done, top, self._num_ends = kernels.scan_file(
        descriptor,
        start,
        size,
        buffer,
        self._eos,
        self._ends,
        self._num_ends,
        self.count,
        self._counts,
    )
    self.count += done // self._dtype.itemsize
    self.top = int(top)
    return int(done)

  def _make_room(self, more: int) -> None:
    if self._num_ends + more > len(self._ends):
      grown = np.empty(2 * (self._num_ends + more), np.int64)  # No memory until it is used.
      grown[: self._num_ends] = self.ends
      self._ends = grown

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
  """Compiles the loops for a dtype, and waits for it; returns False if that is impossible."""
  return _compiled(np.dtype(dtype).str).wait()


@functools.cache
def _compiled(dtype: str) -> compiled.Background[token_scan_kernel.Kernels]:
  def build() -> token_scan_kernel.Kernels:
    from maxtext_olmo.corpus import token_scan_kernel

    return token_scan_kernel.build(np.dtype(dtype))

  return compiled.Background(build, after=_COMPILE_AFTER_TOKENS, what="Scanning tokens")
