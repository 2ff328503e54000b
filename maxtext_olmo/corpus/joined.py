"""Several indexes whose files are read as one list.

    index A   x y z         joined   x y z w       A's numbers are kept
    index B   y w                    . 1 . 3       B's files by their numbers in the list

A file that several indexes have is in the list once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from maxtext_olmo.corpus import index as index_lib


@dataclasses.dataclass(frozen=True, eq=False)
class Joined:
  """The files of several indexes.

  Attributes:
    index: The first index, with the files of the others added; these have no instances.
    indexes: The indexes, by fingerprint; the first one first.
    numbers: For each index, by fingerprint, the number in the list of each of its files.
  """

  index: index_lib.OlmoNpyIndex
  indexes: Mapping[str, index_lib.OlmoNpyIndex]
  numbers: Mapping[str, np.ndarray]


def file_keys(index: index_lib.OlmoNpyIndex) -> list[tuple[str, int, int]]:
  """Returns what identifies each file of an index: its full path, size and first byte of data."""
  return [
      (index.resolve(i), index.expected_size(i), entry.data_offset)
      for i, entry in enumerate(index.files)
  ]


def join(indexes: Sequence[index_lib.OlmoNpyIndex]) -> Joined:
  """Joins indexes of one dtype and sequence length; those of one fingerprint count once."""
  first = indexes[0]
  by_fingerprint = {index.fingerprint: index for index in reversed(indexes)}
  by_fingerprint = {first.fingerprint: first, **dict(reversed(by_fingerprint.items()))}
  files = list(first.files)
  # A file that is twice in the first index keeps both numbers; others refer to the first of them.
  known = {key: i for i, key in reversed(list(enumerate(file_keys(first))))}
  numbers = {first.fingerprint: np.arange(len(files))}
  for fingerprint, index in by_fingerprint.items():
    if fingerprint in numbers:
      continue
    own = []
    for entry, key in zip(index.files, file_keys(index)):
      if key not in known:
        known[key] = len(files)
        end = first.total_instances
        files.append(dataclasses.replace(entry, path=key[0], n_instances=0, instance_offset=end))
      own.append(known[key])
    numbers[fingerprint] = np.array(own, np.int64)
  return Joined(dataclasses.replace(first, files=tuple(files)), by_fingerprint, numbers)
