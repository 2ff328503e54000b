"""Exclusions: a file that lists tokens to leave out of the loss.

The file has one JSON object per line; empty lines and lines that begin with `#` are ignored:

    {"label": "wikipedia"}                             all files of a label
    {"file": "wiki/part-3.npy"}                        a file, by its path or the end of its path
    {"file": "wiki/part-3.npy", "bytes": [4096, 8192]}   bytes of a file, the end not included
    {"rows": [17, 19]}                                 windows of the index, the end not included
    {"document": 12}                                   a document, by number in the document index
    {"document": "wiki-417"}                           the documents with this name
    {"hash": "5e1b…"}                                  the documents with this hash of their tokens

Each line becomes token ranges of files. A row is also a list of token ranges, so its excluded
tokens are the intersection of both, for any row source, packing and epoch. Excluded tokens stay in
their rows as context and are only left out of the loss:

    excluded, in the tokens of all files       ......XXXX.........XX....
    a part of a row                              [---------)
    loss on its tokens                           1111000011

Memory grows with the list, not with the corpus.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from maxtext_olmo import errors
from maxtext_olmo.corpus import document_hashes
from maxtext_olmo.corpus import documents as documents_lib
from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.corpus import paths
from maxtext_olmo.corpus.storage import Storage
from maxtext_olmo.corpus.storage import open_storage
from maxtext_olmo.rows import parts as parts_lib
from maxtext_olmo.rows import segments

_FORMS = "label, file, file with bytes, rows, document, hash"


@dataclasses.dataclass(frozen=True, eq=False)
class Exclusions:
  """Ranges of excluded tokens. Tokens are numbered consecutively over all files.

  Attributes:
    file_starts: Number of the first token of each file (int64).
    firsts: First token of each range, ascending (int64).
    ends: Token after the last token of each range (int64). Ranges neither overlap nor touch.
  """

  file_starts: np.ndarray
  firsts: np.ndarray
  ends: np.ndarray

  @classmethod
  def of_ranges(
      cls, file_tokens: Sequence[int], ranges: Iterable[tuple[int, int, int]]
  ) -> Exclusions:
    """Makes exclusions from ranges.

    Args:
      file_tokens: Number of tokens of each file.
      ranges: `(file, first, end)` ranges in any order, which may overlap.
    """
    starts = np.concatenate([[0], np.cumsum(file_tokens)]).astype(np.int64)
    listed = np.array(list(ranges), np.int64).reshape(-1, 3)
    firsts, ends = (np.sort(starts[listed[:, 0]] + listed[:, column]) for column in (1, 2))
    # Firsts and ends can be sorted separately: there is a gap after the k-th end if and only if the
    # (k + 1)-th first is larger than that end.
    gaps = np.flatnonzero(firsts[1:] > ends[:-1])
    return cls(
        starts[:-1],
        firsts[np.concatenate([[0], gaps + 1]).astype(np.int64)[: len(firsts)]],
        ends[np.concatenate([gaps, [len(ends) - 1]]).astype(np.int64)[: len(ends)]],
    )

  @functools.cached_property
  def digest(self) -> str:
    """A digest of the excluded ranges, which the history of a run records."""
    return hashlib.sha256(self.firsts.tobytes() + self.ends.tobytes()).hexdigest()[:16]

  @property
  def num_tokens(self) -> int:
    """The number of excluded tokens."""
    return int((self.ends - self.firsts).sum())

  def loss_bits(self, parts: parts_lib.Parts, length: int) -> np.ndarray:
    """Returns one bit per token, 0 for excluded tokens, packed into words (rows, words)."""
    return segments.pack_bits(~self.excluded(parts, length))

  def excluded(self, parts: parts_lib.Parts, length: int) -> np.ndarray:
    """Returns whether each token of each row is excluded (rows, length)."""
    first = self.file_starts[parts.source] + parts.first
    end = first + parts.count
    low = np.searchsorted(self.ends, first, side="right")
    count = np.searchsorted(self.firsts, end, side="left") - low
    steps = np.zeros(parts.num_rows * length + 1, np.int8)
    part = np.repeat(np.arange(len(first)), count)
    if len(part):
      # `part` and `listed` have one entry for each pair of a part and a range that overlap.
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
    path: Path of the file.
    index: Index of the corpus whose files, labels and windows the lines name.
    documents: Function that opens the document index; called if a line names documents.
    storage: Storage that holds the file; local files by default.

  Raises:
    ConfigError: A line cannot be parsed, or names something that the corpus does not have.
  """
  storage = open_storage() if storage is None else storage
  names = _Names(index)
  ranges: list[tuple[int, int, int]] = []
  of_documents: list[_Line] = []
  try:
    lines = storage.read(path).decode().splitlines()
  except UnicodeDecodeError as error:
    raise errors.ConfigError(f"olmo_exclude: {path} is not UTF-8 text ({error}).") from error
  for number, text in enumerate(lines, 1):
    if not text.strip() or text.lstrip().startswith("#"):
      continue
    line = _Line(path, number, text)
    with line.errors():
      value = json.loads(text)
      if isinstance(value, dict) and (value.keys() == {"document"} or value.keys() == {"hash"}):
        of_documents.append(dataclasses.replace(line, value=value))
      else:
        ranges += names.ranges(value)
  if of_documents:
    with of_documents[0].errors():
      if documents is None:
        raise ValueError("a line can name documents only if there is a document index.")
    ranges += _document_ranges(of_documents, documents())
  return Exclusions.of_ranges([entry.n_tokens for entry in index.files], ranges)


