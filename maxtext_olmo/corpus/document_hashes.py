"""Hashes of documents (xxh3-128 of their tokens), and the lookup of documents by hash.

A hash covers the document's bytes in its token file, including the EOS, so copies of a document
have the same hash wherever they are. `xxhash.xxh3_128_hexdigest(tokens.tobytes())` computes it.

A document index keeps a sorted table of (upper half of the hash, lower half, document), with 24
bytes per document.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import xxhash

from maxtext_olmo import atomic
from maxtext_olmo.corpus import scan
from maxtext_olmo.corpus import sorted_table
from maxtext_olmo.corpus.storage import LocalStorage
from maxtext_olmo.corpus.token_files import TokenFiles

WIDTH = 3
_DIGESTS_AT_ONCE = 1 << 16
_HEX = re.compile("[0-9a-fA-F]{32}")


def check_hash(text: Any) -> str:
  """Returns the text if it is a hash; raises ValueError if not."""
  if not isinstance(text, str) or not _HEX.fullmatch(text):
    raise ValueError(f"expected a hash of 32 hexadecimal digits, found {text!r}.")
  return text


def find_hashes(table: sorted_table.SortedTable, hashes: Sequence[str]) -> list[np.ndarray]:
  """Returns the documents (uint64) of each hash; raises ValueError for a malformed hash."""
  numbers = [int(check_hash(text), 16) for text in hashes]
  halves = np.array([divmod(number, 1 << 64) for number in numbers], np.uint64).reshape(-1, 2)
  which, records = table.find_all(halves[:, 0])
  same = table.column(records, 1) == halves[which, 1]
  return sorted_table.split_by(which[same], table.column(records[same], 2), len(hashes))


def hash_documents(
    files: TokenFiles,
    file_id: int,
    n_tokens: int,
    spans: Iterator[np.ndarray],
    path: str,
    advance: Callable[[int], None],
) -> None:
  """Writes the hash of each document of a file, reading its tokens once.

  Args:
    spans: Blocks of rows (first token, length), one row per document.
    path: Path of the file of hashes, 16 bytes each.
    advance: Called with the number of bytes read since the last call.
  """
  reader = _Reader(files, file_id, n_tokens, advance)
  with atomic.write_errors(path), open(path, "wb") as out:
    for block in spans:
      digests = [reader.digest(first, count) for first, count in block.tolist()]
      out.write(np.frombuffer(b"".join(digests), ">u8").astype("<u8").tobytes())


def records(folder: str, counts: Sequence[int], name: Callable[[int], str]) -> Iterator[np.ndarray]:
  """Yields the table records of all documents, from the files that `hash_documents` wrote."""
  document = 0
  for number, count in enumerate(counts):
    place = document
    if count:
      path = os.path.join(folder, name(number))
      for piece in LocalStorage().pieces(path, piece_bytes=16 * _DIGESTS_AT_ONCE):
        halves = np.frombuffer(piece, "<u8").reshape(-1, 2)
        numbers = np.arange(place, place + len(halves), dtype="<u8")
        yield np.concatenate([halves, numbers[:, None]], axis=1)
        place += len(halves)
    document += count


class _Reader:
  """Hashes ranges of a file, which must be requested in ascending order."""

  def __init__(
      self, files: TokenFiles, file_id: int, n_tokens: int, advance: Callable[[int], None]
  ):
    self._width = files.dtype.itemsize
    self._pieces = files.storage.pieces(
        files.paths[file_id],
        int(files.data_offsets[file_id]),
        n_tokens * self._width,
        scan.CHUNK_BYTES,
    )
    self._piece, self._begin = memoryview(b""), 0
    self._advance = advance

  def digest(self, first: int, count: int) -> bytes:
    """Returns the hash of `count` tokens from token `first`."""
    start, end = first * self._width, (first + count) * self._width
    if end - self._begin <= len(self._piece) and start >= self._begin:
      return xxhash.xxh3_128_digest(self._piece[start - self._begin : end - self._begin])
    hashed = xxhash.xxh3_128()
    while start < end:
      if start - self._begin >= len(self._piece):
        self._begin += len(self._piece)
        self._piece = memoryview(next(self._pieces))
        self._advance(len(self._piece))
        continue
      some = self._piece[start - self._begin : end - self._begin]
      hashed.update(some)
      start += len(some)
    return hashed.digest()
