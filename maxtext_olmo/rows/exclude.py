"""Exclusions: tokens that no loss is taken on, listed in a file.

The file has one JSON object per line; empty lines and lines that begin with `#` are ignored:

    {"label": "wikipedia"}                             all files of a label
    {"file": "wiki/part-3.npy"}                        a file, as the index names it
    {"file": "wiki/part-3.npy", "bytes": [4096, 8192]}   some of its bytes, the end not included
    {"rows": [17, 19]}                                 windows of the index, the end not included
    {"document": 12}                                   a document, by its number in its index

Each line becomes ranges of tokens of files. A row is a list of ranges of files too, so what they
have in common is an intersection, whatever the row source, the packing and the epoch. Tokens of an
excluded range stay in their rows as context; only the loss on them is gone:

    excluded, in the tokens of all files       ......XXXX.........XX....
    a part of a row                              [---------)
    loss on its tokens                            11110000 1

Memory grows with the list, not with the corpus.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from maxtext_olmo import errors
from maxtext_olmo.corpus import documents as documents_lib
from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.corpus.storage import LocalStorage
from maxtext_olmo.corpus.storage import Storage
from maxtext_olmo.rows import parts as parts_lib
from maxtext_olmo.rows import segments

_FORMS = "label, file, file with bytes, rows, document"


@dataclasses.dataclass(frozen=True, eq=False)
class Exclusions:
  """Ranges of tokens, counted over all files one after another.

  Attributes:
    file_starts: Where the tokens of each file begin in that count (int64).
    firsts: The first token of each range, ascending (int64).
    ends: The token after the last; ranges neither overlap nor touch.
  """

  file_starts: np.ndarray
  firsts: np.ndarray
  ends: np.ndarray

  @classmethod
  def of_ranges(
      cls, file_tokens: Sequence[int], ranges: Iterable[tuple[int, int, int]]
  ) -> Exclusions:
    """Makes exclusions of `(file, first, end)` ranges in any order, which may overlap.

    Args:
      file_tokens: Tokens of each file.
    """
    starts = np.concatenate([[0], np.cumsum(file_tokens)]).astype(np.int64)
    listed = np.array(list(ranges), np.int64).reshape(-1, 3)
    firsts, ends = (np.sort(starts[listed[:, 0]] + listed[:, column]) for column in (1, 2))
    # Sorted separately, the k-th end and the start after it delimit a gap, or overlap.
    gaps = np.flatnonzero(firsts[1:] > ends[:-1])
    return cls(
        starts[:-1],
        firsts[np.concatenate([[0], gaps + 1]).astype(np.int64)[: len(firsts)]],
        ends[np.concatenate([gaps, [len(ends) - 1]]).astype(np.int64)[: len(ends)]],
    )

  @functools.cached_property
  def digest(self) -> str:
    """Identifies the excluded tokens, for the history of a run."""
    return hashlib.sha256(self.firsts.tobytes() + self.ends.tobytes()).hexdigest()[:16]

  @property
  def num_tokens(self) -> int:
    """How many tokens are excluded."""
    return int((self.ends - self.firsts).sum())

  def loss_bits(self, parts: parts_lib.Parts, length: int) -> np.ndarray:
    """Returns a bit per token of some rows, 0 where it is excluded, as words (rows, words)."""
    return segments.pack_bits(~self.excluded(parts, length))

  def excluded(self, parts: parts_lib.Parts, length: int) -> np.ndarray:
    """Returns whether each token of some rows is excluded (rows, length)."""
    first = self.file_starts[parts.source] + parts.first
    end = first + parts.count
    low = np.searchsorted(self.ends, first, side="right")
    count = np.searchsorted(self.firsts, end, side="left") - low
    steps = np.zeros(parts.num_rows * length + 1, np.int8)
    part = np.repeat(np.arange(len(first)), count)
    if len(part):
      # One line for each range that a part has in common with the list.
      before = np.cumsum(count) - count
      listed = low[part] + np.arange(len(part)) - before[part]
      place = parts.row[part].astype(np.int64) * length + parts.column[part] - first[part]
      np.add.at(steps, place + np.maximum(self.firsts[listed], first[part]), 1)
      np.add.at(steps, place + np.minimum(self.ends[listed], end[part]), -1)
    return np.cumsum(steps[:-1], dtype=np.int8).astype(np.bool_).reshape(-1, length)


def read_exclusions(
    path: str,
    index: index_lib.OlmoNpyIndex,
    *,
    documents: Callable[[], documents_lib.DocumentIndex] | None = None,
    storage: Storage | None = None,
) -> Exclusions:
  """Reads a file of exclusions.

  Args:
    index: The corpus whose files, labels and windows the lines name.
    documents: Opens the document index, for lines that name documents.
    storage: Where the file is read from; local files unless given.

  Raises:
    ConfigError: A line names something that the corpus does not have, or cannot be understood.
  """
  storage = LocalStorage() if storage is None else storage
  names = _Names(index, documents)
  ranges: list[tuple[int, int, int]] = []
  try:
    lines = storage.read(path).decode().splitlines()
  except UnicodeDecodeError as error:
    raise errors.ConfigError(f"olmo_exclude: {path} is not UTF-8 text ({error}).") from error
  for number, line in enumerate(lines, 1):
    if not line.strip() or line.lstrip().startswith("#"):
      continue
    try:
      ranges += names.ranges(json.loads(line))
    except (ValueError, TypeError, RecursionError) as error:
      raise errors.ConfigError(
          f"olmo_exclude: line {number} of {path}, {line[:200]!r}, cannot be used: {error}"
      ) from error
  return Exclusions.of_ranges([entry.n_tokens for entry in index.files], ranges)


class _Names:
  """Finds the token ranges of what a line names."""

  def __init__(
      self,
      index: index_lib.OlmoNpyIndex,
      documents: Callable[[], documents_lib.DocumentIndex] | None,
  ):
    self._index = index
    self._open_documents = None if documents is None else functools.cache(documents)

  def ranges(self, line: Any) -> list[tuple[int, int, int]]:
    kind = sorted(line) if isinstance(line, dict) else None
    if kind == ["label"]:
      return self._files(self._labels, line["label"], "label")
    if kind == ["file"]:
      return self._files(self._paths, line["file"], "file")
    if kind == ["bytes", "file"]:
      whole = self._files(self._paths, line["file"], "file")
      return [self._bytes(file, *_pair(line["bytes"])) for file, _, _ in whole]
    if kind == ["rows"]:
      return self._rows(*_pair(line["rows"]))
    if kind == ["document"]:
      return [self._document(line["document"])]
    raise ValueError(f"expected one of these forms: {_FORMS}.")

  def _files(self, known: dict[str, list[int]], name: Any, what: str) -> list[tuple[int, int, int]]:
    if name not in known:
      raise ValueError(f"the index has no {what} {name!r}.")
    return [(file, 0, self._index.files[file].n_tokens) for file in known[name]]

  @functools.cached_property
  def _labels(self) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for number, entry in enumerate(self._index.files):
      found.setdefault(entry.label, []).append(number)
    return found

  @functools.cached_property
  def _paths(self) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for number, entry in enumerate(self._index.files):
      for name in {entry.path, self._index.resolve(number)}:
        found.setdefault(name, []).append(number)
    return found

  def _bytes(self, file: int, first: int, end: int) -> tuple[int, int, int]:
    entry, width = self._index.files[file], self._index.token_dtype.itemsize
    size = entry.data_offset + entry.n_tokens * width
    if not entry.data_offset <= first < end <= size:
      raise ValueError(f"the tokens of this file are bytes {entry.data_offset} to {size}.")
    return file, (first - entry.data_offset) // width, -(-(end - entry.data_offset) // width)

  def _rows(self, first: int, end: int) -> list[tuple[int, int, int]]:
    total, length = self._index.total_instances, self._index.sequence_length
    if not 0 <= first < end <= total:
      raise ValueError(f"the index has rows 0 to {total}.")
    found = []
    for number, entry in enumerate(self._index.files):
      low = max(first, entry.instance_offset) - entry.instance_offset
      high = min(end, entry.instance_offset + entry.n_instances) - entry.instance_offset
      if low < high:
        found.append((number, low * length, high * length))
    return found

  def _document(self, document: Any) -> tuple[int, int, int]:
    if self._open_documents is None:
      raise ValueError("documents can be named only where there is a document index.")
    documents = self._open_documents()
    if type(document) is not int or not 0 <= document < documents.num_documents:
      raise ValueError(f"documents are numbered from 0 to {documents.num_documents - 1}.")
    files, firsts = documents.locate(np.array([document]))
    length = int(documents.lengths(np.array([document]))[0])
    return int(files[0]), int(firsts[0]), int(firsts[0]) + length


def _pair(value: Any) -> tuple[int, int]:
  if not isinstance(value, list) or len(value) != 2 or any(type(one) is not int for one in value):
    raise ValueError(f"expected a pair of whole numbers, found {value!r}.")
  return value[0], value[1]
