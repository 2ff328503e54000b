"""Divides the text files of a corpus into units of work.

    files    small.txt   large.jsonl                        a.jsonl.gz   b.jsonl.gz
    slices   ├────────┤  ├───────┼────────┼────────┼────┤   ├────────┤   ├────────┤
    units    ├───────────────────┤├───────┤├───────┤├───────────────────┤├────────┤

The units depend on the files alone: on their paths, their sizes and their order.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from maxtext_olmo import english
from maxtext_olmo.corpus import scan
from maxtext_olmo.corpus import text_files
from maxtext_olmo.corpus import urls
from maxtext_olmo.corpus.storage import open_storage
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.errors import is_transient

SMALLEST_UNIT = 2 << 20
LARGEST_UNIT = 64 << 20
_UNITS = 256  # A corpus has at least this many, unless they would be too small.
_COMPRESSION = 4  # A typical ratio for text.


class TextFile(NamedTuple):
  """A text file as it was found.

  Attributes:
    path: Its path.
    size: Its size in bytes.
    groups: Size of each row group of a Parquet file; None for other files.
  """

  path: str
  size: int
  groups: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class TextSlice:
  """A range of a text file.

  Attributes:
    path: Path of the file.
    first: Where the range begins: a byte, or a row group of a Parquet file.
    end: Where the range ends; None for the end of the file.
  """

  path: str
  first: int = 0
  end: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class TextUnit:
  """Consecutive slices of the files of one label, tokenized together.

  Attributes:
    slices: The slices.
    weight: Number of bytes to read.
  """

  slices: tuple[TextSlice, ...]
  weight: int

  def __str__(self) -> str:
    first = self.slices[0]
    others = len(self.slices) - 1
    more = f" and {english.count(others, 'more file')}" if others else ""
    if not first.first:
      return f"{first.path}{more}"
    unit = "row group" if first.path.endswith(text_files.PARQUET) else "byte"
    return f"{first.path} from {unit} {first.first:,}{more}"

  @property
  def key(self) -> str:
    """A name that only a unit with the same slices has."""
    text = json.dumps([dataclasses.astuple(one) for one in self.slices])
    return hashlib.sha256(text.encode()).hexdigest()[:24]

  @property
  def inputs(self) -> tuple[str, ...]:
    """Paths of the files that the result depends on."""
    return tuple(dict.fromkeys(one.path for one in self.slices))


def examine_files(
    paths: Sequence[str], form: text_files.TextFormat
) -> tuple[list[TextFile | None], list[CorpusError]]:
  """Reads the beginning of each file, in threads.

  Returns:
    The files in the order of `paths`, None for each that cannot be used, and the errors of those.

  Raises:
    StoreUnavailableError: A store does not answer, so nothing is known about its files.
  """
  storage = open_storage()

  def examine(i: int) -> TextFile:
    path = paths[i]
    text_files.probe(path, form)
    groups = None
    if path.endswith(text_files.PARQUET):
      from maxtext_olmo.corpus import parquet_text

      groups = tuple(parquet_text.row_group_bytes(path))
    size = storage.size(path) if urls.is_url(path) else os.path.getsize(path)
    return TextFile(path, size, groups)

  found, errors = scan.map_files(examine, len(paths), workers=None)
  for error in errors:
    if is_transient(error):
      raise error
  return found, errors


def unit_bytes_for(total: int) -> int:
  """Returns the size of the units for a number of bytes, a power of 2.

  A larger corpus has larger units, up to a size that takes seconds to tokenize.

  >>> [unit_bytes_for(size) >> 20 for size in (0, 10**9, 10**10, 10**12)]
  [2, 4, 64, 64]
  """
  size = SMALLEST_UNIT
  while size < LARGEST_UNIT and size * _UNITS < total:
    size *= 2
  return size


def plan_units(
    files: Mapping[str, Sequence[TextFile]],
    form: text_files.TextFormat,
    unit_bytes: int | None = None,
) -> dict[str, list[TextUnit]]:
  """Returns the units of each label, in order.

  Args:
    files: label → files.
    form: How documents are found in them.
    unit_bytes: Size of a unit; by default, it depends on the total size.
  """
  if unit_bytes is None:
    unit_bytes = unit_bytes_for(sum(_weight(one) for some in files.values() for one in some))
  units: dict[str, list[TextUnit]] = {}
  for label, some in files.items():
    found = units.setdefault(label, [])
    slices: list[TextSlice] = []
    weight = 0
    for piece, size in (pair for one in some for pair in _slices(one, form, unit_bytes)):
      slices.append(piece)
      weight += size
      if weight >= unit_bytes:
        found.append(TextUnit(tuple(slices), weight))
        slices, weight = [], 0
    if slices:
      found.append(TextUnit(tuple(slices), weight))
  return units


def _weight(file: TextFile) -> int:
  if file.groups is not None:
    return sum(file.groups)
  return file.size * (_COMPRESSION if file.path.endswith(text_files.COMPRESSED) else 1)


def _slices(
    file: TextFile, form: text_files.TextFormat, unit_bytes: int
) -> list[tuple[TextSlice, int]]:
  """Returns the slices of a file, each with its size in bytes."""
  if file.groups is not None:
    return [(TextSlice(file.path, i, i + 1), size) for i, size in enumerate(file.groups)]
  if not form.can_split(file.path):
    return [(TextSlice(file.path), _weight(file))]
  firsts = range(0, max(1, file.size), unit_bytes)
  ends = [*firsts[1:], None]
  return [
      (TextSlice(file.path, first, end), (end or file.size) - first)
      for first, end in zip(firsts, ends)
  ]
