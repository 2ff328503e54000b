"""Storage on local disks and mounts.

Files stay open: opening one costs as much as reading a window, and on a mount much more. Where all
files of a corpus may be open at once, the descriptors of a batch are one array lookup, however many
files there are. Where they may not, the least recently used file is closed first; when it is opened
again, it must still be the file that it was.
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
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from maxtext_olmo.corpus import paths as paths_lib
from maxtext_olmo.corpus.storage import base
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.errors import MissingFileError

# The share of free descriptors to use; checkpoints, sockets and the like need some later.
_SHARE = 0.75
_LEAST = 16
_NO_LIMIT = 1 << 20
_MOST_TABLES = 4  # Token files and their loss masks, of training and of evaluation.
# Not blocking, so that opening a FIFO returns and can be refused; regular files do not differ.
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


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
  """The open files of a list of paths, by number; they stay open while the table exists.

  Attributes:
    files: The open file of each path, or None.
    descriptors: The descriptor of each path, or -1.
    missing: How many files are not open yet.
  """

  def __init__(self, paths: Sequence[str], opened: Mapping[str, OpenFile]):
    self.paths = paths
    self.files = [opened.get(path) for path in paths]
    self.descriptors = np.array([-1 if file is None else file.fd for file in self.files], np.int32)
    self.missing = self.files.count(None)


class OpenFiles:
  """Open files by path; safe for threads, and empty after a fork.

  Args:
    most: How many stay open. None means as many as the process can spare, shared with all other
      objects of this class that were given None.
  """

  def __init__(self, most: int | None):
    self._given = most
    self._first_seen: dict[str, tuple[int, ...]] = {}
    self.forget()
    with _all_lock:
      _ALL.add(self)

  def forget(self) -> None:
    """Drops all files, and makes a new lock."""
    self._lock = threading.Lock()
    self._files: collections.OrderedDict[str, OpenFile] = collections.OrderedDict()
    self._tables: dict[int, _Table] = {}  # By the identity of the list of paths.
    self._most = self._given or _room_for(self)

  def close(self) -> None:
    """Closes all files that nobody reads at the moment; they are opened again when needed."""
    with self._lock:
      closing = [*self._files.values(), *self._tables.values()]
      self._files.clear()
      self._tables = {}
    closing.clear()

  def __len__(self) -> int:
    return len(self._files)

  def open(self, path: str) -> OpenFile:
    """Opens a file that is not kept; raises the OSError of opening it."""
    _check_local(path)
    file = OpenFile(self._open_descriptor(path))
    if not stat.S_ISREG(os.fstat(file.fd).st_mode):
      raise CorpusError(f"{path} is not a regular file. Only regular files hold a corpus.")
    return file

  def get(self, path: str) -> OpenFile:
    """Returns an open file, which is kept; raises the OSError of opening it."""
    with self._lock:
      file = self._files.get(path)
      if file is not None:
        self._files.move_to_end(path)
        return file
    # Not under the lock: on a network mount, opening takes milliseconds.
    file = self.open(path)
    self._compare_with_first(file, path)
    self._most = self._given or _room_for(self)
    closing = []  # Closed when this function has returned, not under the lock either.
    with self._lock:
      file = self._files.setdefault(path, file)
      self._files.move_to_end(path)
      while len(self._files) > self._most:
        closing.append((self._files.popitem(last=False), self._tables))
        self._tables = {}
    return file

  def pin(self, paths: Sequence[str], sources: np.ndarray) -> base.Pinned | None:
    """Returns a descriptor per path; None where more files are needed than may be open.

    Args:
      paths: Of all files; fastest where it is the same object each time.
      sources: The files to open, as indices into `paths`.
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
      if error.errno == errno.EMFILE:  # The files opened so far are all in use.
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
    """Raises where a file is not the one that was first opened under its path."""
    found = os.fstat(file.fd)
    now = (found.st_size, found.st_ino, found.st_mtime_ns)
    first = self._first_seen.setdefault(path, now)
    if now != first:
      raise CorpusError(
          f"{path} was replaced or changed while it was in use: it had {first[0]} bytes (inode"
          f" {first[1]}), and now has {now[0]} (inode {now[1]}). Restore the file, or build the"
          " index again and start a new run."
      )

  def _pin_some(self, paths: Sequence[str], sources: np.ndarray) -> base.Pinned | None:
    """Pins where not all files can stay open."""
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
    # The process has no descriptor left, and this cache may hold many: opening files again later
    # is better than stopping.
    self.close()
    return os.open(path, _FLAGS)


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


