"""Bytes from files into a buffer: "fill this buffer with these byte ranges of these files".

`Storage` is what the rest of the library reads through, so that files may lie elsewhere than on a
disk. `LocalStorage` reads local files and mounts.
"""

import errno
import os
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from maxtext_olmo.corpus import compiled_reads
from maxtext_olmo.corpus.storage import open_files
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError


@runtime_checkable
class Storage(Protocol):
  """Where token files are kept; threads share it, workers get it pickled or by a fork."""

  def size(self, path: str) -> int:
    """The size of a file in bytes; a CorpusError where there is none."""

  def fill(
      self, paths: Sequence[str], file_ids: np.ndarray, offsets: np.ndarray, out: np.ndarray
  ) -> None:
    """Fills row i of `out` with the bytes of `paths[file_ids[i]]` from `offsets[i]` on.

    Args:
      out: uint8, two dimensions, C order; a row is as long as the range to read. A range that the
        file does not hold is a CorpusError with file, range, expected and found size.
    """

  def hint(
      self, paths: Sequence[str], file_ids: np.ndarray, offsets: np.ndarray, size: int
  ) -> None:
    """Says that these ranges, of `size` bytes each, will be read soon; it may do nothing, and never fails."""


class LocalStorage:
  """Local files, which are kept open.

  Args:
    max_open_files: How many at most, the least recently used being closed first; None for as many as the process can spare.
  """

  def __init__(self, max_open_files: int | None = None):
    if max_open_files is not None and max_open_files < 1:
      raise ConfigError(f"max_open_files must be at least 1, got {max_open_files}.")
    self.max_open_files = max_open_files
    self._files = open_files.OpenFiles(max_open_files)

  def __reduce__(self) -> tuple:
    return type(self), (self.max_open_files,)

  def __repr__(self) -> str:
    return f"{type(self).__name__}(max_open_files={self.max_open_files})"

  def size(self, path: str) -> int:
    """The size of a file in bytes."""
    try:
      return os.stat(path).st_size
    except OSError as error:
      raise CorpusError(_cannot("look at", path, error)) from error

  def fill(
      self, paths: Sequence[str], file_ids: np.ndarray, offsets: np.ndarray, out: np.ndarray
  ) -> None:
    """Reads each range straight into its row; ranges that lie side by side go in one read."""
    if out.dtype != np.uint8 or out.ndim != 2 or not out.flags.c_contiguous:
      raise ValueError("`out` must be a C-ordered array of uint8 with two dimensions.")
    rows, width = out.shape
    if not out.size:
      return
    buffer = out.reshape(-1).data
    if rows == 1:
      path = paths[int(file_ids[0])]
      self._read(self._open(path), path, int(offsets[0]), buffer)
      return

    if self._fill_compiled(paths, file_ids, offsets, out):
      return

    # Rows of one file follow each other, so that its descriptor is looked up once and no more files
    # than allowed are open at a time, however many a batch touches.
    order = np.argsort(file_ids, kind="stable")
    sorted_ids, sorted_offsets = file_ids[order], offsets[order]
    breaks = sorted_ids[1:] != sorted_ids[:-1]
    breaks |= np.diff(sorted_offsets) != width
    breaks |= np.diff(order) != 1
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    counts = np.diff(starts, append=rows)
    current = -1
    for file_id, offset, row, count in zip(
        sorted_ids[starts].tolist(),
        sorted_offsets[starts].tolist(),
        order[starts].tolist(),
        counts.tolist(),
    ):
      if file_id != current:
        current, path = file_id, paths[file_id]
        file = self._open(path)
      self._read(file, path, offset, buffer[row * width : (row + count) * width])

  def _fill_compiled(
      self, paths: Sequence[str], file_ids: np.ndarray, offsets: np.ndarray, out: np.ndarray
  ) -> bool:
    """Reads all rows in one compiled call; False where that is not to be had, or something was wrong with a row."""
    read_rows = compiled_reads.READ_ROWS.get(out.nbytes)
    opened = self.open_rows(paths, file_ids) if read_rows else None
    if read_rows is None or opened is None:
      return False
    # The row by row way reads what was interrupted, and says what is wrong.
    return read_rows(opened.descriptors, np.ascontiguousarray(offsets, np.int64), out) < 0

  def open_rows(self, paths: Sequence[str], file_ids: np.ndarray) -> open_files.OpenRows | None:
    """Descriptors to read each row from, for compiled code; None where more files are needed than may be open."""
    try:
      return self._files.rows(paths, file_ids)
    except OSError as error:
      raise CorpusError(_cannot("open", error.filename, error)) from error

  def hint(
      self, paths: Sequence[str], file_ids: np.ndarray, offsets: np.ndarray, size: int
  ) -> None:
    """Asks the kernel to bring the ranges into the page cache, without waiting for them."""
    for file_id, offset in zip(file_ids.tolist(), offsets.tolist()):
      try:
        file = self._open(paths[file_id])
        os.posix_fadvise(file.fd, offset, size, os.POSIX_FADV_WILLNEED)
      except (CorpusError, OSError):
        return  # Whoever reads the range will be told.

  def _open(self, path: str) -> open_files.OpenFile:
    try:
      return self._files.get(path)
    except OSError as error:
      raise CorpusError(_cannot("open", path, error)) from error

  def _read(self, file: open_files.OpenFile, path: str, offset: int, view: memoryview) -> None:
    done = 0
    try:
      while done < len(view):
        # The kernel may give less than asked for, above 2 GiB it always does; only nothing means
        # the end.
        got = os.preadv(file.fd, [view[done:] if done else view], offset + done)
        if not got:
          break
        done += got
    except OSError as error:
      raise CorpusError(_cannot("read", path, error, offset, len(view))) from error
    if done < len(view):
      raise CorpusError(
          f"{path} is too short: bytes {offset} to {offset + len(view)} were expected, but it ends"
          f" at byte {os.fstat(file.fd).st_size}. It was cut off or replaced after the index was"
          " built: restore it, or build the index again and start a new run."
      )


def _cannot(verb: str, path: str, error: OSError, offset: int = 0, count: int = 0) -> str:
  where = f"bytes {offset} to {offset + count} of {path}" if count else path
  if error.errno == errno.EMFILE:
    hint = "Set olmo_max_open_files (max_open_files) to a smaller number, or raise the limit (`ulimit -n`)."
  elif error.errno == errno.ENOENT:
    hint = (
        "If the corpus has moved, remap its paths (olmo_path_remap_from and olmo_path_remap_to),"
        " or load the index with the new base."
    )
  else:
    hint = "Check the disk or the mount."
  return f"Cannot {verb} {where}: {error.strerror}. {hint}"
