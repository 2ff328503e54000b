"""Boundary files: the positions and names of the documents of a token file.

dolma writes a `part.csv.gz` next to `part.npy`, with a line for each document:

    0,1312,<urn:uuid:0a3f…>,s3://…/shard_0007.jsonl.gz,41
    │ │    │                │                          └ line in that file, from 1
    │ │    │                └ the file that the text came from
    │ │    └ the document's id, used as its name
    │ └ end: one past its last token
    └ start: its first token

Only the first two columns are required. A name need not be unique.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import gzip
import io
import itertools
import os
import reprlib
import zlib
from collections.abc import Iterator, Sequence
from typing import IO

import numpy as np
from absl import logging

from maxtext_olmo.corpus import piece_reader
from maxtext_olmo.corpus.storage import Storage
from maxtext_olmo.errors import CorpusError

_SUFFIX = ".csv.gz"
_LINES_AT_ONCE = 1024
_PIECE_BYTES = 1 << 20
_LONGEST_LINE = 1 << 20  # In characters. `csv` limits each field to 2**17.
_USE_EOS = "Copy the boundary file again, or remove it, so that documents are found by their EOS."
_LARGEST_LINE = np.iinfo(np.int64).max


@dataclasses.dataclass(frozen=True)
class Boundaries:
  """Consecutive documents of a token file.

  Attributes:
    starts: First token of each document (int64).
    lengths: Number of tokens of each document (int64).
    names: Name of each document; empty if it has none.
    sources: File that each text came from; empty if unknown.
    lines: Line number of each text in its source, as recorded; -1 if unknown (int64).
  """

  starts: np.ndarray
  lengths: np.ndarray
  names: Sequence[str]
  sources: Sequence[str]
  lines: np.ndarray


def boundary_path(token_path: str) -> str:
  """Returns the path of the boundary file that belongs to a token file."""
  return os.path.splitext(token_path)[0] + _SUFFIX


def read_boundaries(storage: Storage, path: str, n_tokens: int) -> Iterator[Boundaries]:
  """Yields the documents of a boundary file, in blocks.

  Tokens between two documents belong to neither, as in OLMo-core; dolma writes no such gaps.

  Args:
    storage: Storage that holds the boundary file.
    path: Path of the boundary file.
    n_tokens: Number of tokens in the token file. The last document must end at the last token.

  Raises:
    CorpusError: The boundary file cannot be read, or does not match the token file.
  """
  rows = _csv_rows(storage, path)
  number, end, outside = 1, 0, 0
  while block := list(itertools.islice(rows, _LINES_AT_ONCE)):
    try:
      starts = np.fromiter(map(int, [row[0] for row in block]), np.int64, len(block))
      ends = np.fromiter(map(int, [row[1] for row in block]), np.int64, len(block))
      before = np.concatenate([[end], ends[:-1]])
      fit = bool(((before <= starts) & (starts <= ends)).all()) and int(ends[-1]) <= n_tokens
    except (ValueError, IndexError, OverflowError):
      fit = False
    if not fit:
      raise _misfit(block, path, number, end, n_tokens)
    yield Boundaries(
        starts, ends - starts, _column(block, 2), _column(block, 3), _lines(_column(block, 4))
    )
    number, end = number + len(block), int(ends[-1])
    outside += int((starts - before).sum())
  if end != n_tokens:
    raise CorpusError(
        f"The last document in the boundary file {path} ends at token {end}, but the token file has"
        f" {n_tokens} tokens: the boundary file is truncated, or belongs to a different token file."
        f" {_USE_EOS}"
    )
  if outside:
    logging.warning(
        "%s: %d of %d tokens lie between documents and are skipped.", path, outside, n_tokens
    )


def read_spans(storage: Storage, path: str, n_tokens: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the first token and the length of each document (int64), in the order of the file.

  Unlike `read_boundaries`, this accepts documents in any order, and gaps between them.

  Raises:
    CorpusError: The boundary file cannot be read, or has a document that is empty or outside the
      token file.
  """
  starts, ends = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
  rows, number = _csv_rows(storage, path), 1
  while block := list(itertools.islice(rows, _LINES_AT_ONCE)):
    for line, row in enumerate(block, number):
      if not _is_span(row, n_tokens):
        raise CorpusError(
            f"{path}:{line}: expected the start and the end of a document within the"
            f" {n_tokens} tokens of the file, found {reprlib.repr(','.join(row[:2]))}. {_USE_EOS}"
        )
    starts.append(np.fromiter((int(row[0]) for row in block), np.int64, len(block)))
    ends.append(np.fromiter((int(row[1]) for row in block), np.int64, len(block)))
    number += len(block)
  first = np.concatenate(starts)
  return first, np.concatenate(ends) - first


