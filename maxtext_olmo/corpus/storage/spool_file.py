"""A spool file: byte ranges of a corpus, each preceded by its checksum, and a table at the end.

    ┌──────────┬─────────┬──────────┬─────────┬ ─ ─ ┬───────────────────┬─────────┐
    │ checksum │ range 0 │ checksum │ range 1 │     │ names and places  │ trailer │
    └──────────┴─────────┴──────────┴─────────┴ ─ ─ ┴───────────────────┴─────────┘

The name of a range is 32 bytes: a digest of the token file's URL and version, the offset and the
size. The checksum covers both the name and the bytes of a range, so one range cannot be mistaken
for another. A spool file is written under a temporary name and renamed once it is complete; it
never changes afterwards. A spool file that lost data in a power failure fails its checksums, so no
fsync is needed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
import time
import uuid

import numpy as np
import xxhash

from maxtext_olmo.corpus.storage import open_files
from maxtext_olmo.errors import CorpusError

SUFFIX, PART_SUFFIX = ".spool", ".part"
_NAME_BYTES = 32
_CHECKSUM_BYTES = 16
_TRAILER = struct.Struct("<8sQQ")  # The format, the number of ranges, the checksum of the table.
_FORMAT = b"spool v1"
# Extra bytes per range and per file, in addition to the bytes of the ranges.
RANGE_OVERHEAD = _CHECKSUM_BYTES + _NAME_BYTES + 8
FILE_OVERHEAD = _TRAILER.size
_MAX_VECTORS = 512  # Ranges per system call, which takes 1024 buffers: each range needs two.


def make_names(
    digests: np.ndarray, sources: np.ndarray, offsets: np.ndarray, sizes: np.ndarray
) -> np.ndarray:
  """Returns the names of ranges as a uint64 array of shape (ranges, 4).

  Args:
    digests: For each file, the two words of `file_digest`.
    sources: The file of each range.
    offsets: The first byte of each range.
    sizes: The number of bytes of each range.
  """
  names = np.empty((len(sources), 4), "<u8")
  names[:, :2] = digests[sources]
  names[:, 2] = offsets
  names[:, 3] = sizes
  return names


def file_digest(path: str, version: str) -> tuple[int, int]:
  """Returns a digest of one version of a file, as two words."""
  digest = xxhash.xxh3_128_intdigest(f"{path}\n{version}".encode())
  return digest & (2**64 - 1), digest >> 64


def keys_of(names: np.ndarray) -> np.ndarray:
  """Returns a 64-bit hash of each name."""
  factors = np.array([1, 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)
  mixed = np.zeros(len(names), np.uint64)
  for column, factor in zip(names.T, factors):
    mixed = (mixed ^ column) * factor
    mixed ^= mixed >> np.uint64(31)
  return mixed


class SpoolWriter:
  """Writes one spool file; not thread-safe.

  Args:
    folder: Directory of the file.
    max_bytes: Largest size of the file. While the file is being written, it has exactly this size,
      so that other processes count the space as used.

  Attributes:
    file: The open file, from which ranges can be read immediately.
    path: The path of the file while it is being written.
    final_path: Its path once it is finished.
    began: When the file was created, as a value of `time.monotonic`.
  """

  def __init__(self, folder: str, max_bytes: int):
    # Names sort by age. The lock tells other processes that this one is alive and writing.
    name = f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}"
    self.path = os.path.join(folder, name + PART_SUFFIX)
    self.final_path = os.path.join(folder, name + SUFFIX)
    self.file = open_files.OpenFile(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644))
    fcntl.flock(self.file.fd, fcntl.LOCK_EX)
    os.ftruncate(self.file.fd, max_bytes)
    self.began = time.monotonic()
    self._names: list[np.ndarray] = []
    self._places: list[np.ndarray] = []
    self._end = 0
    self._room = max_bytes - FILE_OVERHEAD

  @property
  def room(self) -> int:
    """Bytes that can still be written, including `RANGE_OVERHEAD` for each range."""
    return self._room

  def append(self, names: np.ndarray, data: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Writes ranges and returns their places in the file; there must be room for them.

    Args:
      names: The names of the ranges.
      data: A buffer (uint8) that holds the bytes of all ranges.
      places: Where each range begins in `data`.
    """
    buffer = data.data
    sizes = names[:, 3].astype(np.int64)
    ends = np.cumsum(sizes + _CHECKSUM_BYTES)
    spots = self._end + ends - sizes - _CHECKSUM_BYTES
    for first in range(0, len(names), _MAX_VECTORS):
      pieces: list[bytes | memoryview] = []
      some = slice(first, first + _MAX_VECTORS)
      for name, place, size in zip(names[some], places[some].tolist(), sizes[some].tolist()):
        view = buffer[place : place + size]
        pieces += [_checksum(name.tobytes(), view), view]
      _write_all(self.file.fd, pieces, int(spots[first]))
    self._names.append(names)
    self._places.append(spots)
    self._end += int(ends[-1]) if len(ends) else 0
    self._room -= int(sizes.sum()) + RANGE_OVERHEAD * len(names)
    return spots

  def finish(self) -> int:
    """Completes and renames the file, and returns its size."""
    names = np.concatenate([np.zeros((0, 4), "<u8"), *self._names])
    places = np.concatenate([np.zeros(0, np.int64), *self._places])
    table = names.tobytes() + places.astype("<u8").tobytes()
    trailer = _TRAILER.pack(_FORMAT, len(names), xxhash.xxh3_64_intdigest(table))
    _write_all(self.file.fd, [table, trailer], self._end)
    size = self._end + len(table) + len(trailer)
    os.ftruncate(self.file.fd, size)
    os.rename(self.path, self.final_path)
    return size

  def discard(self) -> None:
    """Deletes the unfinished file."""
    with contextlib.suppress(OSError):
      os.unlink(self.path)


