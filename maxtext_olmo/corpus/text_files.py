"""Reads the documents of text files: plain text, JSON lines and Parquet.

    notes.txt, README             one document, or several with a separator line between them
    web.jsonl, web.ndjson         a document per line, in a field of a JSON object
    web.jsonl.gz, notes.txt.zst   the same, compressed with gzip or Zstandard
    web.parquet                   a document per row, in a column

Large files are read in ranges, so that several processes can share one. A range of bytes begins
with the first line (or, with separators, the first separator) that starts in it, and ends where the
next range begins. A range of a Parquet file is a range of its row groups. Compressed files are read
whole.
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple, cast

from maxtext_olmo.corpus import piece_reader
from maxtext_olmo.corpus import urls
from maxtext_olmo.corpus.storage import byte_stream
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError

COMPRESSED = (".gz", ".zst")
PARQUET = ".parquet"
JSON_SUFFIXES = tuple(f"{kind}{end}" for kind in (".jsonl", ".ndjson") for end in ("", *COMPRESSED))
_LONGEST_NAME = 1000
_PROBE_BYTES = 1 << 16
_ZSTD_BYTES = 1 << 16
_LARGEST_ZSTD_WINDOW = 1 << 31


class TextDocument(NamedTuple):
  """The text of a document, with its name and source.

  Attributes:
    text: Text of the document.
    name: Name of the document; empty if it has none.
    source: File that the text came from; empty if unknown.
    line: First line of the text in that file, counted from 1; None if unknown.
  """

  text: str
  name: str = ""
  source: str = ""
  line: int | None = None


@dataclasses.dataclass(frozen=True)
class TextFormat:
  """How documents are found in text files.

  Attributes:
    separator: Line that separates the documents of a plain text file; "" stands for a blank line.
      None makes each file one document.
    text_field: Field of a JSON line, or column of a Parquet file, that contains the text.
    id_field: Field or column that contains the document's id, a short string or an integer.
  """

  separator: str | None = None
  text_field: str = "text"
  id_field: str = "id"

  def can_split(self, path: str) -> bool:
    """Returns whether ranges of bytes of a file can be read."""
    if path.endswith((PARQUET, *COMPRESSED)):
      return False
    return path.endswith(JSON_SUFFIXES) or self.separator is not None


class DocumentReader:
  """Reads the documents of a file, or of a range of it.

  Iterating yields a `TextDocument` without a source for each document. Its name is empty unless the
  document has an id, and its line is counted from the start of the range.

  Args:
    path: Path of the file.
    form: How documents are found in it.
    first: Where the range begins: a byte, or a row group of a Parquet file.
    end: Where the range ends; None for the end of the file.

  Attributes:
    lines: Number of lines (rows of a Parquet file) that were read.
  """

  def __init__(self, path: str, form: TextFormat, first: int = 0, end: int | None = None):
    self.lines = 0
    self._path = path
    self._form = form
    self._first = first
    self._end = end

  def __iter__(self) -> Iterator[TextDocument]:
    path, form = self._path, self._form
    with _read_errors(path):
      if path.endswith(PARQUET):
        yield from self._parquet_documents()
        return
      with open_bytes(path) as file:
        if path.endswith(JSON_SUFFIXES):
          yield from self._json_documents(self._lines(file, lambda line: True))
        elif form.separator is None:
          yield TextDocument(file.read().decode(), line=1)
        else:
          yield from self._separated_documents(file, form.separator.strip())

  def _lines(self, file: IO[bytes], begins: Callable[[str], bool]) -> Iterator[str]:
    """Yields the lines of the range, and counts them.

    Args:
      file: The file, at its start.
      begins: Tells whether a range can begin with a line.
    """
    place = self._first
    if place:
      file.seek(place - 1)
      place += len(file.readline()) - 1  # The rest of a line that starts before the range.
    inside = not self._first
    # Only "\n" ends a line, and no newline is translated, so the corpus has the bytes of the file.
    for data in file:
      line = data.decode()
      past_end = self._end is not None and place >= self._end
      if (past_end or not inside) and begins(line):
        if past_end:
          return
        inside = True
      place += len(data)
      if inside:
        self.lines += 1
        yield line

  def _json_documents(self, lines: Iterator[str]) -> Iterator[TextDocument]:
    text_field = self._form.text_field
    for line in lines:
      if not line.strip():
        continue
      try:
        values = json.loads(line)
        text = values[text_field]
        if not isinstance(text, str):
          raise TypeError(f"{text_field!r} is not text")
        text.encode()  # JSON can contain lone surrogates, which no tokenizer accepts.
      except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorpusError(
            f"{self._path}:{self.lines + self._lines_before()}: expected a JSON object with text in"
            f" the field {text_field!r}: {type(error).__name__}: {error}."
        ) from error
      yield TextDocument(text, document_name(values.get(self._form.id_field)), line=self.lines)

  def _lines_before(self) -> int:
    """Returns the number of lines of a JSON file that start before the range."""
    if not self._first:
      return 0
    count = 0
    with open_bytes(self._path) as file:
      for _ in file:
        count += 1
        if file.tell() >= self._first:
          break
    return count

  def _separated_documents(self, file: IO[bytes], separator: str) -> Iterator[TextDocument]:
    found: list[str] = []
    first = 0
    for line in self._lines(file, lambda line: line.strip() == separator):
      if line.strip() != separator:
        first = first if found else self.lines
        found.append(line)
      elif found:  # Consecutive separators count as one.
        yield TextDocument("".join(found), line=first)
        found = []
    if found:
      yield TextDocument("".join(found), line=first)

  def _parquet_documents(self) -> Iterator[TextDocument]:
    from maxtext_olmo.corpus import parquet_text

    rows = parquet_text.read_rows(
        self._path, self._form.text_field, self._form.id_field, self._first, self._end
    )
    for text, name in rows:
      self.lines += 1
      yield TextDocument(text, document_name(name), line=self.lines)


def read_documents(
    path: str, *, separator: str | None = None, text_field: str = "text", id_field: str = "id"
) -> Iterator[TextDocument]:
  """Yields the documents of a file; one without an id is named after its file and line.

  Args:
    path: Path of the file.
    separator: As in `TextFormat`; so are the other arguments.
    text_field: The field that contains the text.
    id_field: The field that contains the id.
  """
  source = printable_path(path)
  for text, name, _, line in DocumentReader(path, TextFormat(separator, text_field, id_field)):
    yield TextDocument(text, name or f"{source}:{line}", source, line)


def printable_path(path: str) -> str:
  """Returns a path as valid Unicode: a file name need not be valid UTF-8."""
  return os.fsencode(path).decode(errors="backslashreplace")


def probe(path: str, form: TextFormat) -> None:
  """Reads the beginning of a file, and raises a CorpusError if it cannot be used."""
  if path.endswith((PARQUET, *JSON_SUFFIXES)):
    next(iter(DocumentReader(path, form)), None)
    return
  with _read_errors(path), open_bytes(path) as file:
    codecs.getincrementaldecoder("utf-8")().decode(file.read(_PROBE_BYTES))


def open_bytes(path: str) -> IO[bytes]:
  """Opens a file or an object for reading, and decompresses `.gz` and `.zst`.

  Raises:
    CorpusError: The path is not a regular file, or an object cannot be read.
  """
  if not urls.is_url(path) and os.path.exists(path) and not os.path.isfile(path):
    raise CorpusError(f"{path} is not a regular file.")
  if path.endswith(".gz"):
    # gzip closes only files that it has opened itself; a stream of an object holds nothing open.
    return cast(IO[bytes], gzip.open(byte_stream.open_bytes(path) if urls.is_url(path) else path))
  if path.endswith(".zst"):
    return cast(IO[bytes], io.BufferedReader(piece_reader.PieceReader(_zstd_pieces(path)), 1 << 20))
  return byte_stream.open_bytes(path)


def document_name(value: Any) -> str:
  """Returns a document's id as a string; empty if it is missing, too long or of another type."""
  if type(value) is int and abs(value) < 1 << 64:
    return str(value)
  if not isinstance(value, str) or len(value) > _LONGEST_NAME:
    return ""
  return value.encode(errors="backslashreplace").decode()


