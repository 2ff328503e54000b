"""Hashes of documents (xxh3-128 of their tokens), and the lookup of documents by hash.

A hash covers the document's bytes in its token file, including the EOS, so copies of a document
have the same hash wherever they are. `xxhash.xxh3_128_hexdigest(tokens.tobytes())` computes it.

A document index keeps a sorted table of (upper half of the hash, lower half, document), with 24
bytes per document.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import xxhash

from maxtext_olmo.corpus import scan
from maxtext_olmo.corpus import sorted_table
from maxtext_olmo.corpus.storage import LocalStorage
from maxtext_olmo.corpus.storage import Storage
from maxtext_olmo.corpus.work.pieces import SourceFile

WIDTH = 3
DIGEST_BYTES = 16
_AT_ONCE = 1 << 16
_HEX = re.compile("[0-9a-fA-F]{32}")


def check_hash(text: Any) -> str:
  """Returns the text if it is a hash; raises ValueError if not."""
  if not isinstance(text, str) or not _HEX.fullmatch(text):
    raise ValueError(f"expected a hash of 32 hexadecimal digits, found {text!r}.")
  return text


def find_hashes(table: sorted_table.SortedTable, hashes: Sequence[str]) -> list[np.ndarray]:
  """Returns, for each hash, the documents that have it (uint64).

  Raises:
    ValueError: A hash is malformed.
  """
  numbers = [int(check_hash(text), 16) for text in hashes]
  halves = np.array([divmod(number, 1 << 64) for number in numbers], np.uint64).reshape(-1, 2)
  which, records = table.find_all(halves[:, 0])
  same = table.column(records, 1) == halves[which, 1]
  return sorted_table.split_by(which[same], table.column(records[same], 2), len(hashes))


def as_numbers(digests: bytes) -> np.ndarray:
  """Returns digests as pairs of numbers (`<u8`): the upper half, then the lower half."""
  return np.frombuffer(digests, ">u8").astype("<u8")


def records(counts: Sequence[int], path: Callable[[int], str]) -> Iterator[np.ndarray]:
  """Yields the table records of all documents.

  Args:
    counts: Number of documents of each token file.
    path: Function that returns the path of the hashes of a token file, as `as_numbers` gives them.
  """
  document = 0
  for number, count in enumerate(counts):
    place = document
    if count:
      for piece in LocalStorage().pieces(path(number), piece_bytes=DIGEST_BYTES * _AT_ONCE):
        halves = np.frombuffer(piece, "<u8").reshape(-1, 2)
        numbers = np.arange(place, place + len(halves), dtype="<u8")
        yield np.concatenate([halves, numbers[:, None]], axis=1)
        place += len(halves)
    document += count


class RangeHasher:
  """Hashes ranges of a token file, which must be requested in ascending order."""

  def __init__(self, storage: Storage, source: SourceFile):
    self._width = source.token_dtype.itemsize
    size = source.n_tokens * self._width
    self._pieces = storage.pieces(source.path, source.data_offset, size, scan.CHUNK_BYTES)
    self._piece, self._begin = memoryview(b""), 0

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
        continue
      some = self._piece[start - self._begin : end - self._begin]
      hashed.update(some)
      start += len(some)
    return hashed.digest()
