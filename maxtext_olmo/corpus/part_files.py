"""Writes and reads the parts of a corpus: a token file with its boundary file.

    part-00000.npy       document, EOS, document, EOS, …  (raw ids, no header)
    part-00000.csv.gz    position, name, source file and line of each document

Documents stay whole: a part ends with the document that fills it.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from maxtext_olmo import atomic
from maxtext_olmo.corpus import boundaries
from maxtext_olmo.corpus import piece_reader
from maxtext_olmo.corpus import urls
from maxtext_olmo.corpus.storage import Storage
from maxtext_olmo.corpus.storage import writing

_PIECE_BYTES = 4 << 20


class EncodedDocument(NamedTuple):
  """The tokens of a document as they are in a token file, and where its text came from.

  Attributes:
    data: Its tokens, the EOS included.
    length: Number of tokens.
    name: Name of the document; empty if it has none.
    source: File that the text came from; empty if unknown.
    line: First line of the text in that file; None if unknown.
  """

  data: bytes
  length: int
  name: str = ""
  source: str = ""
  line: int | None = None


def write_parts(
    documents: Iterator[EncodedDocument], directory: str, tokens_per_file: int, first: int = 0
) -> list[str]:
  """Writes documents to consecutive parts.

  Args:
    documents: The documents.
    directory: Directory or URL of the parts. A missing directory is created.
    tokens_per_file: A part ends after the document that reaches this number of tokens.
    first: Number of the first part.

  Returns:
    The names of the token files.
  """
  parts: list[str] = []
  for document in documents:
    parts.append(f"part-{first + len(parts):05d}.npy")
    path = os.path.join(directory, parts[-1])
    write_part(itertools.chain([document], documents), path, tokens_per_file)
  return parts


def write_part(
    documents: Iterable[EncodedDocument], path: str, tokens_per_file: float = float("inf")
) -> None:
  """Writes a token file and its boundary file, each atomically.

  Args:
    documents: The documents. No more of them are taken once the part is full.
    path: Path or URL of the token file. A missing directory is created.
    tokens_per_file: The part is full after the document that reaches this number of tokens.
  """
  if not urls.is_url(path):
    with atomic.write_errors(path):
      os.makedirs(os.path.dirname(path), exist_ok=True)
  with (
      writing.open_output(path) as file,
      writing.open_output(boundaries.boundary_path(path)) as boundary_file,
      contextlib.closing(boundaries.BoundaryWriter(boundary_file)) as bounds,
  ):
    written = 0
    for data, length, name, source, line in documents:
      file.write(data)
      bounds.add(length, name, source, line)
      written += length
      if written >= tokens_per_file:
        break


def read_part(storage: Storage, path: str, itemsize: int) -> Iterator[EncodedDocument]:
  """Yields the documents of a part.

  Args:
    storage: Storage that holds the part.
    path: Path or URL of the token file.
    itemsize: Size of a token in bytes.

  Raises:
    CorpusError: The files cannot be read, or do not match each other.
  """
  pieces = storage.pieces(path, piece_bytes=_PIECE_BYTES)
  file = io.BufferedReader(piece_reader.PieceReader(pieces), _PIECE_BYTES)
  n_tokens = storage.size(path) // itemsize
  for block in boundaries.read_boundaries(storage, boundaries.boundary_path(path), n_tokens):
    for length, name, source, line in zip(
        block.lengths.tolist(), block.names, block.sources, block.lines.tolist()
    ):
      data = file.read(length * itemsize)
      yield EncodedDocument(data, length, name, source, line if line >= 0 else None)
