"""A cache of open files: opening a file takes as long as reading a window, and longer on a mount.

If all files of a corpus may be open at once, finding the descriptors of a batch is one array
lookup, however many files there are. Otherwise the least recently used file is closed first. A file
that is opened again must be the file that was first found at its path.
"""

from __future__ import annotations

import collections
import errno
import functools
import os
import resource
import stat
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from maxtext_olmo.corpus import paths as paths_lib
from maxtext_olmo.corpus import urls
from maxtext_olmo.corpus.storage import base
from maxtext_olmo.errors import CorpusError

# Share of the free descriptors to use; checkpoints, sockets and the like need some later.
_SHARE = 0.75
_LEAST = 16
_NO_LIMIT = 1 << 20
_MOST_TABLES = 4  # Token files and loss masks, each for training and for evaluation.
# Without O_NONBLOCK, opening a FIFO would block; with it, a FIFO can be opened and rejected. The
# flag has no effect on regular files.
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


class FileId(NamedTuple):
  """The metadata that shows whether a file has been changed or replaced."""

  size: int
  mtime_ns: int
  inode: int
  ctime_ns: int

  @classmethod
  def of(cls, found: os.stat_result) -> FileId:
    """Returns the id of a file from its `stat`."""
    return cls(found.st_size, found.st_mtime_ns, found.st_ino, found.st_ctime_ns)

  def matches(self, other: FileId) -> bool:
    """Returns whether both are the same file, unchanged."""
    # Either the inode or the change time must match. A mount of an object store may assign a new
    # inode on every lookup, but then the change time is that of the object. A new hard link or new
    # permissions update the change time, but not the inode.
    same = self.inode == other.inode or self.ctime_ns == other.ctime_ns
    return same and (self.size, self.mtime_ns) == (other.size, other.mtime_ns)


class OpenFile:
  """An open descriptor that is closed when the last reference to it is gone.

  One thread can therefore keep reading a file while another evicts it from the cache.
  """

  __slots__ = ("fd",)

  def __init__(self, fd: int):
    self.fd = fd

  def __del__(self, close: Callable[[int], None] = os.close) -> None:
    close(self.fd)


class _Table:
  """The open files of a list of paths, by index. They stay open while the table exists.

  Attributes:
    files: Open file of each path, or None.
    descriptors: Descriptor of each path, or -1.
    missing: Number of files that are not open yet.
  """

  def __init__(self, paths: Sequence[str], opened: Mapping[str, OpenFile]):
    self.paths = paths
    self.files = [opened.get(path) for path in paths]
    self.descriptors = np.array([-1 if file is None else file.fd for file in self.files], np.int32)
    self.missing = self.files.count(None)


