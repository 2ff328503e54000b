"""Opens a file or an object as a byte stream, for libraries that read from file objects.

A stream that is read to its end sends a few large requests; one of which only the beginning is read
sends a small one:

    object   ├256K┤├─512K─┤├────1M────┤├────────2M────────┤ … 8 MiB per request
"""

from __future__ import annotations

import io
import os
from typing import IO, Any

from maxtext_olmo.corpus import urls
from maxtext_olmo.corpus.storage import router

_FIRST_BYTES = 256 << 10
_MOST_BYTES = 8 << 20


def open_bytes(path: str) -> IO[bytes]:
  """Opens a path or URL for reading, at its first byte.

  >>> import tempfile
  >>> with tempfile.NamedTemporaryFile() as file, open_bytes(file.name) as stream:
  ...   stream.read()
  b''

  Args:
    path: Path of a file, or URL of an object.

  Raises:
    CorpusError: The URL cannot be read; so do the methods of its stream.
    OSError: The file cannot be opened.
  """
  if not urls.is_url(path):
    return open(path, "rb")
  return io.BufferedReader(_Stream(path))


class _Stream(io.RawIOBase):
  """The bytes of an object; requests more at a time the more it is read in sequence."""

  def __init__(self, path: str):
    super().__init__()
    self._path = path
    self._storage = router.open_storage()
    self._size = self._storage.size(path)
    self._place = 0
    self._block = memoryview(b"")
    self._block_start = 0
    self._request_bytes = _FIRST_BYTES

  def readable(self) -> bool:
    """Returns True."""
    return True

  def seekable(self) -> bool:
    """Returns True."""
    return True

  def tell(self) -> int:
    """Returns the place of the next byte."""
    return self._place

  def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
    """Moves to a place and returns it."""
    start = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence]
    if start + offset < 0:
      raise ValueError(f"Cannot seek to byte {start + offset} of {self._path}.")
    self._place = start + offset
    return self._place

  def readinto(self, buffer: Any) -> int:
    """Copies the next bytes into a buffer and returns their number; 0 at the end."""
    if self._place >= self._size or not len(buffer):
      return 0
    at = self._place - self._block_start
    if not 0 <= at < len(self._block):
      self._fetch(len(buffer))
      at = 0
    count = min(len(self._block) - at, len(buffer))
    buffer[:count] = self._block[at : at + count]
    self._place += count
    return count

  def _fetch(self, wanted: int) -> None:
    """Requests the next bytes: at least `wanted`, up to the largest request."""
    is_next = self._place == self._block_start + len(self._block)
    self._request_bytes = min(2 * self._request_bytes, _MOST_BYTES) if is_next else _FIRST_BYTES
    size = max(self._request_bytes, min(wanted, _MOST_BYTES))
    size = min(size, self._size - self._place)
    self._block = memoryview(self._storage.read(self._path, self._place, size))
    self._block_start = self._place
