"""A table that maps the 64-bit key of a byte range to a file and an offset in it.

The table is a list of sorted runs. When the newest run reaches half the size of the run before it,
the two are merged. So adding n keys costs O(n log n), a lookup searches few runs, and a key takes
16 bytes:

    runs   |■■■■■■■■■■■■■■■■|■■■■■■|■■|   ← newest

Entries of dropped files are ignored, and the next merge of their run removes them. A merge keeps
only the newest place of each key.
"""

from __future__ import annotations

import numpy as np

# The low bits of a value are the place in a file, and the high bits are the number of the file.
_PLACE_BITS = 30
MAX_PLACE = 1 << _PLACE_BITS


class RangeTable:
  """Maps keys to places in numbered files; not thread-safe.

  >>> table = RangeTable()
  >>> table.add(7, np.array([30, 10], np.uint64), np.array([0, 64]))
  >>> files, places = table.find(np.array([10, 20], np.uint64))
  >>> files.tolist(), places.tolist()
  ([7, -1], [64, -1])
  """

  def __init__(self) -> None:
    self._files: set[int] = set()
    self._runs: list[tuple[np.ndarray, np.ndarray]] = []  # Sorted keys, and their values.

  def __len__(self) -> int:
    """Returns the number of entries, including those of dropped files that are still held."""
    return sum(len(keys) for keys, _ in self._runs)

  def add(self, file: int, keys: np.ndarray, places: np.ndarray) -> None:
    """Adds ranges of a file; keys that are already in the table get the new place.

    Args:
      file: Number of the file, not negative.
      keys: Keys of the ranges (uint64).
      places: Place of each range in the file, below `MAX_PLACE`.
    """
    self._files.add(file)
    if not len(keys):
      return
    order = np.argsort(keys, kind="stable")
    self._runs.append((keys[order], (file << _PLACE_BITS) + places[order].astype(np.int64)))
    while len(self._runs) > 1 and 2 * len(self._runs[-1][0]) >= len(self._runs[-2][0]):
      self._merge_newest()

  def drop(self, file: int) -> None:
    """Forgets the ranges of a file; its number must not be used again."""
    self._files.discard(file)

  def find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the file and the place of each key; -1 for a key that is not in the table."""
    files = np.full(len(keys), -1, np.int64)
    places = np.full(len(keys), -1, np.int64)
    open_keys = np.arange(len(keys))
    for run_keys, values in reversed(self._runs):
      if not len(open_keys):
        break
      at = np.searchsorted(run_keys, keys[open_keys], side="right") - 1
      found = at >= 0
      found[found] = run_keys[at[found]] == keys[open_keys[found]]
      value = values[at[found]]
      here, file = open_keys[found], value >> _PLACE_BITS
      alive = self._are_alive(file)
      files[here[alive]] = file[alive]
      places[here[alive]] = value[alive] & (MAX_PLACE - 1)
      open_keys = np.setdiff1d(open_keys, here[alive], assume_unique=True)
    return files, places

  def _merge_newest(self) -> None:
    (older_keys, older), (newer_keys, newer) = self._runs[-2:]
    keys, values = np.concatenate([older_keys, newer_keys]), np.concatenate([older, newer])
    alive = self._are_alive(values >> _PLACE_BITS)
    keys, values = keys[alive], values[alive]
    order = np.argsort(keys, kind="stable")
    keys, values = keys[order], values[order]
    # Among equal keys, the last is the newest.
    last = np.append(keys[1:] != keys[:-1], True)[: len(keys)]
    self._runs[-2:] = [(keys[last], values[last])]

  def _are_alive(self, files: np.ndarray) -> np.ndarray:
    numbers, inverse = np.unique(files, return_inverse=True)
    return np.array([number in self._files for number in numbers.tolist()], np.bool_)[inverse]
