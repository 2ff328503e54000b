"""Joins several indexes into one list of files.

    index A   x y z         joined   x y z w       A's files keep their numbers
    index B   y w           numbers  1 3           the places of B's files in the joined list

A file that several indexes share is in the list once.
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
    index: First index, with the files of the other indexes appended as files without instances.
    indexes: All indexes by fingerprint, starting with the first one.
    numbers: For each index, by fingerprint, the places of its files in the joined list.
  """

  index: index_lib.OlmoNpyIndex
  indexes: Mapping[str, index_lib.OlmoNpyIndex]
  numbers: Mapping[str, np.ndarray]


def file_keys(index: index_lib.OlmoNpyIndex) -> list[tuple[str, int, int]]:
  """Returns the values that identify each file: its full path, size and data offset."""
  return [
      (index.resolve(i), index.expected_size(i), entry.data_offset)
      for i, entry in enumerate(index.files)
  ]


def join(indexes: Sequence[index_lib.OlmoNpyIndex]) -> Joined:
  """Joins indexes with the same dtype and sequence length.

  Several indexes with the same fingerprint count as one.
  """
  first = indexes[0]
  by_fingerprint = {index.fingerprint: index for index in reversed(indexes)}
  by_fingerprint = {first.fingerprint: first, **dict(reversed(by_fingerprint.items()))}
  files = list(first.files)
  # A file that occurs twice in the first index keeps both places; other indexes use the first one.
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
