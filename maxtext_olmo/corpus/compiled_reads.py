"""Many reads in one call that holds no lock of Python's, compiled by numba (extra `[fast]`).

A batch is dozens of reads, each a few microseconds; in Python each costs another microsecond or two, and takes the interpreter
from the trainer's thread. Here the loop over `pread` is compiled, in the background, once enough has been read to be worth it;
until then, and without numba, Python reads row by row.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from maxtext_olmo import compiled

# (descriptors, offsets, rows of bytes) -> the first row that was not read whole, or -1.
ReadRows = Callable[[np.ndarray, np.ndarray, np.ndarray], int]

_COMPILE_AFTER_BYTES = 1 << 26


def pread() -> Any | None:
  """`pread` of the C library, to be called from compiled code; None where it is not known to look as it does here."""
  # An offset has 64 bits on 64-bit systems only.
  if sys.maxsize < 2**32 or not sys.platform.startswith("linux"):
    return None
  import numba

  types: Any = numba.types
  signature = types.ssize_t(types.intc, types.voidptr, types.size_t, types.int64)
  return types.ExternalFunction("pread", signature)


def build() -> ReadRows | None:
  """Compiles the loop."""
  read = pread()
  if read is None:
    return None
  import numba

  types: Any = numba.types

  def read_rows(descriptors, offsets, rows):
    width = rows.shape[1]
    for i in range(rows.shape[0]):
      if read(descriptors[i], rows[i].ctypes, width, offsets[i]) != width:
        return i
    return -1

  signature = types.intp(
      types.Array(types.int32, 1, "C"),
      types.Array(types.int64, 1, "C"),
      types.Array(types.uint8, 2, "C"),
  )
  return numba.njit(signature, nogil=True)(read_rows)


READ_ROWS = compiled.Background(build, after=_COMPILE_AFTER_BYTES, what="Reading")