@dataclasses.dataclass(frozen=True)
class _Line:
  """A line of a file of exclusions."""

  path: str
  number: int
  text: str
  value: Any = None

  @contextlib.contextmanager
  def errors(self) -> Iterator[None]:
    """Turns an error in the block into a ConfigError that names the line."""
    try:
      yield
    except (ValueError, TypeError, RecursionError) as error:
      if isinstance(error, errors.MaxtextOlmoError):
        raise
      raise errors.ConfigError(
          f"olmo_exclude: line {self.number} of {self.path}, {self.text[:200]!r}, cannot be used:"
          f" {error}"
      ) from error


def _document_ranges(
    lines: list[_Line], documents: documents_lib.DocumentIndex
) -> list[tuple[int, int, int]]:
  """Returns the token ranges of the documents that the lines name.

  All hashes are looked up at once, and so are all names.
  """
  names: list[tuple[_Line, str]] = []
  hashes: list[tuple[_Line, str]] = []
  found: list[np.ndarray] = []
  for line in lines:
    (kind, value), *_ = line.value.items()
    with line.errors():
      if kind == "hash":
        hashes.append((line, document_hashes.check_hash(value)))
      elif isinstance(value, str):
        names.append((line, value))
      elif type(value) is int and 0 <= value < documents.num_documents:
        found.append(np.array([value]))
      else:
        raise ValueError(
            f"expected a document number from 0 to {documents.num_documents - 1}, or a name."
        )
  if hashes:
    with hashes[0][0].errors():
      found += documents.find_hashes([text for _, text in hashes])
    _check_found(hashes, found[-len(hashes) :], "hash", "")
  if names:
    found += documents.find_names([text for _, text in names])
    _check_found(names, found[-len(names) :], "name", documents.example_of_a_name)
  numbers = np.unique(np.concatenate(found))
  files, firsts = documents.locate(numbers)
  ends = firsts + documents.lengths(numbers)
  return [
      (file, first, end)
      for file, first, end in zip(files.tolist(), firsts.tolist(), ends.tolist())
      if first < end
  ]


def _check_found(
    lines: list[tuple[_Line, str]], found: list[np.ndarray], what: str, example: str
) -> None:
  for (line, text), documents in zip(lines, found, strict=True):
    with line.errors():
      if not documents.size:
        raise ValueError(f"no document has the {what} {text!r}.{example}")


class _Names:
  """Finds the token ranges that a line names."""

  def __init__(self, index: index_lib.OlmoNpyIndex):
    self._index = index

  def ranges(self, line: Any) -> list[tuple[int, int, int]]:
    kind = sorted(line) if isinstance(line, dict) else None
    if kind == ["label"]:
      return self._files(self._labels.get(line["label"]), f"label {line['label']!r}")
    if kind == ["file"]:
      return self._files(self._find(line["file"]), f"file {line['file']!r}")
    if kind == ["bytes", "file"]:
      whole = self._files(self._find(line["file"]), f"file {line['file']!r}")
      return [self._bytes(file, *_pair(line["bytes"])) for file, _, _ in whole]
    if kind == ["rows"]:
      return self._rows(*_pair(line["rows"]))
    raise ValueError(f"expected one of these forms: {_FORMS}.")

  def _files(self, numbers: list[int] | None, what: str) -> list[tuple[int, int, int]]:
    if not numbers:
      raise ValueError(f"the index has no {what}.")
    return [(file, 0, self._index.files[file].n_tokens) for file in numbers]

  @functools.cached_property
  def _labels(self) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for number, entry in enumerate(self._index.files):
      found.setdefault(entry.label, []).append(number)
    return found

  @functools.cached_property
  def _paths(self) -> list[str]:
    return [self._index.resolve(number) for number in range(len(self._index.files))]

  def _find(self, name: Any) -> list[int]:
    """Returns the entries of the file whose path is `name` or, if none is, ends with `name`."""
    if not isinstance(name, str):
      raise ValueError(f"expected the path of a file, found {name!r}.")
    exact = [number for number, entry in enumerate(self._index.files) if entry.path == name]
    # An index may list a file several times.
    found = exact or paths.find(self._paths, name)
    if len(distinct := sorted({self._paths[number] for number in found})) > 1:
      raise ValueError(
          f"{len(distinct)} paths of the index end with {name!r}: give a longer path, such as"
          f" {distinct[0]!r}."
      )
    return found

  def _bytes(self, file: int, first: int, end: int) -> tuple[int, int, int]:
    entry, width = self._index.files[file], self._index.token_dtype.itemsize
    size = entry.data_offset + entry.n_tokens * width
    if not entry.data_offset <= first < end <= size:
      raise ValueError(f"the tokens of this file are in bytes {entry.data_offset} to {size}.")
    return file, (first - entry.data_offset) // width, -(-(end - entry.data_offset) // width)

  def _rows(self, first: int, end: int) -> list[tuple[int, int, int]]:
    total, length = self._index.total_instances, self._index.sequence_length
    if not 0 <= first < end <= total:
      raise ValueError(f"the index has {total} rows: expected 0 <= first < end <= {total}.")
    found = []
    for number, entry in enumerate(self._index.files):
      low = max(first, entry.instance_offset) - entry.instance_offset
      high = min(end, entry.instance_offset + entry.n_instances) - entry.instance_offset
      if low < high:
        found.append((number, low * length, high * length))
    return found


def _pair(value: Any) -> tuple[int, int]:
  if not isinstance(value, list) or len(value) != 2 or any(type(one) is not int for one in value):
    raise ValueError(f"expected a pair of whole numbers, found {value!r}.")
  return value[0], value[1]