def read_table(path: str) -> tuple[np.ndarray, np.ndarray, int]:
  """Returns the names and places of the ranges in a spool file, and the size of the file.

  Raises:
    CorpusError: The file is damaged.
    OSError: The file cannot be read.
  """
  # Non-blocking, because opening a FIFO would wait for a writer.
  file = open_files.OpenFile(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
  found = os.fstat(file.fd)
  if not stat.S_ISREG(found.st_mode):
    raise CorpusError(f"{path} is not a regular file.")
  size = found.st_size
  trailer = os.pread(file.fd, _TRAILER.size, max(0, size - _TRAILER.size))
  if len(trailer) == _TRAILER.size:
    magic, count, checksum = _TRAILER.unpack(trailer)
    length = count * (_NAME_BYTES + 8)
    begin = size - _TRAILER.size - length
    if magic == _FORMAT and 0 <= begin and length <= size:
      table = os.pread(file.fd, length, begin)
      if len(table) == length and xxhash.xxh3_64_intdigest(table) == checksum:
        names = np.frombuffer(table, "<u8", 4 * count).reshape(count, 4)
        return names, np.frombuffer(table, "<u8", offset=count * _NAME_BYTES), size
  raise CorpusError(f"{path} is not a complete spool file.")


def read_range(file: open_files.OpenFile, place: int, name: bytes, out: memoryview) -> bool:
  """Reads a range into `out`; returns False if the data is damaged or is a different range."""
  checksum = bytearray(_CHECKSUM_BYTES)
  read = os.preadv(file.fd, [checksum, out], place)
  return read == _CHECKSUM_BYTES + len(out) and checksum == _checksum(name, out)


def is_abandoned(path: str) -> bool:
  """Returns whether the process that was writing an unfinished file has died.

  Returns False for a file that may not be written: its owner's processes take care of it.
  """
  try:
    # Over NFS, an exclusive lock needs a descriptor that is open for writing.
    file = open_files.OpenFile(os.open(path, os.O_RDWR | os.O_NONBLOCK))
    fcntl.flock(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except (BlockingIOError, FileNotFoundError, PermissionError):
    return False
  return True


def _checksum(name: bytes, data: memoryview) -> bytes:
  digest = xxhash.xxh3_128(name)
  digest.update(data)
  return digest.digest()


def _write_all(fd: int, pieces: list[bytes | memoryview], offset: int) -> None:
  written, expected = os.pwritev(fd, pieces, offset), sum(len(piece) for piece in pieces)
  if written < expected:  # The disk is nearly full, or a signal arrived.
    whole = memoryview(b"".join(pieces))
    while written < expected:
      written += os.pwrite(fd, whole[written:], offset + written)
