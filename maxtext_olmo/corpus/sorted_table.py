"""Tables of records in a file, sorted by key, so that a lookup reads only a few blocks.

A record is a row of uint64 numbers. The first is its key, which may occur more than once:

    key     3   9   9  17  40         find(9)  →  records [1, 3)
    value   8   2   5   0   1         find(4)  →  records [1, 1): none

Keys are hashes. Sorting divides the records into 256 files by the highest byte of their keys,
divides a file that is still too large by the next byte, and sorts each file in memory. Memory use
therefore does not grow with the number of records.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from collections.abc import Iterable, Iterator

import numpy as np

from maxtext_olmo import atomic
from maxtext_olmo.corpus import file_array
from maxtext_olmo.corpus.storage import LocalStorage

_IN_MEMORY = 16 << 20  # Bytes of records that are sorted at once.
_FIRST_SHIFT = 56


class SortedTable:
  """A sorted table in a file; a lookup reads only the blocks that it needs.

  Args:
    numbers: Values of all records, record by record.
    width: Number of values per record.
  """

  def __init__(self, numbers: file_array.FileArray, width: int):
    self._numbers = numbers
    self._width = width

  def __len__(self) -> int:
    return len(self._numbers) // self._width

  def find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bounds [first, end) of the records with each key (int64)."""
    firsts = self._bisect(keys, right=False)
    return firsts, self._bisect(keys, right=True)

  def find_all(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns two arrays: for each match, the index of the key in `keys`, and of the record."""
    firsts, ends = self.find(keys)
    counts = ends - firsts
    which = np.repeat(np.arange(len(keys)), counts)
    before = np.cumsum(counts) - counts
    return which, firsts[which] + np.arange(len(which)) - before[which]

  def column(self, records: np.ndarray, column: int) -> np.ndarray:
    """Returns one column of the given records (uint64)."""
    return self._numbers[records * self._width + column]

  def _bisect(self, keys: np.ndarray, right: bool) -> np.ndarray:
    """Counts the records below each key; with `right`, also those equal to it."""
    low = np.zeros(len(keys), np.int64)
    high = np.full(len(keys), len(self), np.int64)
    while len(still := np.flatnonzero(low < high)):
      middle = (low[still] + high[still]) // 2
      found = self.column(middle, 0)
      before = found <= keys[still] if right else found < keys[still]
      low[still[before]] = middle[before] + 1
      high[still[~before]] = middle[~before]
    return low


def split_by(which: np.ndarray, values: np.ndarray, count: int) -> list[np.ndarray]:
  """Groups values by key.

  Args:
    which: Index of the key of each value, ascending.
    values: The values.
    count: Number of keys.
  """
  bounds = np.searchsorted(which, np.arange(1, count))
  return np.split(values, bounds) if count else []


def sort_records(
    blocks: Iterable[np.ndarray], folder: str, in_memory: int = _IN_MEMORY
) -> Iterator[np.ndarray]:
  """Yields the records of all blocks, sorted by key; equal keys keep their order.

  Args:
    blocks: Arrays of records (uint64, two dimensions).
    folder: Local directory for temporary files.
    in_memory: Number of bytes of records to sort in memory at once.
  """
  return _sorted(iter(blocks), folder, in_memory, _FIRST_SHIFT)


def _sorted(
    blocks: Iterator[np.ndarray], folder: str, in_memory: int, shift: int
) -> Iterator[np.ndarray]:
  """Sorts records whose keys differ only in their lowest `shift + 8` bits."""
  if shift < 0:  # All records have the same key.
    yield from blocks
    return
  taken: list[np.ndarray] = []
  for block in blocks:
    taken.append(block)
    if sum(one.nbytes for one in taken) > in_memory:
      break
  else:
    if taken:
      records = np.concatenate(taken)
      yield records[np.argsort(records[:, 0], kind="stable")]
    return
  with atomic.write_errors(folder), tempfile.TemporaryDirectory(dir=folder) as divided:
    width = taken[0].shape[1]
    _divide(itertools.chain(taken, blocks), divided, shift)
    del taken, block  # Frees memory: up to eight nested calls would hold such records.
    for name in sorted(os.listdir(divided), key=int):
      path = os.path.join(divided, name)
      yield from _sorted(_read(path, width), divided, in_memory, shift - 8)
      os.unlink(path)


def _divide(blocks: Iterable[np.ndarray], folder: str, shift: int) -> None:
  """Appends each record to the file that is named after one byte of its key."""
  with contextlib.ExitStack() as stack:
    files = {}
    for block in blocks:
      bytes_of = (block[:, 0] >> np.uint64(shift)).astype(np.uint8)
      order = np.argsort(bytes_of, kind="stable")
      present, starts = np.unique(bytes_of[order], return_index=True)
      for number, some in zip(present.tolist(), np.split(order, starts[1:])):
        if number not in files:
          path = os.path.join(folder, str(number))
          files[number] = stack.enter_context(open(path, "wb"))
        files[number].write(block[some].tobytes())


def _read(path: str, width: int) -> Iterator[np.ndarray]:
  # Each piece holds a whole number of records, whatever their width.
  for piece in LocalStorage().pieces(path, piece_bytes=(1 << 15) * 8 * width):
    yield np.frombuffer(piece, "<u8").reshape(-1, width)
