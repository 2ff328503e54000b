"""A file that is read in pieces, as one stream."""

from __future__ import annotations

import io
from collections.abc import Iterator


class PieceReader(io.RawIOBase):
  """Presents the pieces of a file as one byte stream.

  >>> io.BufferedReader(PieceReader(iter([b"ab", b"", b"c\\nd"]))).readlines()
  [b'abc\\n', b'd']
  """

  def __init__(self, pieces: Iterator[bytes]):
    super().__init__()
    self._pieces = pieces
    self._left = memoryview(b"")

  def readable(self) -> bool:
    """Returns True."""
    return True

  def readinto(self, buffer) -> int:
    """Copies the next bytes into a buffer and returns their number; 0 at the end."""
    while not self._left:
      piece = next(self._pieces, None)
      if piece is None:
        return 0
      self._left = memoryview(piece)
    count = min(len(self._left), len(buffer))
    buffer[:count], self._left = self._left[:count], self._left[count:]
    return count