def _is_span(row: list[str], n_tokens: int) -> bool:
  try:
    return 0 <= int(row[0]) < int(row[1]) <= n_tokens
  except (ValueError, IndexError):
    return False


class BoundaryWriter:
  """Writes a boundary file to an open binary file, one document at a time."""

  def __init__(self, file: IO[bytes]):
    # Without a timestamp and a file name, equal boundaries give byte-identical files.
    self._gzip = gzip.GzipFile(filename="", fileobj=file, mode="wb", compresslevel=6, mtime=0)
    self._text = io.TextIOWrapper(self._gzip, encoding="utf-8", newline="")
    self._csv = csv.writer(self._text)
    self._end = 0

  def add(self, length: int, name: str, source: str, line: int | None) -> None:
    """Appends a document that starts where the previous one ended."""
    start, self._end = self._end, self._end + length
    self._csv.writerow((start, self._end, name, source, "" if line is None else line))

  def close(self) -> None:
    """Completes the boundary file; the underlying file stays open."""
    self._text.close()


def _csv_rows(storage: Storage, path: str) -> Iterator[list[str]]:
  pieces = piece_reader.PieceReader(storage.pieces(path, piece_bytes=_PIECE_BYTES))
  try:
    with gzip.open(io.BufferedReader(pieces), "rt", encoding="utf-8", newline="") as file:
      # Limits the line length: a small gzip file may expand to one line of many gigabytes.
      yield from csv.reader(iter(functools.partial(file.readline, _LONGEST_LINE), ""))
  except CorpusError:
    raise
  except (OSError, EOFError, ValueError, zlib.error, csv.Error) as error:
    raise CorpusError(f"The boundary file {path} cannot be read: {error}. {_USE_EOS}") from error


def _misfit(block: list[list[str]], path: str, number: int, end: int, n_tokens: int) -> CorpusError:
  """Returns the error for the first line that is malformed or overlaps the document before it."""
  for line in block:
    before = end
    try:
      start, end = int(line[0]), int(line[1])
    except (ValueError, IndexError):
      start, end = -1, -1
    if not before <= start <= end <= n_tokens:
      break
    number += 1
  return CorpusError(
      f"{path}:{number}: expected the start and the end of a document at or after token {before}"
      f" and within the {n_tokens} tokens of the file, found"
      f" {reprlib.repr(','.join(line[:2]))}. {_USE_EOS}"
  )


def _column(block: list[list[str]], column: int) -> list[str]:
  """Returns one column of the rows, with an empty string for each row that lacks it."""
  try:
    return [row[column] for row in block]
  except IndexError:
    return [row[column] if len(row) > column else "" for row in block]


def _lines(texts: list[str]) -> np.ndarray:
  """Parses line numbers. Any other text becomes -1: not every writer puts line numbers here."""
  try:
    lines = np.fromiter(map(int, texts), np.int64, len(texts))
  except (ValueError, OverflowError):
    numbers = (int(text) if text.isdecimal() and len(text) < 20 else -1 for text in texts)
    kept = [number if number <= _LARGEST_LINE else -1 for number in numbers]
    lines = np.array(kept, np.int64)
  return np.maximum(lines, -1)
