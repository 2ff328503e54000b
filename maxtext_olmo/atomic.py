"""Files that are whole or not there at all.

A reader never sees a half-written file, and a killed writer leaves the old file as it was: the
bytes go to a temporary name in the same directory, reach the disk, and only then take the real
name.
"""

import contextlib
import os
import uuid
from collections.abc import Iterator
from typing import BinaryIO


@contextlib.contextmanager
def atomic_writer(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
  """Opens a binary file that takes the name `path` when the block ends without an error."""
  path = os.fspath(path)
  directory, name = os.path.split(path)
  temporary = os.path.join(directory, f".{name}.{uuid.uuid4().hex}.tmp")
  try:
    with open(temporary, "xb") as file:
      yield file
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, path)
  except BaseException:
    with contextlib.suppress(FileNotFoundError):
      os.unlink(temporary)
    raise
  _sync_directory(directory or ".")


def write_atomically(path: str | os.PathLike[str], content: str | bytes) -> None:
  """Writes a whole file at once; text is UTF-8."""
  with atomic_writer(path) as file:
    file.write(content.encode() if isinstance(content, str) else content)


def _sync_directory(directory: str) -> None:
  """Makes the new name itself survive a power cut, where the file system allows it."""
  # Mounted object stores refuse fsync on a directory; the rename has happened all the same.
  with contextlib.suppress(OSError):
    descriptor = os.open(directory, os.O_RDONLY)
    try:
      os.fsync(descriptor)
    finally:
      os.close(descriptor)
