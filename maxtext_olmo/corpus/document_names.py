"""Names of documents, the source file of each text, and the lookup of documents by name.

In a document index, the names are stored after the boundaries. For three documents:

    name_starts     0   6   6   12          the second has no name
    name_text       wiki-1wiki-7
    sources         0   none   0            index into the list of sources
    lines           1   -1   7
    source_starts   0   13
    source_text     wiki.jsonl.gz
    lookup          (hash of "wiki-7", 2), (hash of "wiki-1", 0)     sorted by hash

A lookup bisects the hashes, then compares the names that have the same hash. All arrays are read
as needed.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, NamedTuple

import numpy as np
import xxhash

from maxtext_olmo.corpus import boundaries
from maxtext_olmo.corpus import file_array
from maxtext_olmo.corpus import sorted_table
from maxtext_olmo.corpus.storage import LocalStorage
from maxtext_olmo.errors import CorpusError

_NO_SOURCE = np.iinfo(np.uint32).max
_REMEMBERED_SOURCES = 1 << 12
_AT_ONCE = 1 << 20  # Values to read or write at a time.
# Columns with one value per document. Each token file has a temporary file for each column.
_COLUMNS = {"name_sizes": "<u4", "sources": "<u4", "lines": "<i8", "keys": "<u8"}
_SOURCE_SIZES = "source_sizes"
# All temporary files of a token file, with the dtype of their numbers.
_SPOOLED = {**_COLUMNS, _SOURCE_SIZES: "<u4", "name_text": "u1", "source_text": "u1"}


class DocumentName(NamedTuple):
  """The name of a document and the source of its text.

  Attributes:
    name: Id of the document in the boundary file; empty if it has none.
    source: File that the text came from; empty if unknown.
    line: Line of the text in that file; None if unknown.
  """

  name: str
  source: str
  line: int | None

  @property
  def place(self) -> str:
    """Source and line as `source:line`; empty if the source is unknown."""
    return f"{self.source}:{self.line}" if self.source and self.line is not None else self.source


NO_NAME = DocumentName("", "", None)


@dataclasses.dataclass(frozen=True)
class NameSizes:
  """The sizes of the name arrays in a document index, and their checksum."""

  named: int
  name_bytes: int
  sources: int
  source_bytes: int
  checksum: str

  def layout(self, num_documents: int) -> tuple[tuple[str, int], ...]:
    """Returns the dtype and the length of each array, in file order."""
    return (
        ("<u8", num_documents + 1),
        ("<u1", self.name_bytes),
        ("<u4", num_documents),
        ("<i8", num_documents),
        ("<u8", self.sources + 1),
        ("<u1", self.source_bytes),
        ("<u8", 2 * self.named),
    )


class DocumentNames:
  """Reads the names in a document index.

  Args:
    path: Path of the document index, for errors.
    arrays: Arrays of the names, in the order of `NameSizes.layout`.
  """

  def __init__(self, path: str, arrays: Sequence[file_array.FileArray]):
    self._path = path
    self._name_starts, self._name_text, self._sources, self._lines = arrays[:4]
    self._source_starts, self._source_text = arrays[4:6]
    self._lookup = sorted_table.SortedTable(arrays[6], 2)

  def describe(self, documents: np.ndarray) -> list[DocumentName]:
    """Returns the name and the source of each document."""
    names = self._texts(self._name_starts, self._name_text, documents)
    numbers = self._sources[documents]
    known = np.flatnonzero(numbers != _NO_SOURCE)
    sources = [""] * len(documents)
    distinct, which = np.unique(numbers[known], return_inverse=True)
    texts = self._texts(self._source_starts, self._source_text, distinct.astype(np.int64))
    for place, source in zip(known.tolist(), which.tolist()):
      sources[place] = texts[source]
    lines = self._lines[documents].tolist()
    return [
        DocumentName(name, source, line if line >= 0 else None)
        for name, source, line in zip(names, sources, lines)
    ]

  def find(self, names: Sequence[str]) -> list[np.ndarray]:
    """Returns, for each name, the documents that have it, in ascending order."""
    # A name from the command line may contain lone surrogates, which no stored name has.
    keys = [xxhash.xxh3_64_intdigest(name.encode(errors="surrogatepass")) for name in names]
    which, records = self._lookup.find_all(np.array(keys, np.uint64))
    numbers = self._lookup.column(records, 1)
    if numbers.size and numbers.max() >= len(self._sources):
      raise self._damaged(f"a name refers to document {numbers.max()}, which does not exist")
    documents = numbers.astype(np.int64)
    # Different names may have the same hash, so the names themselves are compared.
    texts = self._texts(self._name_starts, self._name_text, documents)
    same = np.array([names[i] == text for i, text in zip(which.tolist(), texts)], np.bool_)
    return sorted_table.split_by(which[same], documents[same], len(names))

  def _texts(
      self, starts: file_array.FileArray, text: file_array.FileArray, numbers: np.ndarray
  ) -> list[str]:
    if numbers.size and not numbers.max() + 1 < len(starts):
      raise self._damaged(f"entry {numbers.max()} does not exist")
    bounds = starts[np.stack([numbers, numbers + 1])].astype(np.int64)
    sizes = bounds[1] - bounds[0]
    if bounds.size and (bounds.min() < 0 or bounds.max() > len(text) or sizes.min() < 0):
      raise self._damaged("a name lies outside its text")
    ends = np.cumsum(sizes)
    data = text.ranges(bounds[0], sizes).tobytes()
    try:
      return [data[end - size : end].decode() for end, size in zip(ends.tolist(), sizes.tolist())]
    except UnicodeDecodeError as error:
      raise self._damaged(f"a name is not UTF-8 text ({error})") from error

  def _damaged(self, what: str) -> CorpusError:
    return CorpusError(
        f"The names in the document index {self._path} are damaged: {what}. Build it again with"
        " `maxtext-olmo index documents`."
    )


class NameSpool:
  """Stores the document names of one token file in temporary files until all files are read."""

  def __init__(self, folder: str, number: int):
    self._folder, self._number = folder, number
    self._files: dict[str, IO[bytes]] = {}
    self._numbers: dict[str, int] = {}
    self.num_sources = 0
    self.named = 0

  def __enter__(self) -> NameSpool:
    return self

  def __exit__(self, *_) -> None:
    for file in self._files.values():
      file.close()

  def add(self, some: boundaries.Boundaries) -> None:
    """Adds the names of the next documents."""
    texts = [name.encode() for name in some.names]
    self.named += len(texts) - texts.count(b"")
    self._write("name_text", b"".join(texts))
    self._write("name_sizes", np.fromiter(map(len, texts), "<u4", len(texts)))
    keys = np.fromiter(map(xxhash.xxh3_64_intdigest, texts), "<u8", len(texts))
    self._write("keys", keys)
    self._write("lines", some.lines.astype("<i8"))
    numbers = [self._source(source) for source in some.sources]
    self._write("sources", np.array(numbers, "<u4"))

  def _source(self, source: str) -> int:
    """Returns the index of a source in the list of sources, and adds the source if it is new.

    To limit memory, old sources are forgotten; a source that occurs again is then listed twice.
    """
    if not source:
      return _NO_SOURCE
    number = self._numbers.get(source)
    if number is None:
      if len(self._numbers) >= _REMEMBERED_SOURCES:
        self._numbers.clear()
      number = self._numbers[source] = self.num_sources
      self.num_sources += 1
      text = source.encode()
      self._write("source_text", text)
      self._write(_SOURCE_SIZES, np.array([len(text)], "<u4"))
    return number

  def _write(self, column: str, data: bytes | np.ndarray) -> None:
    if column not in self._files:
      path = _spool_path(self._folder, self._number, column)
      self._files[column] = open(path, "wb")  # noqa: SIM115 - closed by __exit__
    self._files[column].write(data if isinstance(data, bytes) else data.tobytes())


def spooled_columns(folder: str, number: int) -> dict[str, np.ndarray]:
  """Returns the temporary files of a token file as arrays; they stay valid if it is removed."""
  return {
      column: np.memmap(_spool_path(folder, number, column), dtype, "r")
      for column, dtype in _SPOOLED.items()
      if _spooled(folder, number, column)
  }


def restore_columns(folder: str, number: int, columns: Mapping[str, np.ndarray]) -> None:
  """Writes the temporary files of a token file from the arrays of `spooled_columns`."""
  for column in columns.keys() & _SPOOLED.keys():
    with open(_spool_path(folder, number, column), "wb") as file:
      file.write(columns[column].data)


def write_names(
    folder: str, counts: Sequence[int], named: int, put: Callable[[np.ndarray], None]
) -> NameSizes:
  """Writes the names of all files as the arrays that `NameSizes.layout` describes.

  Args:
    folder: Directory of the temporary files that `NameSpool` wrote.
    counts: Number of documents of each file.
    named: Number of documents that have a name.
    put: Function that writes an array.

  Returns:
    The sizes of the arrays, with an empty checksum.
  """
  files = range(len(counts))
  columns = {name: lambda i, name=name: _numbers(folder, i, name, counts[i]) for name in _COLUMNS}
  sources = [_spooled(folder, i, _SOURCE_SIZES) // 4 for i in files]
  if sum(sources) >= _NO_SOURCE:
    raise CorpusError(
        f"The boundary files name {sum(sources)} sources; a document index holds fewer than"
        f" {_NO_SOURCE}. Build an index for each part of the corpus."
    )
  sizes = NameSizes(
      named,
      sum(_spooled(folder, i, "name_text") for i in files),
      sum(sources),
      sum(_spooled(folder, i, "source_text") for i in files),
      "",
  )
  _put_starts(put, (block for i in files for block in columns["name_sizes"](i)))
  _put_text(put, folder, len(counts), "name_text")
  for i, before in zip(files, np.cumsum([0, *sources]).tolist()):
    for block in columns["sources"](i):
      put(np.where(block == _NO_SOURCE, block, block + np.uint32(before)).astype("<u4"))
  for i in files:
    for block in columns["lines"](i):
      put(block)
  _put_starts(put, (block for i in files for block in _read(folder, i, _SOURCE_SIZES, "<u4")))
  _put_text(put, folder, len(counts), "source_text")
  for records in sorted_table.sort_records(_records(folder, counts), folder):
    put(records)
  return sizes


def _records(folder: str, counts: Sequence[int]) -> Iterator[np.ndarray]:
  """Yields blocks of rows (hash of the name, document), one row per named document."""
  document = 0
  for i, count in enumerate(counts):
    place = document
    for keys, sizes in zip(
        _read(folder, i, "keys", "<u8"), _read(folder, i, "name_sizes", "<u4"), strict=True
    ):
      records = np.stack([keys, np.arange(place, place + len(keys), dtype=np.uint64)], axis=1)
      place += len(keys)
      yield records[sizes > 0].astype("<u8")
    document += count


def _put_starts(put: Callable[[np.ndarray], None], blocks: Iterator[np.ndarray]) -> None:
  """Writes the start of each text, and the end of the last one, from blocks of text sizes."""
  end = np.uint64(0)
  put(np.array([end], "<u8"))
  for block in blocks:
    ends = end + np.cumsum(block, dtype=np.uint64)
    put(ends.astype("<u8"))
    end = ends[-1]


def _put_text(put: Callable[[np.ndarray], None], folder: str, num_files: int, column: str) -> None:
  for i in range(num_files):
    if _spooled(folder, i, column):
      for piece in LocalStorage().pieces(_spool_path(folder, i, column)):
        put(np.frombuffer(piece, np.uint8))


def _numbers(folder: str, number: int, column: str, count: int) -> Iterator[np.ndarray]:
  """Yields the values of a column for one token file, or defaults if the file has no names."""
  if count and not _spooled(folder, number, column):
    none = {"sources": _NO_SOURCE, "lines": -1}.get(column, 0)
    for first in range(0, count, _AT_ONCE):
      yield np.full(min(_AT_ONCE, count - first), none, _COLUMNS[column])
    return
  yield from _read(folder, number, column, _COLUMNS[column])


def _read(folder: str, number: int, column: str, dtype: str) -> Iterator[np.ndarray]:
  if _spooled(folder, number, column):
    piece_bytes = _AT_ONCE * np.dtype(dtype).itemsize
    path = _spool_path(folder, number, column)
    for piece in LocalStorage().pieces(path, piece_bytes=piece_bytes):
      yield np.frombuffer(piece, dtype)


def _spooled(folder: str, number: int, column: str) -> int:
  """Returns the size in bytes of a column's temporary file; 0 if there is none."""
  path = _spool_path(folder, number, column)
  return os.path.getsize(path) if os.path.exists(path) else 0


def _spool_path(folder: str, number: int, column: str) -> str:
  return os.path.join(folder, f"{number}.{column}")
