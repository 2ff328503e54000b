"""A file of a storage as a binary stream, for parsers that want one (gzip, csv)."""

import io

from maxtext_olmo.corpus.storage.base import Storage


class _Pieces(io.RawIOBase):
  """The pieces of a file, read one after the other."""

  def __init__(self, storage: Storage, path: str, piece_bytes: int):
    self._pieces = storage.pieces(path, piece_bytes=piece_bytes)
    self._rest = memoryview(b"")

  def readable(self) -> bool:
    return True

  def readinto(self, buffer) -> int:
    if not self._rest:
      self._rest = memoryview(next(self._pieces, b""))
    count = min(len(buffer), len(self._rest))
    buffer[:count] = self._rest[:count]
    self._rest = self._rest[count:]
    return count


def open_stream(storage: Storage, path: str, piece_bytes: int = 1 << 20) -> io.BufferedReader:
  """Returns a buffered stream of a file, which cannot seek.

  Args:
    piece_bytes: how much is read from the storage at a time.
  """
  return io.BufferedReader(_Pieces(storage, path, piece_bytes))
