"""Checksums of token files: of a whole file, or of its pieces.

    xxh3:<hex>, sha256:<hex>       of the whole file, which one worker must read from its beginning
    xxh3-pieces-268435456:<hex>    xxh3 of the xxh3 sums of the file's pieces of 268,435,456 bytes

The sums of pieces can be computed at the same time, on different machines.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Any, Protocol

import xxhash

from maxtext_olmo.corpus.work.pieces import PIECE_BYTES
from maxtext_olmo.errors import ConfigError

# The names that users choose from.
CHECKSUMS = ("xxh3", "sha256", "xxh3-pieces")
_PIECES = re.compile(r"xxh3-pieces-([1-9][0-9]{0,15})")


class Hash(Protocol):
  """A checksum that is being computed."""

  def update(self, data: Any) -> None:
    """Adds the next bytes."""

  def hexdigest(self) -> str:
    """Returns the checksum of the bytes so far, as hexadecimal digits."""


def full_name(algorithm: str) -> str:
  """Returns the name under which an index records a checksum; raises ConfigError if unknown."""
  name = f"{algorithm}-{PIECE_BYTES}" if algorithm == "xxh3-pieces" else algorithm
  new_hash(name)
  return name


def new_hash(algorithm: str) -> Hash:
  """Returns a hash object with `update` and `hexdigest`."""
  if algorithm == "sha256":
    return hashlib.sha256()
  if algorithm == "xxh3":
    return xxhash.xxh3_128()
  if (size := piece_bytes(algorithm)) is not None:
    return _PiecesHash(size)
  raise ConfigError(f"Unknown checksum {algorithm!r}: it must be one of {', '.join(CHECKSUMS)}.")


def piece_bytes(algorithm: str) -> int | None:
  """Returns the size of the pieces that an algorithm sums; None if it sums the whole file."""
  found = _PIECES.fullmatch(algorithm)
  return None if found is None else int(found[1])


def join_pieces(digests: Iterable[str]) -> str:
  """Returns the checksum of a file (hex) from the xxh3 sums (hex) of its pieces, in order."""
  return xxhash.xxh3_128_hexdigest(b"".join(map(bytes.fromhex, digests)))


def split_pieces(sums: str) -> list[str]:
  """Returns the xxh3 sums (hex) of pieces from one text, as `PieceSums` and an index have them."""
  width = 2 * xxhash.xxh3_128().digest_size
  return [sums[i : i + width] for i in range(0, len(sums), width)]


class PieceSums:
  """Computes the xxh3 sums of consecutive pieces of `size` bytes; the last may be shorter."""

  def __init__(self, size: int):
    self._size = size
    self._digests: list[str] = []
    self._current = xxhash.xxh3_128()
    self._held = 0  # Number of bytes of the current piece.

  def update(self, data: Any) -> None:
    """Adds the next bytes."""
    view = memoryview(data).cast("B")
    while len(view):
      some = view[: self._size - self._held]
      self._current.update(some)
      self._held += len(some)
      view = view[len(some) :]
      if self._held == self._size:
        self._digests.append(self._current.hexdigest())
        self._current, self._held = xxhash.xxh3_128(), 0

  def hexdigest(self) -> str:
    """Returns the sums of the pieces, one after another."""
    return "".join([*self._digests, self._current.hexdigest() if self._held else ""])


class _PiecesHash(PieceSums):
  """Computes the checksum of a file from the sums of its pieces."""

  def hexdigest(self) -> str:
    return join_pieces(split_pieces(super().hexdigest()))
