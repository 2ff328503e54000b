"""Page-aligned arrays whose memory is reused once nothing references them.

A new large array costs a page fault every 4 KiB, and copying an array that is not page-aligned is
several times slower. So the memory of a batch comes from a pool, and returns to it automatically:

    array ──base──▶ lease ──owns──▶ memory
                      │
                      └── when nothing references the lease, the memory returns to the pool

A view of the array references the lease too, and so does a JAX array on the CPU that shares the
memory instead of copying it.
"""

from __future__ import annotations

import collections
import contextlib
import math
import mmap
import os
import threading
from typing import Any, NamedTuple

import numpy as np


class _Memory(NamedTuple):
  """A block of memory, and the address where it begins."""

  pages: mmap.mmap
  address: int


class _Lease:
  """Owns a block of memory while arrays refer to it."""

  __slots__ = ("__array_interface__", "_memory", "_pool")

  def __init__(self, pool: BufferPool, memory: _Memory, interface: dict[str, Any]):
    self._pool = pool
    self._memory = memory
    self.__array_interface__ = interface

  def __del__(self) -> None:
    self._pool._give_back(self._memory)


class BufferPool:
  """A pool of reusable memory for arrays of any shape.

  The pool is thread-safe. A copy made by pickling or a fork starts empty.
  """

  def __init__(self, max_free: int = 8):
    self._max_free = max_free
    self._empty()

  def _empty(self) -> None:
    self._pid = os.getpid()
    self._free: dict[int, collections.deque[_Memory]] = {}
    # The lock is re-entrant, because a lease may be garbage-collected while this thread holds it.
    self._lock = threading.RLock()
    self.made = 0

  def take(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Returns a page-aligned array that nothing else references; its content is arbitrary."""
    dtype = np.dtype(dtype)
    pages = -(-math.prod(shape) * dtype.itemsize // mmap.PAGESIZE)
    size = max(1, pages) * mmap.PAGESIZE
    if self._pid != os.getpid():
      self._empty()
    with self._lock:
      free = self._free.get(size)
      memory = free.pop() if free else None
      if memory is None:
        self.made += 1
    if memory is None:
      memory = _map(size)
    data = (memory.address, False)
    interface = {"version": 3, "data": data, "shape": shape, "typestr": dtype.str}
    return np.asarray(_Lease(self, memory, interface))

  def clear(self) -> None:
    """Frees the memory that is not in use."""
    with self._lock:
      for free in self._free.values():
        free.clear()

  def _give_back(self, memory: _Memory, *, getpid=os.getpid, deque=collections.deque) -> None:
    # Both names are bound as defaults, because at interpreter exit the globals of this module may
    # be gone before the last array.
    if self._pid != getpid():
      return
    with self._lock:
      free = self._free.setdefault(len(memory.pages), deque())
      if len(free) < self._max_free:
        free.append(memory)

  def __reduce__(self):
    return type(self), (self._max_free,)


def _map(size: int) -> _Memory:
  # The memory is private, so that a forked child writes only to its own copy.
  memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
  if size >= 1 << 21:
    # Huge pages save page faults and TLB misses, but not every kernel supports them.
    with contextlib.suppress(OSError, AttributeError):
      memory.madvise(mmap.MADV_HUGEPAGE)
  return _Memory(memory, np.frombuffer(memory, np.uint8, 1).ctypes.data)
