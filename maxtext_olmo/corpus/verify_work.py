"""Runs those checks of `verify` that read a file, on one piece of the file at a time.

The check of every piece compares the size and ETag of the whole file. That of the first piece also
covers the offset of the tokens and their dtype.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from maxtext_olmo.corpus import checksums
from maxtext_olmo.corpus import dtype_guess
from maxtext_olmo.corpus import scan
from maxtext_olmo.corpus.document_lengths import DocumentLengths
from maxtext_olmo.corpus.token_scan import TokenScan
from maxtext_olmo.corpus.work import identity
from maxtext_olmo.corpus.work import reading
from maxtext_olmo.corpus.work import run
from maxtext_olmo.corpus.work.pieces import PIECE_BYTES
from maxtext_olmo.corpus.work.pieces import Piece
from maxtext_olmo.corpus.work.pieces import SourceFile
from maxtext_olmo.corpus.work.pieces import cut
from maxtext_olmo.errors import CorpusError


@dataclasses.dataclass(frozen=True)
class VerifyWork(run.Work):
  """Checks a piece of a file against the index.

  Attributes:
    vocab_size: Token ids must be below this; None does not check ids.
    eos_id: Id that ends documents; None does not look for it.
  """

  name: ClassVar[str] = "verify"
  version: ClassVar[int] = 1

  vocab_size: int | None = None
  eos_id: int | None = None

  def pieces(self, source: SourceFile, piece_bytes: int = PIECE_BYTES) -> list[Piece]:
    """Returns the pieces of a file that are checked one by one."""
    algorithm = (source.checksum or "").partition(":")[0]
    if algorithm:
      size, width = checksums.piece_bytes(algorithm), source.token_dtype.itemsize
      if size is not None and source.data_offset % width == 0 and size % width == 0:
        return cut(source, size)
    elif self._reads_tokens:
      return cut(source, piece_bytes)
    return [Piece(source, 0, source.n_tokens)]

  @property
  def _reads_tokens(self) -> bool:
    return self.vocab_size is not None or self.eos_id is not None

  def __call__(self, item: Piece) -> dict[str, Any]:
    """Returns what was found in a piece.

    `broken` says how the file as a whole differs from the index; its tokens are then not checked,
    because that would only add noise. Otherwise there are `bad` (the number of bad ids),
    `first_bad` (the place and value of the first one), `digest` (the checksum), and the lengths of
    documents; the last three only if they were requested. A file that cannot be read has no
    result: its pieces fail, and the next run checks them again.
    """
    broken = self._difference(item)
    if broken is not None:
      return {"broken": broken}
    reading.expect(self.files, item.source)
    if self._reads_tokens or item.source.checksum is not None:
      return {"broken": None, **self._read(item)}
    return {"broken": None, "bad": 0}

  def _difference(self, item: Piece) -> str | None:
    """Returns how a file differs from the index, apart from its tokens."""
    source, path = item.source, item.source.path
    size, etag = identity.size_and_etag(self.files, path)
    if size != source.size:
      return f"expected {source.size} bytes, found {size}"
    expected = source.etag
    if etag is not None and expected is not None and etag.strip('"') != expected.strip('"'):
      return f"the store's ETag is {etag}, but the index says {expected}: the object was replaced"
    if not item.is_first:
      return None
    offset = scan.scan_file(path, source.token_dtype, self.files).data_offset
    if offset != source.data_offset:
      return f"the tokens begin at byte {offset}, but the index says {source.data_offset}"
    if other := dtype_guess.likelier_dtype(self.files, source):
      return (
          f"the data look like {other}, but the index says {source.dtype}. Build the index again"
          f" with `--dtype {other}`."
      )
    return None

  def _read(self, piece: Piece) -> dict[str, Any]:
    """Reads a piece once, and makes all checks that need its tokens."""
    source, dtype = piece.source, piece.source.token_dtype
    digest = _new_hash(piece)
    scanned = TokenScan(dtype, self.eos_id)
    top = 0
    if digest is None:
      scanned.read(self.files, source.path, piece.start, piece.end)
      top = scanned.top
    else:
      if piece.is_first and source.data_offset:
        digest.update(self.files.read(source.path, 0, source.data_offset))
      # An incomplete token at the end of the file counts for the checksum only.
      end = source.size if piece.is_last else piece.end
      for chunk in reading.read_range(self.files, source.path, piece.start, end):
        digest.update(chunk)
        if self._reads_tokens:
          scanned.add(chunk[: len(chunk) // dtype.itemsize * dtype.itemsize].view(dtype))
          top = max(top, scanned.top)
    result: dict[str, Any] = {"bad": 0, "first_bad": None}
    if self.vocab_size is not None and top >= self.vocab_size:
      result |= self._find_bad_ids(piece, self.vocab_size)
    if digest is not None:
      result["digest"] = digest.hexdigest()
    if self.eos_id is not None:
      result |= DocumentLengths.of_ends(scanned.ends, scanned.count).to_result()
    return result

  def _find_bad_ids(self, piece: Piece, vocab_size: int) -> dict[str, Any]:
    """Reads a piece again; returns the number of bad ids, and the place and value of the first."""
    bad, first_bad, place = 0, None, piece.first
    for tokens in reading.read_tokens(self.files, piece):
      places = np.flatnonzero(tokens >= vocab_size)
      if len(places) and first_bad is None:
        first_bad = [place + int(places[0]), int(tokens[places[0]])]
      bad += len(places)
      place += len(tokens)
    if first_bad is None:
      raise CorpusError(
          f"Two reads of bytes {piece.start} to {piece.end} of {piece.source.path} differ: only the"
          f" first had ids of {vocab_size} or more. Check the disk, the mount and the memory."
      )
    return {"bad": bad, "first_bad": first_bad}


def _new_hash(piece: Piece) -> checksums.Hash | None:
  """Returns the hash for a piece: of the whole file, or sums to be joined with those of others."""
  algorithm = (piece.source.checksum or "").partition(":")[0]
  if not algorithm:
    return None
  size = checksums.piece_bytes(algorithm)
  if size is None or (piece.is_first and piece.is_last):
    return checksums.new_hash(algorithm)
  # A header may fill more than one piece, and an incomplete token may follow the last one.
  return checksums.PieceSums(size)


@dataclasses.dataclass(frozen=True)
class FileCheck:
  """What was found in a file.

  Attributes:
    source: The file.
    broken: Why the file could not be checked any further; None if it could.
    bad: Number of ids outside the vocabulary.
    first_bad: Place and value of the first of them; None if there are none.
    digest: Checksum (hex) of the content; None if the index has none.
    piece_sums: Checksums (hex) of the pieces that `digest` was joined from; empty if it was not.
    lengths: Lengths of the documents; None if the EOS was not looked for, or there are no tokens.
  """

  source: SourceFile
  broken: str | None = None
  bad: int = 0
  first_bad: tuple[int, int] | None = None
  digest: str | None = None
  piece_sums: tuple[str, ...] = ()
  lengths: DocumentLengths | None = None


def join_pieces(source: SourceFile, results: Sequence[dict[str, Any]]) -> FileCheck:
  """Joins the results of all pieces of a file, in order."""
  broken = next((found["broken"] for found in results if found["broken"] is not None), None)
  if broken is not None:
    return FileCheck(source, broken)
  firsts = [found["first_bad"] for found in results if found.get("first_bad") is not None]
  digest = results[0].get("digest")
  sums: list[str] = []
  if digest is not None and len(results) > 1:
    sums = checksums.split_pieces("".join(found["digest"] for found in results))
    digest = checksums.join_pieces(sums)
  lengths = None
  if source.n_tokens and "bins" in results[0]:
    lengths = DocumentLengths()
    for found in results:
      lengths.append(DocumentLengths.from_result(found))
  return FileCheck(
      source,
      bad=sum(found["bad"] for found in results),
      first_bad=tuple(firsts[0]) if firsts else None,
      digest=digest,
      piece_sums=tuple(sums),
      lengths=lengths,
  )
