"""Finds the documents of one piece of a token file, or of a whole file that has a boundary file.

The result of a piece lists the places of the EOS in it. Its first document may have begun in an
earlier piece, and its last one may end in a later one; `join_file` joins them:

    tokens    5  6  0  7 | 8  0  9  9 | 9  0
    piece     0            1            2
    ends      2            1            1         places in the piece
    hashes    of 5 6 0     of 9 9 9 0   none      of the documents that begin in the piece,
              and 7 8 0                           wherever they end
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
import xxhash

from maxtext_olmo import atomic
from maxtext_olmo.corpus import boundaries
from maxtext_olmo.corpus import document_hashes
from maxtext_olmo.corpus import document_names
from maxtext_olmo.corpus.token_scan import TokenScan
from maxtext_olmo.corpus.work import reading
from maxtext_olmo.corpus.work import run
from maxtext_olmo.corpus.work.pieces import Piece
from maxtext_olmo.corpus.work.pieces import SourceFile
from maxtext_olmo.errors import CorpusError


@dataclasses.dataclass(frozen=True, slots=True)
class BoundaryFile:
  """A token file whose documents its boundary file lists.

  Attributes:
    source: The token file.
    path: Path of the boundary file.
  """

  source: SourceFile
  path: str

  def __str__(self) -> str:
    return self.path

  @property
  def file(self) -> int:
    """Index of the token file in the corpus."""
    return self.source.id

  @property
  def key(self) -> str:
    """A name that no other item has."""
    return f"{self.source.id}-csv"

  @property
  def weight(self) -> int:
    """Number of bytes of the token file."""
    return self.source.n_tokens * self.source.token_dtype.itemsize

  @property
  def inputs(self) -> tuple[str, ...]:
    """Paths of the files that the result depends on."""
    return (self.path, self.source.path)


@dataclasses.dataclass(frozen=True)
class DocumentWork(run.Work):
  """Finds documents, and hashes them if asked to.

  Attributes:
    eos_id: Token that ends a document in files without a boundary file.
    hashes: Whether to hash the documents.
  """

  name: ClassVar[str] = "documents"
  version: ClassVar[int] = 1

  eos_id: int
  hashes: bool

  def __call__(self, item: Piece | BoundaryFile) -> dict[str, Any]:
    """Returns `ends` of a piece, or `spans` and names of a file, and `hashes` if asked for."""
    reading.expect(self.files, item.source)
    if isinstance(item, BoundaryFile):
      return self._of_boundaries(item)
    if self.hashes:
      return self._ends_and_hashes(item)
    scan = TokenScan(item.source.token_dtype, self.eos_id)
    scan.read(self.files, item.source.path, item.start, item.end)
    return {"ends": _small(scan.ends)}

  def _of_boundaries(self, item: BoundaryFile) -> dict[str, Any]:
    source = item.source
    with tempfile.TemporaryDirectory(prefix="maxtext_olmo_") as folder:
      path = os.path.join(folder, "spans")
      with (
          atomic.write_errors(path),
          open(path, "wb") as file,
          document_names.NameSpool(folder, 0) as names,
      ):
        for some in boundaries.read_boundaries(self.files, item.path, source.n_tokens):
          names.add(some)
          file.write(_as_rows(some.starts, some.lengths))
      result: dict[str, Any] = {
          "named": names.named,
          "sources_found": names.num_sources,
          "spans": _mapped(path).reshape(-1, 2),
      }
      if self.hashes:
        hashed = os.path.join(folder, "hashes")
        with atomic.write_errors(hashed), open(hashed, "wb") as file:
          reader = document_hashes.RangeHasher(self.files, source)
          for block in _blocks(result["spans"]):
            digests = b"".join(reader.digest(first, count) for first, count in block.tolist())
            file.write(document_hashes.as_numbers(digests).tobytes())
        result["hashes"] = _mapped(hashed)
      # Maps of the files stay valid when the directory is removed.
      return result | document_names.spooled_columns(folder, 0)

  def _ends_and_hashes(self, piece: Piece) -> dict[str, Any]:
    hasher = _DocumentHasher(self._begins_document(piece))
    scan = TokenScan(piece.source.token_dtype, self.eos_id)
    for tokens in reading.read_tokens(self.files, piece):
      before, known = scan.count, len(scan.ends)
      scan.add(tokens)
      hasher.add(tokens, scan.ends[known:] - before)
    ends = _small(scan.ends)
    if hasher.is_open:
      rest = Piece(piece.source, piece.first + piece.count, 0)
      rest = dataclasses.replace(rest, count=piece.source.n_tokens - rest.first)
      for tokens in reading.read_tokens(self.files, rest):
        found = np.flatnonzero(tokens == self.eos_id)[:1]
        hasher.add(tokens[: int(found[0]) + 1] if len(found) else tokens, found)
        if not hasher.is_open:
          break
    return {"ends": ends, "hashes": document_hashes.as_numbers(hasher.digests())}

  def _begins_document(self, piece: Piece) -> bool:
    """Returns whether a document begins with the first token of a piece."""
    if piece.is_first:
      return True
    dtype = piece.source.token_dtype
    last = self.files.read(piece.source.path, piece.start - dtype.itemsize, dtype.itemsize)
    return int(np.frombuffer(last, dtype)[0]) == self.eos_id


class _DocumentHasher:
  """Hashes the documents that begin in consecutive chunks of tokens.

  Attributes:
    is_open: Whether a document has begun and not ended.
  """

  def __init__(self, begins: bool):
    self._digests: list[bytes] = []
    self._skips = not begins  # The current document began before the first chunk.
    self._partial: Any = None
    self.is_open = False

  def add(self, tokens: np.ndarray, ends: np.ndarray) -> None:
    """Adds a chunk, in which an EOS is at each of the places `ends`."""
    view, width, place = tokens.data.cast("B"), tokens.itemsize, 0
    for end in ((ends + 1) * width).tolist():
      if self._skips:
        self._skips = False
      elif self._partial is not None:
        self._partial.update(view[place:end])
        self._digests.append(self._partial.digest())
        self._partial = None
      else:
        self._digests.append(xxhash.xxh3_128_digest(view[place:end]))
      place = end
    if place < len(view) and not self._skips:
      self._partial = xxhash.xxh3_128() if self._partial is None else self._partial
      self._partial.update(view[place:])
    self.is_open = self._partial is not None

  def digests(self) -> bytes:
    """Returns the digests; an open document ends at the end of its file."""
    last = [] if self._partial is None else [self._partial.digest()]
    return b"".join([*self._digests, *last])


def _small(ends: np.ndarray) -> np.ndarray:
  """Returns places as uint32 if they fit, to halve the size of results."""
  fits = not len(ends) or int(ends[-1]) <= np.iinfo(np.uint32).max
  return ends.astype("<u4" if fits else "<u8")


def _as_rows(starts: np.ndarray, lengths: np.ndarray) -> bytes:
  return np.stack([starts, lengths], axis=1).astype("<u8").tobytes()


def _mapped(path: str) -> np.ndarray:
  # An empty file cannot be mapped.
  return np.memmap(path, "<u8", "r") if os.path.getsize(path) else np.zeros(0, "<u8")


def _blocks(spans: np.ndarray) -> Iterator[np.ndarray]:
  for first in range(0, len(spans), 1 << 16):
    yield spans[first : first + (1 << 16)]


class FoundInFile(NamedTuple):
  """Counts for the documents of a token file, and whether a boundary file delimits them."""

  documents: int
  by_boundaries: bool
  named: int
  sources: int


def join_file(
    folder: str,
    source: SourceFile,
    results: Iterable[tuple[Any, Mapping[str, Any]]],
    *,
    tail: bool,
) -> FoundInFile:
  """Counts the documents of a file, and writes their hashes and names to temporary files.

  Args:
    folder: Directory for the temporary files. `document_names` manages those that hold the names.
    source: The token file.
    results: The items of the file and their results, in order.
    tail: Whether tokens after the last EOS are a document.
  """
  named, sources, by_boundaries = 0, 0, False
  path = hash_path(folder, source.id)
  with atomic.write_errors(path), open(path, "wb") as hashes:

    def kept() -> Iterator[tuple[Any, Mapping[str, Any]]]:
      nonlocal named, sources, by_boundaries
      for item, result in results:
        hashes.write(result.get("hashes", np.zeros(0, "<u8")).tobytes())
        if isinstance(item, BoundaryFile):
          by_boundaries = True
          named, sources = result["named"], result["sources_found"]
          document_names.restore_columns(folder, source.id, result)
        yield item, result

    documents = sum(len(starts) for starts, _ in file_spans(source, kept(), tail=tail))
    # The tail was hashed, whether it is a document or not.
    hashes.truncate(min(hashes.tell(), documents * document_hashes.DIGEST_BYTES))
  return FoundInFile(documents, by_boundaries, named, sources)


def file_spans(
    source: SourceFile, results: Iterable[tuple[Any, Mapping[str, Any]]], *, tail: bool
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Yields the first tokens and the lengths of a file's documents, in blocks.

  Args:
    source: The token file.
    results: The items of the file and their results, in order.
    tail: Whether tokens after the last EOS are a document.
  """
  begun = 0  # Start of the current document.
  for item, result in results:
    if isinstance(item, BoundaryFile):
      for block in _blocks(result["spans"]):
        yield block[:, 0], _checked(block[:, 1], source.path)
      begun = source.n_tokens
      continue
    ends = result["ends"].astype(np.int64) + (item.first + 1)
    starts = np.concatenate([[begun], ends[:-1]])[: len(ends)]
    yield starts, _checked(ends - starts, source.path)
    begun = int(ends[-1]) if len(ends) else begun
  if tail and begun < source.n_tokens:
    yield np.array([begun]), _checked(np.array([source.n_tokens - begun]), source.path)


def hash_path(folder: str, file: int) -> str:
  """Returns the path of the temporary file with the hashes of a token file."""
  return os.path.join(folder, f"{file}.hashes")


def _checked(lengths: np.ndarray, path: str) -> np.ndarray:
  """Returns the lengths of documents; raises CorpusError if one is too long for the index."""
  if len(lengths) and int(lengths.max()) > np.iinfo(np.uint32).max:
    raise CorpusError(
        f"{path} has a document of {int(lengths.max())} tokens; the length must fit in 32 bits."
        " Check olmo_eos_id."
    )
  return lengths