class OpenFiles:
  """A cache of open files by path; safe to share between threads, and emptied in a forked child.

  Args:
    most: Number of files that stay open. None keeps as many open as the process can spare, given
      the files that other caches hold.
    seen: Ids of files that are known already, by path.

  Attributes:
    seen: Id of the file that was first found at each path.
  """

  def __init__(self, most: int | None, seen: Mapping[str, FileId] | None = None):
    self._given = most
    self.seen: dict[str, FileId] = dict(seen or {})
    self.forget()
    with _all_lock:
      _ALL.add(self)

  def forget(self) -> None:
    """Drops all files and creates a new lock."""
    self._lock = threading.Lock()
    self._files: collections.OrderedDict[str, OpenFile] = collections.OrderedDict()
    self._tables: dict[int, _Table] = {}  # By the identity of the list of paths.
    self._most = self._given or _room_for(self)

  def close(self) -> None:
    """Closes all files that are not being read; they are opened again when needed."""
    with self._lock:
      closing = [*self._files.values(), *self._tables.values()]
      self._files.clear()
      self._tables = {}
    closing.clear()

  def __len__(self) -> int:
    return len(self._files)

  def open(self, path: str) -> OpenFile:
    """Opens a file without caching it; raises OSError if that fails."""
    check_path(path)
    file = OpenFile(self._open_descriptor(path))
    check_regular(path, os.fstat(file.fd))
    return file

  def get(self, path: str) -> OpenFile:
    """Returns an open file and caches it; raises OSError if it cannot be opened."""
    with self._lock:
      file = self._files.get(path)
      if file is not None:
        self._files.move_to_end(path)
        return file
    # The file is opened without the lock, because this takes milliseconds on a network mount.
    file = self.open(path)
    self._compare_with_first(file, path)
    self._most = self._given or _room_for(self)
    closing = []  # Files in this list are closed when this function returns, without the lock.
    with self._lock:
      file = self._files.setdefault(path, file)
      self._files.move_to_end(path)
      while len(self._files) > self._most:
        closing.append((self._files.popitem(last=False), self._tables))
        self._tables = {}
    return file

  def pin(self, paths: Sequence[str], sources: np.ndarray) -> base.Pinned | None:
    """Returns a descriptor per path; None if more files are needed than may be open at once.

    Args:
      paths: Paths of all files; fastest if it is the same object each time.
      sources: Files to open, as indices into `paths`.
    """
    table = self._tables.get(id(paths))
    if table is not None and not table.missing:
      return base.Pinned(table.descriptors, table.files)
    with self._lock:
      table = self._tables.get(id(paths))
      if table is None and len(paths) <= self._most:
        if len(self._tables) >= _MOST_TABLES:
          self._tables.clear()
        table = self._tables[id(paths)] = _Table(paths, self._files)
    try:
      if table is None:
        return self._pin_some(paths, sources)
      return self._pin_table(table, sources)
    except OSError as error:
      if error.errno == errno.EMFILE:  # No descriptor is left, even after emptying the cache.
        return None
      raise

  def _pin_table(self, table: _Table, sources: np.ndarray) -> base.Pinned:
    missing = table.descriptors[sources] < 0
    if missing.any():
      self._open_missing(table, np.unique(sources[missing]).tolist())
    return base.Pinned(table.descriptors, table.files)

  def _open_missing(self, table: _Table, numbers: list[int]) -> None:
    for number in numbers:
      file = self.get(table.paths[number])
      with self._lock:
        if table.files[number] is None:
          table.files[number] = file
          table.descriptors[number] = file.fd
          table.missing -= 1

  def _compare_with_first(self, file: OpenFile, path: str) -> None:
    """Raises CorpusError if a file is not the one that was first found at its path."""
    now = FileId.of(os.fstat(file.fd))
    first = self.seen.setdefault(path, now)
    if not now.matches(first):
      raise CorpusError(
          f"{path} was replaced or changed while it was in use: it had {first.size} bytes (inode"
          f" {first.inode}), and now has {now.size} (inode {now.inode}). Restore the file, or build"
          " the index again and start a new run."
      )

  def _pin_some(self, paths: Sequence[str], sources: np.ndarray) -> base.Pinned | None:
    """Pins only the requested files, because not all files can be open at once."""
    numbers = np.unique(sources)
    if len(numbers) > self._most:
      return None
    files = [self.get(paths[number]) for number in numbers.tolist()]
    descriptors = np.full(len(paths), -1, np.int32)
    descriptors[numbers] = [file.fd for file in files]
    return base.Pinned(descriptors, files)

  def _open_descriptor(self, path: str) -> int:
    try:
      return os.open(path, _FLAGS)
    except OSError as error:
      if error.errno != errno.EMFILE:
        raise
    # The process has no descriptor left, and this cache may hold many. Reopening files later is
    # better than failing.
    self.close()
    return os.open(path, _FLAGS)


_ALL: weakref.WeakSet[OpenFiles] = weakref.WeakSet()
_all_lock = threading.Lock()


def room(limit: int | None = None) -> int:
  """Returns the number of files that the caches of this process may keep open together.

  Args:
    limit: Limit on open descriptors (`ulimit -n`); that of this process by default.
  """
  limit = _descriptor_limit() if limit is None else limit
  return max(_LEAST, int(_SHARE * (limit - _held_at_first())))


def _room_for(files: OpenFiles) -> int:
  """Returns the number of files that `files` may keep open, given the files in other caches."""
  with _all_lock:
    others = sum(len(other) for other in _ALL if other is not files)
  return max(_LEAST, room() - others)


def _descriptor_limit() -> int:
  soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
  return _NO_LIMIT if soft == resource.RLIM_INFINITY else soft


@functools.cache
def _held_at_first() -> int:
  """Returns the number of descriptors that the process held before this module opened any file."""
  try:
    return len(os.listdir("/proc/self/fd"))
  except OSError:
    return 0


def _forget_after_fork() -> None:
  # A thread of the parent may have held a lock during the fork; nothing would release it here.
  global _all_lock
  _all_lock = threading.Lock()
  for files in list(_ALL):
    files.forget()


os.register_at_fork(after_in_child=_forget_after_fork)


def check_path(path: str) -> None:
  """Raises CorpusError if a path cannot name a local file."""
  if paths_lib.is_url(path):
    raise CorpusError(
        f"{urls.redact(path)} is a URL, but LocalStorage reads local files only. Use"
        " `open_storage()`, which reads both."
    )
  if not paths_lib.is_valid(path):
    raise CorpusError(
        f"{path!r} is not a path: it contains a character that is not allowed in file names."
    )


def check_regular(path: str, found: os.stat_result) -> None:
  """Raises CorpusError if a path is a directory, a FIFO or a device."""
  if not stat.S_ISREG(found.st_mode):
    raise CorpusError(f"{path} is not a regular file. A corpus consists of regular files only.")
