"""The spool: a directory on a local disk with the byte ranges that upcoming steps will read.

The order of a run is known, so a thread (`rows.spool_filler`) fetches the ranges of the next
minutes from the object store and puts them here. Ranges are collected in files of up to 64 MiB (see
`spool_file`), so that an hour of training takes a thousand files, not a million.

Several processes may share a directory. Each writes its own files and reads the files of all. The
modification time of a file shows whether the file is needed:

    less than a minute old   a running process needs it, and renews the time every 15 seconds
    older                    its ranges have been consumed, or the process that needed it has ended

If a new file would exceed the size limit, files that no process needs are deleted, the oldest
first; if there are none, nothing is written. So a corpus that fits within the limit stays in the
spool.

Each of the n processes that fill the spool may write up to 1/n of the limit ahead, so that no
process takes the space of another. Files that other processes have written do not count: processes
that need the same ranges use the whole spool together. A process shows that it is running by the
lock on an empty file (`.filler`), which the system releases however the process ends.

A range is only a copy. Whatever happens to the directory, the worst consequence is another request
to the store: damaged files are deleted, and if the disk fails, the spool is turned off.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
from absl import logging

from maxtext_olmo.corpus.storage import open_files
from maxtext_olmo.corpus.storage import spool_file
from maxtext_olmo.corpus.storage import spool_index

# How long a file is kept after a process last renewed it, and how often it is renewed.
LEASE_SECONDS = 60.0
RENEW_SECONDS = 15.0
_MAX_FILE_BYTES = 64 << 20
_FILES_PER_LIMIT = 64
# If space is short, a claim does not keep a file that holds less than this share of its bytes.
_SPARSE = 1 / 16
_LOCK_NAME = "lock"
_FILLER_SUFFIX = ".filler"


class Spool:
  """A directory of byte ranges, shared by threads and processes.

  Ranges are named by `spool_file.make_names`. No method raises OSError: if the disk fails, the
  spool turns itself off with a warning, and from then on neither returns nor accepts ranges.

  Args:
    directory: The directory, created if it does not exist.
    limit_bytes: Largest total size of the files, in bytes.

  Attributes:
    max_range_bytes: Size of the largest range that is kept.
  """

  def __init__(self, directory: str, limit_bytes: int):
    self.directory = directory
    self.limit_bytes = limit_bytes
    self._file_bytes = min(_MAX_FILE_BYTES, limit_bytes // _FILES_PER_LIMIT)
    self.max_range_bytes = self._file_bytes // 4
    self._start()

  def __reduce__(self) -> tuple[Any, ...]:
    return type(self), (self.directory, self.limit_bytes)

  def __repr__(self) -> str:
    return f"{type(self).__name__}({self.directory!r}, {self.limit_bytes})"

  def _start(self) -> None:
    self._pid = os.getpid()
    self._index = spool_index.SpoolIndex(self.directory)
    self._off = False
    self._full = False  # Whether the last new file did not fit without deleting others.
    self._claim_lock = threading.Lock()
    self._claims: dict[int, int] = {}  # The last step that needs each claimed file.
    self._renewed = time.monotonic()
    self._write_lock = threading.RLock()  # `read` never takes it, because writing may take seconds.
    # `read` resets it without the lock if the disk fails, so other methods look at it only once.
    self._writer: spool_file.SpoolWriter | None = None
    self._writer_number = -1
    self._filler_path = os.path.join(self.directory, uuid.uuid4().hex[:16] + _FILLER_SUFFIX)
    self._filler: open_files.OpenFile | None = None
    with self._turns_off():
      os.makedirs(self.directory, exist_ok=True)

  @property
  def off(self) -> bool:
    """Whether the spool has turned itself off."""
    if self._pid != os.getpid():  # In a forked child: the locks and the writer are the parent's.
      self._start()
    return self._off

  @property
  def full(self) -> bool:
    """Whether the space is used up, or the share of it that this process may use."""
    return self._full

  @property
  def used_bytes(self) -> int:
    """The size of the files that this process knows of, including the one it is writing."""
    if self.off:
      return 0
    writer = self._writer
    return self._index.used_bytes + (0 if writer is None else self._file_bytes - writer.room)

  def read(self, names: np.ndarray, out: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Reads the ranges that are in the spool, and returns a mask (bool) of them.

    Args:
      names: Names of ranges.
      out: Buffer (uint8).
      places: Where each range is written in `out`.
    """
    served = np.zeros(len(names), np.bool_)
    if self.off:
      return served
    with self._turns_off():
      files, spots = self._index.find(names)
      here = np.flatnonzero(files >= 0)
      here = here[np.lexsort((spots[here], files[here]))]
      rows = zip(here.tolist(), files[here].tolist(), spots[here].tolist(), places[here].tolist())
      current, file = -1, None
      for i, number, spot, place in rows:
        if number != current:
          current, file = number, self._index.open(number)
        if file is None:
          continue
        view = out.data[place : place + int(names[i, 3])]
        served[i] = spool_file.read_range(file, spot, names[i].tobytes(), view)
        if not served[i]:
          self._index.delete_damaged(number)
          file = None
    return served

  def claim(self, names: np.ndarray, step: int) -> np.ndarray:
    """Protects the files that hold some ranges from deletion until a step is done.

    If space is short, a file that holds only a few of the ranges is not protected. The caller
    should `read` its ranges and `put` them again.

    Returns:
      A mask (bool) of the ranges in protected files.
    """
    kept = np.zeros(len(names), np.bool_)
    if self.off or not len(names):
      return kept
    with self._turns_off():
      files, _ = self._index.find(names)
      numbers, inverse = np.unique(files, return_inverse=True)
      found = np.bincount(inverse, names[:, 3].astype(np.float64), minlength=len(numbers))
      dense: np.ndarray = (numbers >= 0) & ((found >= _SPARSE * found.sum()) | (not self._full))
      for number in numbers[dense].tolist():
        self._claim(number, step)
      kept = dense[inverse]
    return kept

  def release(self, step: int | None = None) -> None:
    """Ends the claims of steps before `step`, or all claims, so that their files may be deleted."""
    with self._claim_lock:
      ended = [number for number, last in self._claims.items() if step is None or last < step]
      for number in ended:
        del self._claims[number]
    for number in ended:
      _set_time(self._index.path(number), time.time() - LEASE_SECONDS)

  def renew(self) -> None:
    """Renews the claimed files; must be called several times per `LEASE_SECONDS`."""
    if time.monotonic() - self._renewed < RENEW_SECONDS or self.off:
      return
    self._renewed = time.monotonic()
    for number in [*self._claims]:
      with self._claim_lock:  # So that a file that is released meanwhile is not renewed after that.
        if number in self._claims:
          _set_time(self._index.path(number), time.time())

  def reserve(self, size: int, *, may_delete: bool = True) -> bool:
    """Makes room for ranges of `size` bytes; returns whether they can be put now.

    Args:
      size: Number of bytes, including `spool_file.RANGE_OVERHEAD` for each range.
      may_delete: Whether files that no process needs may be deleted to make room.
    """
    with self._write_lock:
      return self._writer_with_room(size, may_delete) is not None

  def put(
      self,
      names: np.ndarray,
      data: np.ndarray,
      places: np.ndarray,
      *,
      step: int | None = None,
      may_delete: bool = True,
  ) -> bool:
    """Stores copies of ranges; returns False if there is no room for all of them.

    Args:
      names: Names of the ranges.
      data: Buffer (uint8) that holds their bytes.
      places: Where each range begins in `data`.
      step: Last step that needs the ranges; None if no step does.
      may_delete: Whether files that no process needs may be deleted to make room.
    """
    small = names[:, 3] <= self.max_range_bytes
    names, places = names[small], places[small]
    costs = np.cumsum(names[:, 3].astype(np.int64) + spool_file.RANGE_OVERHEAD)
    with self._write_lock:
      while len(names):
        writer = self._writer_with_room(int(costs[0]), may_delete)
        if writer is None:
          return False
        count = int(np.searchsorted(costs, writer.room, side="right"))
        with self._turns_off():
          spots = writer.append(names[:count], data, places[:count])
          self._index.add(self._writer_number, names[:count], spots)
          if step is not None:
            self._claim(self._writer_number, step)
        names, places, costs = names[count:], places[count:], costs[count:] - costs[count - 1]
    return not self.off

  def flush(self, older_than: float = 0.0) -> None:
    """Completes the file being written, so that other processes and later runs can read it.

    Args:
      older_than: Leaves the file open if it was begun less than this many seconds ago.
    """
    with self._write_lock, self._turns_off():
      writer = None if self.off else self._writer
      if writer is not None and time.monotonic() - writer.began >= older_than:
        self._finish()

  def close(self) -> None:
    """Completes the file being written and closes all files; the spool remains usable."""
    self.flush()
    self._index.close()
    with self._write_lock, contextlib.suppress(OSError):
      filler, self._filler = self._filler, None
      if filler is not None:
        os.unlink(self._filler_path)

  def _claim(self, number: int, step: int) -> None:
    with self._claim_lock:
      is_new = number not in self._claims
      self._claims[number] = max(step, self._claims.get(number, step))
    if is_new:
      _set_time(self._index.path(number), time.time())

  def _writer_with_room(self, size: int, may_delete: bool) -> spool_file.SpoolWriter | None:
    """Returns a writer with room for `size` bytes; None if there is no room for another file."""
    if self.off or size > self._file_bytes - spool_file.FILE_OVERHEAD:
      return None
    with self._turns_off():
      writer = self._writer
      if writer is not None and writer.room >= size:
        return writer
      self._finish()
      return self._begin(may_delete)
    return None

  def _begin(self, may_delete: bool) -> spool_file.SpoolWriter | None:
    """Begins a new file, if there is room for it."""
    with _locked(os.path.join(self.directory, _LOCK_NAME)):
      if may_delete:  # This process fills the spool; others only keep what they have read anyway.
        self._announce()
      if not self._make_room(may_delete):
        return None
      writer = self._writer = spool_file.SpoolWriter(self.directory, self._file_bytes)
      self._writer_number = self._index.begin(writer)
      return writer

  def _announce(self) -> None:
    """Shows the other processes that this one fills the spool."""
    if self._filler is None or not os.path.exists(self._filler_path):
      fd = os.open(self._filler_path, os.O_RDWR | os.O_CREAT, 0o644)
      self._filler = open_files.OpenFile(fd)
      fcntl.flock(fd, fcntl.LOCK_EX)

  def _make_room(self, may_delete: bool) -> bool:
    """Deletes files that no process needs until one more file fits; returns whether it fits."""
    with self._claim_lock:
      numbers = [*self._claims]
    claimed = self._index.file_names(numbers)
    share = self.limit_bytes // max(1, _count_fillers(self.directory))
    if self._index.written_bytes(numbers) > max(0, share - self._file_bytes):
      self._full = True
      return False
    total, unneeded = 0, []
    for name, size, changed in _list_files(self.directory):
      total += size
      if changed <= time.time() - LEASE_SECONDS and name not in claimed:
        unneeded.append((changed, name, size))
    allowed = self.limit_bytes - self._file_bytes
    self._full = total > allowed
    deleted = []
    for _, name, size in sorted(unneeded) if may_delete else ():
      if total <= allowed:
        break
      with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(self.directory, name))
      total -= size
      deleted.append(name)
    self._index.forget_names(deleted)
    return total <= allowed

  def _finish(self) -> None:
    writer, number = self._writer, self._writer_number
    if writer is None:
      return
    self._writer, self._writer_number = None, -1
    try:
      self._index.finish(number, writer.finish())
    except OSError as error:
      self._index.forget(number)
      writer.discard()
      if not isinstance(error, FileNotFoundError):  # That error only means the file was deleted.
        raise

  @contextlib.contextmanager
  def _turns_off(self) -> Iterator[None]:
    """Turns the spool off if the disk fails."""
    try:
      yield
    except OSError as error:
      already, self._off = self._off, True
      writer, self._writer = self._writer, None
      if writer is not None:
        writer.discard()
      if not already:
        logging.warning(
            "The spool %s is turned off because of an error: %s. Batches are now read directly from"
            " the store. Free some space or set olmo_spool_dir to another disk, and restart when"
            " convenient.",
            self.directory,
            error,
        )


