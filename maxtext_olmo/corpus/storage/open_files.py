"""A cache of open files: opening one costs as much as reading a window, and on a mount much more.

Where all files of a corpus may be open at once, the descriptors of a batch are one array lookup,
however many files there are. Where they may not, the least recently used file is closed first.
"""

from __future__ import annotations

import collections
import errno
import functools
import os
import resource
import threading
import weakref
from collections.abc import Mapping, Sequence

import numpy as np

from maxtext_olmo.corpus.storage import base

# The share of free descriptors to use; checkpoints, sockets and the like need some later.
_SHARE = 0.75
_LEAST = 16
_NO_LIMIT = 1 << 20


class OpenFile:
  """An open descriptor that is closed when nothing refers to it any more.

  So a thread can read from a file that another thread evicts from the cache at the same time.
  """

  __slots__ = ("fd",)

  def __init__(self, fd: int):
    self.fd = fd

  def __del__(self, close=os.close) -> None:
    close(self.fd)


class _Table:
  """The open files of a list of paths, by number; they stay open while the table exists."""

  def __init__(self, paths: Sequence[str], opened: Mapping[str, OpenFile]):
    self.paths = paths
    self.files = [opened.get(path) for path in paths]
    self.descriptors = np.array([-1 if file is None else file.fd for file in self.files], np.int32)


class OpenFiles:
  """Open files by path; safe for threads, and empty after a fork.

  Args:
    most: How many stay open. None means as many as the process can spare, shared with all other
      objects of this class that were given None.
  """

  def __init__(self, most: int | None):
    self._given = most
    self.forget()
    with _all_lock:
      _ALL.add(self)

  def forget(self) -> None:
    """Drops all files, and makes a new lock."""
    self._lock = threading.Lock()
    self._files: collections.OrderedDict[str, OpenFile] = collections.OrderedDict()
    self._table: _Table | None = None
    self._most = self._given or _room_for(self)

  def __len__(self) -> int:
    return len(self._files)

  def open(self, path: str) -> OpenFile:
    """Opens a file that is not kept; raises the OSError of opening it."""
    return OpenFile(self._open_descriptor(path))

  def get(self, path: str) -> OpenFile:
    """Returns an open file, which is kept; raises the OSError of opening it."""
    with self._lock:
      file = self._files.get(path)
      if file is not None:
        self._files.move_to_end(path)
        return file
    # Not under the lock: on a network mount, opening takes milliseconds.
    file = self.open(path)
    self._most = self._given or _room_for(self)
    closing = []  # Closed when this function has returned, not under the lock either.
    with self._lock:
      file = self._files.setdefault(path, file)
      self._files.move_to_end(path)
      while len(self._files) > self._most:
        closing.append((self._files.popitem(last=False), self._table))
        self._table = None
    return file

  def pin(self, paths: Sequence[str], sources: np.ndarray) -> base.Pinned | None:
    """Returns a descriptor per source; None where more files are needed than may be open.

    Args:
      paths: Of all files; fastest where it is the same object each time.
      sources: Indices into `paths`.
    """
    with self._lock:
      if len(paths) > self._most:
        self._table = None
      elif self._table is None or self._table.paths is not paths:
        self._table = _Table(paths, self._files)
      table = self._table
    try:
      if table is None:
        return self._pin_some(paths, sources)
      return self._pin_table(table, sources)
    except OSError as error:
      if error.errno == errno.EMFILE:  # The files opened so far are all in use.
        return None
      raise

  def _pin_table(self, table: _Table, sources: np.ndarray) -> base.Pinned:
    descriptors = table.descriptors[sources]
    if len(descriptors) and descriptors.min() < 0:
      self._open_missing(table, np.unique(sources[descriptors < 0]).tolist())
      descriptors = table.descriptors[sources]
    return base.Pinned(descriptors, table.files)

  def _open_missing(self, table: _Table, numbers: list[int]) -> None:
    for number in numbers:
      file = self.get(table.paths[number])
      with self._lock:
        if table.files[number] is None:
          table.files[number] = file
          table.descriptors[number] = file.fd

  def _pin_some(self, paths: Sequence[str], sources: np.ndarray) -> base.Pinned | None:
    """Pins where not all files can stay open."""
    numbers, places = np.unique(sources, return_inverse=True)
    if len(numbers) > self._most:
      return None
    files: list[OpenFile | None] = [self.get(paths[number]) for number in numbers.tolist()]
    descriptors = np.array([file.fd for file in files if file is not None], np.int32)
    return base.Pinned(descriptors[places], files)

  def _open_descriptor(self, path: str) -> int:
    try:
      return os.open(path, os.O_RDONLY)
    except OSError as error:
      if error.errno != errno.EMFILE:
        raise
    # The process has no descriptor left, and this cache may hold many: opening files again later
    # is better than stopping.
    with self._lock:
      closing = [*self._files.values(), self._table]
      self._files.clear()
      self._table = None
    closing.clear()
    return os.open(path, os.O_RDONLY)


_ALL: weakref.WeakSet[OpenFiles] = weakref.WeakSet()
_all_lock = threading.Lock()


def _room_for(files: OpenFiles) -> int:
  """Returns how many files `files` may keep open, given what the other caches hold."""
  with _all_lock:
    others = sum(len(other) for other in _ALL if other is not files)
  return max(_LEAST, int(_SHARE * (_descriptor_limit() - _held_at_first())) - others)


def _descriptor_limit() -> int:
  soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
  return _NO_LIMIT if soft == resource.RLIM_INFINITY else soft


@functools.cache
def _held_at_first() -> int:
  """Returns how many descriptors the process held before any file was opened here."""
  try:
    return len(os.listdir("/proc/self/fd"))
  except OSError:
    return 0


def _forget_after_fork() -> None:
  # A thread of the parent may have held a lock at the fork; nothing would release it here.
  global _all_lock
  _all_lock = threading.Lock()
  for files in list(_ALL):
    files.forget()


os.register_at_fork(after_in_child=_forget_after_fork)
