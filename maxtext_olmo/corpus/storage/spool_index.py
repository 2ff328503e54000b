"""The files in a spool directory that one process knows of.

Other processes may add and delete files at any time. The directory is listed again only if a range
is missing and the directory's modification time has changed. A process that finds all its ranges
therefore never lists the directory.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import time

import numpy as np
from absl import logging

from maxtext_olmo.corpus.storage import open_files
from maxtext_olmo.corpus.storage import range_table
from maxtext_olmo.corpus.storage import spool_file
from maxtext_olmo.errors import CorpusError

MAX_OPEN = 64
_SECONDS_BETWEEN_SCANS = 0.1
# Within this time after a change, a directory may change again without a new modification time.
_TIME_RESOLUTION_NS = 50_000_000


class SpoolIndex:
  """Finds ranges in the files of a directory; thread-safe. Methods raise OSError if the disk fails.

  Args:
    directory: The directory.
  """

  def __init__(self, directory: str):
    self._directory = directory
    self._lock = threading.RLock()
    self._scan_lock = threading.Lock()
    self._table = range_table.RangeTable()
    self._next_number = 0
    self._numbers: dict[str, int] = {}  # By file name.
    self._names: dict[int, str] = {}
    self._sizes: dict[int, int] = {}
    self._written: set[int] = set()  # The files that this process has written.
    self._open_files: collections.OrderedDict[int, open_files.OpenFile] = collections.OrderedDict()
    self._unfinished: dict[int, open_files.OpenFile] = {}
    self._scanned: float | None = None
    self._directory_time = -1

  @property
  def used_bytes(self) -> int:
    """The size of the complete files that are known."""
    with self._lock:
      return sum(self._sizes.values())

  def find(self, names: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the file number and the place of each range; -1 if no file has the range."""
    keys = spool_file.keys_of(names)
    with self._lock:
      found = self._table.find(keys)
    if (found[0] < 0).any():
      self._scan()
      with self._lock:  # Search again in any case: another thread may have loaded files meanwhile.
        found = self._table.find(keys)
    return found

  def path(self, number: int) -> str | None:
    """Returns the path of a complete file; None if it is unfinished or gone."""
    with self._lock:
      if number in self._names and number not in self._unfinished:
        return os.path.join(self._directory, self._names[number])
      return None

  def file_names(self, numbers: list[int]) -> set[str]:
    """Returns the names of the files with these numbers."""
    with self._lock:
      return {self._names[number] for number in numbers if number in self._names}

  def written_bytes(self, numbers: list[int]) -> int:
    """Returns the total size of the given files that this process wrote and completed."""
    with self._lock:
      return sum(self._sizes.get(number, 0) for number in self._written.intersection(numbers))

  def open(self, number: int) -> open_files.OpenFile | None:
    """Opens a file; returns None if it has been deleted."""
    with self._lock:
      if number in self._unfinished:
        return self._unfinished[number]
      file = self._open_files.pop(number, None)
      path = self.path(number)
      if file is None and path is not None:
        with contextlib.suppress(FileNotFoundError):
          file = open_files.OpenFile(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
      if file is None:
        self.forget(number)
        return None
      self._open_files[number] = file
      if len(self._open_files) > MAX_OPEN:
        self._open_files.popitem(last=False)
      return file

  def begin(self, writer: spool_file.SpoolWriter) -> int:
    """Adds a file that this process begins to write, and returns its number."""
    with self._lock:
      number = self._register(os.path.basename(writer.final_path))
      self._unfinished[number] = writer.file
      self._written.add(number)
      return number

  def add(self, number: int, names: np.ndarray, places: np.ndarray) -> None:
    """Adds ranges of a file."""
    with self._lock:
      self._table.add(number, spool_file.keys_of(names), places)

  def finish(self, number: int, size: int) -> None:
    """Marks a file of this process as complete."""
    with self._lock:
      self._unfinished.pop(number, None)
      self._sizes[number] = size

  def forget(self, number: int) -> None:
    """Removes a file that has been deleted."""
    with self._lock:
      name = self._names.pop(number, None)
      if name is not None:
        del self._numbers[name]
      self._sizes.pop(number, None)
      self._open_files.pop(number, None)
      self._unfinished.pop(number, None)
      self._written.discard(number)
      self._table.drop(number)

  def forget_names(self, names: list[str]) -> None:
    """Removes files that have been deleted, by name."""
    with self._lock:
      for name in names:
        if name in self._numbers:
          self.forget(self._numbers[name])

  def delete_damaged(self, number: int) -> None:
    """Deletes a file with a wrong checksum."""
    path = self.path(number)
    self.forget(number)
    if path is not None:
      _delete_damaged(path)

  def close(self) -> None:
    """Closes all files, which are opened again when they are needed."""
    with self._lock:
      self._open_files.clear()

  def _scan(self) -> None:
    """Loads new files and forgets deleted ones, if the directory may have changed."""
    with self._scan_lock:
      now = time.monotonic()
      if self._scanned is not None and now - self._scanned < _SECONDS_BETWEEN_SCANS:
        return
      changed = os.stat(self._directory).st_mtime_ns
      if changed == self._directory_time:
        return
      recent = time.time_ns() - changed < _TIME_RESOLUTION_NS
      with self._lock:  # Before the listing, which lacks files that are finished after it.
        known = {*self._numbers}
        unfinished = self.file_names([*self._unfinished])
      names = {name for name in os.listdir(self._directory) if name.endswith(spool_file.SUFFIX)}
      self.forget_names([*(known - names - unfinished)])
      for name in sorted(names - known):
        self._load(name)
      self._scanned = now
      self._directory_time = -1 if recent else changed

  def _load(self, name: str) -> None:
    path = os.path.join(self._directory, name)
    try:
      names, places, size = spool_file.read_table(path)
    except FileNotFoundError:
      return  # Another process has just deleted it.
    except CorpusError:
      _delete_damaged(path)
      return
    with self._lock:
      if name not in self._numbers:
        number = self._register(name)
        self._sizes[number] = size
        self.add(number, names, places)

  def _register(self, name: str) -> int:
    number = self._next_number
    self._next_number += 1
    self._numbers[name], self._names[number] = number, name
    return number


def _delete_damaged(path: str) -> None:
  logging.warning("%s is damaged; deleting it. Its ranges will be fetched again.", path)
  with contextlib.suppress(OSError):
    os.unlink(path)
