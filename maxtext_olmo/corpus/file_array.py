"""Arrays in files, of which only the needed parts are read.

The arrays of orders, document indexes and consumed bitmaps may take gigabytes, and a batch needs
only a few of their values. They are read instead of memory-mapped: if a mapped file is truncated
while in use, SIGBUS kills the process, whereas a read raises an error that names the file and the
bytes.

Values are read in blocks, so that neighbouring values cost one read:

    places 9, 1, 8  →  blocks 0 and 2        (here, 4 values per block; by default, 512 bytes)

A small array is loaded completely when it is first used.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from maxtext_olmo import errors
from maxtext_olmo.corpus.storage import Storage


class FileArray:
  """A one-dimensional array in a file. It can be pickled and shared between threads.

  Args:
    storage: Storage that holds the file. It may keep the file open until the storage is closed.
    path: Path of the file.
    dtype: Dtype of the values, with byte order.
    offset: Byte offset of the first value.
    count: Length of the array.
    block_bytes: Number of bytes per block.
    load_up_to: Arrays of up to this many bytes are loaded completely.
  """

  def __init__(
      self,
      storage: Storage,
      path: str,
      dtype: str | np.dtype,
      offset: int,
      count: int,
      *,
      block_bytes: int = 512,
      load_up_to: int = 4 << 20,
  ):
    self._storage = storage
    self._paths = (path,)
    self._dtype = np.dtype(dtype)
    self._offset = offset
    self._count = count
    self._block_bytes = block_bytes
    self._load_up_to = load_up_to

  def __len__(self) -> int:
    return self._count

  def __getstate__(self) -> dict[str, Any]:
    return {name: value for name, value in self.__dict__.items() if name != "_loaded"}

  def __getitem__(self, places: np.ndarray) -> np.ndarray:
    """Returns the values at the given places; raises CorpusError if they cannot be read."""
    if places.size and not (0 <= places.min() and places.max() < self._count):
      raise errors.OrderError(
          f"{self._paths[0]} has {self._count} values, but places {places.min()} to"
          f" {places.max()} were requested."
      )
    if self._loaded is not None:
      return self._loaded.reshape(-1)[places]
    numbers, within = np.divmod(places, self._per_block)
    needed, which = np.unique(numbers, return_inverse=True)
    return self.blocks(needed)[which, within]

  def blocks(self, numbers: np.ndarray) -> np.ndarray:
    """Returns the blocks with the given indices, one per row.

    The last block of the array is padded with zeros.
    """
    return self._read(numbers) if self._loaded is None else self._loaded[numbers]

  @property
  def _per_block(self) -> int:
    return self._block_bytes // self._dtype.itemsize

  @functools.cached_property
  def _loaded(self) -> np.ndarray | None:
    """All blocks of a small array; None for a large one."""
    if self._count * self._dtype.itemsize > self._load_up_to:
      return None
    return self._read(np.arange(-(-self._count // self._per_block)))

  def _read(self, numbers: np.ndarray) -> np.ndarray:
    starts = numbers * self._block_bytes
    sizes = np.minimum(self._block_bytes, self._count * self._dtype.itemsize - starts)
    found = np.zeros(len(numbers) * self._block_bytes, np.uint8)
    self._storage.fill(
        self._paths,
        np.zeros(len(numbers), np.int64),
        self._offset + starts,
        sizes,
        found,
        np.arange(len(numbers)) * self._block_bytes,
    )
    return found.view(self._dtype).reshape(len(numbers), self._per_block)

  def ranges(self, firsts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns the values of several ranges, concatenated."""
    sizes = counts * self._dtype.itemsize
    found = np.zeros(int(sizes.sum()), np.uint8)
    self._storage.fill(
        self._paths,
        np.zeros(len(sizes), np.int64),
        self._offset + firsts * self._dtype.itemsize,
        sizes,
        found,
        np.cumsum(sizes) - sizes,
    )
    return found.view(self._dtype)

  def load(self) -> np.ndarray:
    """Returns the whole array."""
    size = self._count * self._dtype.itemsize
    return np.frombuffer(self._storage.read(self._paths[0], self._offset, size), self._dtype)
