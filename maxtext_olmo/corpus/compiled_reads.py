"""Many reads in one call that holds no lock of Python's, compiled by numba (extra `[fast]`).

A batch is dozens of reads, each a few microseconds; in Python each costs another microsecond or two, and takes the interpreter
from the trainer's thread. Here the loop over `pread` is compiled, in the background, once enough has been read to be worth it;
until then, and without numba, Python reads row by row.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from absl import logging

# (descriptors, offsets, rows of bytes) -> the first row that was not read whole, or -1.
ReadRows = Callable[[np.ndarray, np.ndarray, np.ndarray], int]

_COMPILE_AFTER_BYTES = 1 << 26


def build() -> ReadRows:
  """Compiles the loop, or loads it from numba's cache."""
  import numba

  types: Any = numba.types
  pread = types.ExternalFunction(
      "pread", types.ssize_t(types.intc, types.voidptr, types.size_t, types.int64)
  )

  def read_rows(descriptors, offsets, rows):
    width = rows.shape[1]
    for i in range(rows.shape[0]):
      if pread(descriptors[i], rows[i].ctypes, width, offsets[i]) != width:
        return i
    return -1

  signature = types.intp(
      types.Array(types.int32, 1, "C"),
      types.Array(types.int64, 1, "C"),
      types.Array(types.uint8, 2, "C"),
  )
  return numba.njit(signature, nogil=True)(read_rows)


class Compiler:
  """Compiles in a thread of its own, once enough has been read."""

  def __init__(self) -> None:
    self._bytes = 0
    self._thread: threading.Thread | None = None
    self._ready: ReadRows | None = None

  def get(self, size: int) -> ReadRows | None:
    """The compiled loop if there is one by now.

    Args:
      size: The bytes that are about to be read.
    """
    if self._thread is None:
      self._bytes += size
      if self._bytes >= _COMPILE_AFTER_BYTES:
        self.start()
    return self._ready

  def start(self) -> threading.Thread:
    """Begins to compile, if that has not been done."""
    if self._thread is None:
      self._thread = threading.Thread(target=self._compile, name="olmo-compile")
      self._thread.start()
    return self._thread

  def _compile(self) -> None:
    # `pread` is taken from the C library as it is on 64-bit systems, where an offset has 64 bits.
    if sys.maxsize < 2**32 or not sys.platform.startswith("linux"):
      return
    try:
      self._ready = build()
    except Exception as error:  # No numba, or one that cannot do this: Python reads.
      logging.vlog(1, "Reads are not compiled: %s", error)


COMPILER = Compiler()