def _list_files(directory: str) -> Iterator[tuple[str, int, float]]:
  """Yields the name, size and modification time of each file.

  Deletes the unfinished files of processes that have died.
  """
  with os.scandir(directory) as entries:
    for entry in entries:
      with contextlib.suppress(FileNotFoundError):
        if entry.name.endswith(spool_file.SUFFIX):
          found = entry.stat()
          yield entry.name, found.st_size, found.st_mtime
        elif entry.name.endswith(spool_file.PART_SUFFIX):
          if spool_file.is_abandoned(entry.path):
            os.unlink(entry.path)
          else:
            yield entry.name, entry.stat().st_size, time.time()


def _count_fillers(directory: str) -> int:
  """Returns the number of processes that fill the spool; forgets those that have died."""
  count = 0
  with os.scandir(directory) as entries:
    for entry in entries:
      if entry.name.endswith(_FILLER_SUFFIX):
        if spool_file.is_abandoned(entry.path):
          with contextlib.suppress(FileNotFoundError):
            os.unlink(entry.path)
        else:
          count += 1
  return count


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
  """Holds the lock that processes sharing a directory take before they change its size."""
  file = open_files.OpenFile(os.open(path, os.O_RDWR | os.O_CREAT, 0o644))
  fcntl.flock(file.fd, fcntl.LOCK_EX)
  try:
    yield
  finally:  # Closing is not enough: a process that was forked meanwhile also has the file open.
    fcntl.flock(file.fd, fcntl.LOCK_UN)


def _set_time(path: str | None, when: float) -> None:
  # An error means that the file has been deleted, or that it belongs to another user. That user's
  # processes renew it.
  with contextlib.suppress(OSError):
    if path is not None:
      os.utime(path, (when, when))
