"""Pieces of token files: the units of work over a corpus.

Files are cut at multiples of the piece size.

    file 0    ├────── piece 0 ──────┼────── piece 1 ──────┼── piece 2 ──┤
    file 1    ├── piece 3 ──┤
    file 2    ┤ piece 4 (the file has no tokens)

A piece contains everything that a worker needs to read it, so workers need no index.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from maxtext_olmo.corpus import paths as paths_lib
from maxtext_olmo.corpus.index import OlmoNpyIndex
from maxtext_olmo.corpus.npy_header import token_dtype
from maxtext_olmo.errors import ConfigError

# A second of work: losing a piece costs little, and the cost of handing it out is negligible.
PIECE_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class SourceFile:
  """A token file of an index.

  Attributes:
    id: Index of the file in the corpus.
    path: Full path or URL, remapped for this machine.
    label: Label of the file.
    dtype: Name of the dtype of its tokens.
    n_tokens: Number of complete tokens.
    data_offset: Number of bytes before the first token.
    size: Size in bytes that the file must have.
    etag: ETag that the object must have; None if the index has none for this URL.
    checksum: Checksum in the index; None if there is none.
  """

  id: int
  path: str
  label: str
  dtype: str
  n_tokens: int
  data_offset: int
  size: int
  etag: str | None = None
  checksum: str | None = None

  @property
  def token_dtype(self) -> np.dtype:
    """The NumPy dtype of the tokens, little endian."""
    return token_dtype(self.dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
  """Tokens [first, first + count) of a file.

  Attributes:
    source: The file.
    first: First token.
    count: Number of tokens; 0 only for a file without tokens.
  """

  source: SourceFile
  first: int
  count: int

  def __str__(self) -> str:
    return f"tokens {self.first} to {self.first + self.count} of {self.source.path}"

  @property
  def file(self) -> int:
    """Index of the file in the corpus."""
    return self.source.id

  @property
  def key(self) -> str:
    """A name that no other piece of the corpus has."""
    return f"{self.source.id}-{self.first}-{self.count}"

  @property
  def weight(self) -> int:
    """Number of bytes to read."""
    return self.count * self.source.token_dtype.itemsize

  @property
  def inputs(self) -> tuple[str, ...]:
    """Paths of the files that the result depends on."""
    return (self.source.path,)

  @property
  def start(self) -> int:
    """Byte offset of the first token in the file."""
    return self.source.data_offset + self.first * self.source.token_dtype.itemsize

  @property
  def end(self) -> int:
    """Byte offset in the file just past the last token."""
    return self.start + self.weight

  @property
  def is_first(self) -> bool:
    """Whether this is the first piece of its file."""
    return self.first == 0

  @property
  def is_last(self) -> bool:
    """Whether this is the last piece of its file."""
    return self.first + self.count == self.source.n_tokens


def source_files(
    index: OlmoNpyIndex, *, path_remap: Mapping[str, str] | None = None
) -> list[SourceFile]:
  """Returns the token files of an index, in order.

  Args:
    index: Index of the corpus.
    path_remap: prefix → replacement, for paths that begin differently on this machine.
  """
  found = []
  for i, entry in enumerate(index.files):
    full = index.resolve(i)
    path = paths_lib.remap(full, path_remap)
    found.append(
        SourceFile(
            id=i,
            path=path,
            label=entry.label,
            dtype=index.dtype,
            n_tokens=entry.n_tokens,
            data_offset=entry.data_offset,
            size=index.expected_size(i),
            etag=entry.etag if path == full else None,
            checksum=entry.checksum,
        )
    )
  return found


def cut(source: SourceFile, piece_bytes: int = PIECE_BYTES) -> list[Piece]:
  """Returns the pieces of a file, at least one, in order.

  A piece begins at a multiple of `piece_bytes` in the file or, if a token crosses that place, at
  the next token.
  """
  width, end = source.token_dtype.itemsize, source.n_tokens
  if piece_bytes < width:
    raise ConfigError(f"A piece must hold at least one token, got {piece_bytes} bytes per piece.")
  places = range(source.data_offset // piece_bytes + 1, max(source.size, 1) // piece_bytes + 1)
  inner = (-((source.data_offset - place * piece_bytes) // width) for place in places)
  bounds = [0, *(first for first in inner if first < end), end]
  return [Piece(source, first, stop - first) for first, stop in zip(bounds, bounds[1:])]


def pieces_of(
    index: OlmoNpyIndex,
    *,
    piece_bytes: int = PIECE_BYTES,
    path_remap: Mapping[str, str] | None = None,
) -> list[Piece]:
  """Returns the pieces of all files of an index, in file order.

  Args:
    index: Index of the corpus.
    piece_bytes: Size of a piece in bytes.
    path_remap: prefix → replacement, for paths that begin differently on this machine.
  """
  sources = source_files(index, path_remap=path_remap)
  return [piece for source in sources for piece in cut(source, piece_bytes)]