@contextlib.contextmanager
def _read_errors(path: str) -> Iterator[None]:
  """Turns errors that reading a text file raises into a CorpusError that names the file."""
  try:
    yield
  except CorpusError:
    raise
  except UnicodeDecodeError as error:
    raise CorpusError(
        f"{path} is not UTF-8 text (it contains the byte {error.object[error.start]:#04x}). Convert"
        " it, or exclude it (--exclude)."
    ) from error
  except (OSError, EOFError, zlib.error) as error:
    raise CorpusError(f"Cannot read {path}: {error}.") from error


def _zstd_pieces(path: str) -> Iterator[bytes]:
  """Yields the decompressed bytes of a file of one or more Zstandard frames."""
  try:
    import zstandard
  except ImportError as error:
    raise ConfigError(
        f"{path} needs the package `zstandard`: pip install 'maxtext_olmo[zstd]'."
    ) from error
  decompressor = zstandard.ZstdDecompressor(max_window_size=_LARGEST_ZSTD_WINDOW)
  frame = None
  with byte_stream.open_bytes(path) as file:
    while data := file.read(_ZSTD_BYTES):
      while data:
        frame = frame or decompressor.decompressobj()
        try:
          yield frame.decompress(data)
        except zstandard.ZstdError as error:
          raise OSError(str(error)) from error
        data = frame.unused_data if frame.eof else b""
        frame = None if frame.eof else frame
  # The package itself does not report a truncated file.
  if frame is not None:
    raise EOFError("the compressed data ends before its end marker")