class LocalStorage:
  """Reads local files; `fill` and `pin` keep them open between calls.

  Args:
    max_open_files: How many files stay open; the least recently used is closed first. None means
      as many as the process can spare.
  """

  wants_concurrency = False

  def __init__(self, max_open_files: int | None = None):
    if max_open_files is not None and max_open_files < 1:
      raise ConfigError(f"max_open_files must be at least 1, got {max_open_files}.")
    self.max_open_files = max_open_files
    self._files = OpenFiles(max_open_files)

  def __reduce__(self) -> tuple:
    return type(self), (self.max_open_files,)

  def __repr__(self) -> str:
    return f"{type(self).__name__}(max_open_files={self.max_open_files})"

  def close(self) -> None:
    """Closes the files that are kept open; the storage stays usable."""
    self._files.close()

  def size(self, path: str) -> int:
    """Returns the size of a file in bytes."""
    _check_local(path)
    try:
      return os.stat(path).st_size
    except OSError as error:
      raise _error("find the size of", path, error) from error

  def exists(self, path: str) -> bool:
    """Returns whether there is a file at `path`."""
    return os.path.exists(path)

  def read(self, path: str, offset: int = 0, size: int | None = None) -> bytes:
    """Returns `size` bytes from `offset`, or the rest of the file."""
    whole = os.stat(path).st_size if size is None and os.path.isfile(path) else 0
    if whole > base.LARGEST_WHOLE:
      raise CorpusError(
          f"{path} has {whole} bytes, and would be read into memory whole: indexes, manifests and"
          f" boundary files have at most {base.LARGEST_WHOLE}. Is it the right file?"
      )
    return b"".join(self.pieces(path, offset, size, size or base.PIECE_BYTES))

  def pieces(
      self,
      path: str,
      offset: int = 0,
      size: int | None = None,
      piece_bytes: int = base.PIECE_BYTES,
  ) -> Iterator[bytes]:
    """Yields the same bytes as `read`, in pieces of `piece_bytes`."""
    file = self._opened(self._files.open, path)
    end = os.fstat(file.fd).st_size if size is None else offset + size
    while offset < end:
      piece = bytearray(min(piece_bytes, end - offset))
      _read_into(file, path, offset, memoryview(piece))
      offset += len(piece)
      yield bytes(piece)

  def fill(
      self,
      paths: Sequence[str],
      sources: np.ndarray,
      offsets: np.ndarray,
      sizes: np.ndarray,
      out: np.ndarray,
      places: np.ndarray,
  ) -> None:
    """Reads many byte ranges into one buffer, neighbours in one read."""
    if out.dtype != np.uint8 or out.ndim != 1 or not out.flags.c_contiguous:
      raise ValueError("`out` must be a contiguous array of uint8 with one dimension.")
    if not len(sizes):
      return
    if sizes.min() < 0 or places.min() < 0 or (places + sizes).max() > len(out):
      raise ValueError(f"A range lies outside the {len(out)} bytes of `out`.")
    # Ranges of one file follow each other, so that it is looked up once and no more files than
    # allowed are open at a time, however many files the call touches.
    order = np.argsort(sources, kind="stable")
    order = order[sizes[order] > 0]
    sources, offsets = sources[order], offsets[order]
    places, sizes = places[order], sizes[order]
    breaks = sources[1:] != sources[:-1]
    breaks |= np.diff(offsets) != sizes[:-1]
    breaks |= np.diff(places) != sizes[:-1]
    starts = np.flatnonzero(np.concatenate(([True], breaks)))[: len(order)]
    totals = np.add.reduceat(sizes, starts, dtype=np.int64) if len(starts) else sizes

    buffer = out.data
    current = None
    for source, offset, place, total in zip(
        sources[starts].tolist(), offsets[starts].tolist(), places[starts].tolist(), totals.tolist()
    ):
      if source != current:
        current, path = source, paths[source]
        file = self._opened(self._files.get, path)
      _read_into(file, path, offset, buffer[place : place + total])

  def pin(self, paths: Sequence[str], sources: np.ndarray) -> base.Pinned | None:
    """Returns open descriptors; None where more files are needed than may be open."""
    try:
      return self._files.pin(paths, sources)
    except OSError as error:
      raise _error("open", error.filename, error) from error

  def _opened(self, opener: Callable[[str], OpenFile], path: str) -> OpenFile:
    try:
      return opener(path)
    except OSError as error:
      raise _error("open", path, error) from error


def _check_local(path: str) -> None:
  if paths_lib.is_url(path):
    raise CorpusError(
        f"{path}: only local files can be read. Mount the store and give the mount as base, or"
        " remap the path to it."
    )


def _read_into(file: OpenFile, path: str, offset: int, view: memoryview) -> None:
  done = 0
  try:
    while done < len(view):
      # The kernel may return less than asked for, and always does above 2 GiB; only 0 is the end.
      got = os.preadv(file.fd, [view[done:] if done else view], offset + done)
      if not got:
        break
      done += got
  except OSError as error:
    raise _error("read", path, error, offset, len(view)) from error
  if done < len(view):
    raise _too_short(file, path, offset, len(view))


def _too_short(file: OpenFile, path: str, offset: int, size: int) -> CorpusError:
  return CorpusError(
      f"{path} is too short: bytes {offset} to {offset + size} were expected, but it ends at byte"
      f" {os.fstat(file.fd).st_size}. It was cut off or replaced after the index was built: restore"
      " it, or build the index again and start a new run."
  )


def _error(verb: str, path: str, error: OSError, offset: int = 0, size: int = 0) -> CorpusError:
  where = f"bytes {offset} to {offset + size} of {path}" if size else path
  if error.errno == errno.EMFILE:
    remedy = (
        "Set olmo_max_open_files (max_open_files) to a smaller number, or raise the limit"
        " (`ulimit -n`)."
    )
  elif error.errno == errno.ENOENT:
    remedy = (
        "If the corpus has moved, remap its paths (olmo_path_remap_from and olmo_path_remap_to),"
        " or load the index with the new base."
    )
  else:
    remedy = "Check the disk or the mount."
  kind = MissingFileError if error.errno == errno.ENOENT else CorpusError
  return kind(f"Cannot {verb} {where}: {error.strerror}. {remedy}")
