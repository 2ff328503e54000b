"""Functions that write files, atomically or line by line, with errors that name the file.

With an atomic write, a reader never sees a half-written file, and a killed writer leaves the old
file unchanged: the bytes are written to a temporary file in the same directory and synced to disk
before the temporary file is renamed to the final path.

Only regular files are replaced or appended to. An error from the operating system (no space, no
permission, a read-only mount) becomes a `WriteError`.
"""

import contextlib
import errno
import fcntl
import os
import stat
import uuid
from collections.abc import Iterator
from typing import BinaryIO

from maxtext_olmo import errors

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextlib.contextmanager
def atomic_writer(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
  """Opens a temporary binary file, and renames it to `path` if the block ends without an error."""
  path = os.fspath(path)
  directory, name = os.path.split(path)
  temporary = os.path.join(directory, f".{name}.{uuid.uuid4().hex}.tmp")
  with write_errors(path):
    _check_regular(path)
    try:
      with open(temporary, "xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
      os.replace(temporary, path)
    except BaseException:
      with contextlib.suppress(OSError, ValueError):
        os.unlink(temporary)
      raise
  _sync_directory(directory or ".")


def write_atomically(path: str | os.PathLike[str], content: str | bytes) -> None:
  """Writes a whole file atomically; text is encoded as UTF-8."""
  with atomic_writer(path) as file:
    file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def locked(path: str | os.PathLike[str]) -> Iterator[bool]:
  """Holds the lock of a file that several processes may write, and creates the file's directory.

  The lock is released even if the process dies. Yields whether there is a lock: some network file
  systems have none. Without one, several processes may write the file, each atomically.
  """
  path = os.fspath(path)
  os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
  with open(f"{path}.lock", "ab", opener=open_at_once) as lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
      if error.errno not in _NO_LOCKS:
        raise
      yield False
    else:
      yield True


def open_at_once(path: str, flags: int) -> int:
  """Opens a file; without O_NONBLOCK, opening a FIFO would wait for its other end."""
  return os.open(path, flags | os.O_NONBLOCK, 0o666)


def move(source: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
  """Renames a complete file to its final path, and creates the directory if it is missing."""
  directory = os.path.dirname(os.fspath(path)) or "."
  with write_errors(path):
    os.makedirs(directory, exist_ok=True)
    _check_regular(os.fspath(path))
    os.replace(source, path)
  _sync_directory(directory)


class LineWriter:
  """Appends whole lines to a text file, without buffering them in this process.

  Creates the file's directory if it is missing.
  """

  def __init__(self, path: str | os.PathLike[str]):
    self.path = os.fspath(path)
    with write_errors(self.path):
      os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
      _check_regular(self.path)
      self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115 - open until close()
      end = self._file.seek(0, os.SEEK_END)
      self._ends_in_line = not end or os.pread(self._file.fileno(), 1, end - 1) == b"\n"

  def write(self, line: str) -> None:
    """Appends a line; starts a new line first if a killed process left a partial one."""
    data = ("" if self._ends_in_line else "\n").encode() + line.encode() + b"\n"
    with write_errors(self.path):
      self._ends_in_line = False
      while data:
        data = data[self._file.write(data) :]
      self._ends_in_line = True

  def close(self) -> None:
    """Closes the file."""
    self._file.close()


@contextlib.contextmanager
def write_errors(path: str | os.PathLike[str]) -> Iterator[None]:
  """Turns operating system errors in a block that writes `path` into a `WriteError`."""
  try:
    yield
  except errors.MaxtextOlmoError:
    raise
  except OSError as error:
    raise errors.WriteError(_message(os.fspath(path), error)) from error
  except ValueError as error:
    if "\0" not in os.fspath(path):
      raise
    raise errors.WriteError(
        f"Cannot write {os.fspath(path)!r}: the path contains a NUL character. Choose another path."
    ) from error


def _message(path: str, error: OSError) -> str:
  why = (error.strerror or str(error)).rstrip(".")
  if error.errno in _FULL:
    remedy = "Free some space, or choose another directory."
  elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
    remedy = "Choose a directory that this user may write to."
  else:
    remedy = "Choose another path."
  return f"Cannot write {path}: {why}.{_free_space(path)} {remedy}"


def _free_space(path: str) -> str:
  """Returns a sentence about the free space in the nearest existing directory; "" if unknown."""
  directory = os.path.dirname(os.path.abspath(path))
  while not os.path.isdir(directory) and directory != os.path.dirname(directory):
    directory = os.path.dirname(directory)
  try:
    found = os.statvfs(directory)
  except OSError:
    return ""
  return f" {directory} has {found.f_bavail * found.f_frsize:,} bytes of free space."


def _check_regular(path: str) -> None:
  """Raises unless `path` is a regular file or does not exist."""
  try:
    mode = os.stat(path).st_mode
  except FileNotFoundError:
    return
  if not stat.S_ISREG(mode):
    raise errors.WriteError(
        f"Cannot write {path}: it exists and is not a regular file. Choose another path."
    )


def _sync_directory(directory: str) -> None:
  """Syncs a directory, so that a rename in it survives a power cut."""
  # Mounted object stores reject fsync on a directory, but there the rename is already complete.
  with contextlib.suppress(OSError):
    descriptor = os.open(directory, os.O_RDONLY)
    try:
      os.fsync(descriptor)
    finally:
      os.close(descriptor)
