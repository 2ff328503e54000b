"""Storage on local disks and mounts."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from maxtext_olmo.corpus.storage import base
from maxtext_olmo.corpus.storage import open_files
from maxtext_olmo.corpus.storage import ranges
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.errors import MissingFileError


class LocalStorage:
  """Reads local files; `fill` and `pin` keep them open between calls.

  >>> import tempfile
  >>> with tempfile.TemporaryDirectory() as folder:
  ...   with open(f"{folder}/a", "wb") as file:
  ...     _ = file.write(b"0123456789")
  ...   LocalStorage().read(f"{folder}/a", offset=2, size=3)
  b'234'

  Args:
    max_open_files: Number of files that stay open; the least recently used is closed first. None
      keeps as many open as the process can spare.
    seen: Files that another storage has found, by path; this storage must find the same files.
  """

  def __init__(
      self, max_open_files: int | None = None, seen: Mapping[str, open_files.FileId] | None = None
  ):
    if max_open_files is not None and max_open_files < 1:
      raise ConfigError(f"max_open_files must be at least 1, got {max_open_files}.")
    self.max_open_files = max_open_files
    self._files = open_files.OpenFiles(max_open_files, seen)

  def __reduce__(self) -> tuple[Any, ...]:
    return type(self), (self.max_open_files, dict(self._files.seen))

  def __repr__(self) -> str:
    return f"{type(self).__name__}(max_open_files={self.max_open_files})"

  def close(self) -> None:
    """Closes the open files; the storage remains usable."""
    self._files.close()

  def wants_concurrency(self, paths: Sequence[str]) -> int:
    """Returns 0: most reads come from the page cache, and slow reads are noticed at once."""
    del paths
    return 0

  def expect(self, path: str, size: int, etag: str | None = None) -> None:
    """Does nothing: reads past the end of a file fail anyway, and `verify` compares sizes."""

  def size(self, path: str) -> int:
    """Returns the size of a file in bytes. Later, `fill` and `pin` reject a replaced file."""
    open_files.check_path(path)
    try:
      found = os.stat(path)
    except OSError as error:
      raise _error("find the size of", path, error) from error
    open_files.check_regular(path, found)
    self._files.seen.setdefault(path, open_files.FileId.of(found))
    return found.st_size

  def exists(self, path: str) -> bool:
    """Returns whether `path` exists, even as a broken symbolic link."""
    try:
      return bool(os.lstat(path))
    except (FileNotFoundError, NotADirectoryError, ValueError):
      return False
    except OSError as error:  # It is unknown whether the file exists.
      raise _error("look for", path, error) from error

  def read(self, path: str, offset: int = 0, size: int | None = None) -> bytes:
    """Returns `size` bytes from `offset`, or the rest of the file."""
    whole = os.stat(path).st_size if size is None and os.path.isfile(path) else 0
    if whole > base.LARGEST_WHOLE:
      raise base.too_large(path, whole)
    return b"".join(self.pieces(path, offset, size, size or base.PIECE_BYTES))

  def pieces(
      self,
      path: str,
      offset: int = 0,
      size: int | None = None,
      piece_bytes: int = base.PIECE_BYTES,
  ) -> Iterator[bytes]:
    """Yields the bytes that `read` would return, in pieces of `piece_bytes`."""
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
    """Reads several byte ranges into one buffer; merges adjacent ranges into one read."""
    ranges.check_output(out, sizes, places)
    if not len(sizes):
      return
    # Group the ranges by file, so that each file is looked up once and no more files than allowed
    # are open at a time, however many files the call touches.
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
    """Returns open descriptors; None if more files are needed than may be open at once."""
    try:
      return self._files.pin(paths, sources)
    except OSError as error:
      raise _error("open", error.filename, error) from error

  def _opened(self, opener: Callable[[str], open_files.OpenFile], path: str) -> open_files.OpenFile:
    try:
      return opener(path)
    except OSError as error:
      raise _error("open", path, error) from error


def _read_into(file: open_files.OpenFile, path: str, offset: int, view: memoryview) -> None:
  done = 0
  try:
    while done < len(view):
      # The kernel may return fewer bytes, and always does above 2 GiB; only 0 means end of file.
      got = os.preadv(file.fd, [view[done:] if done else view], offset + done)
      if not got:
        break
      done += got
  except OSError as error:
    raise _error("read", path, error, offset, len(view)) from error
  if done < len(view):
    raise _too_short(file, path, offset, len(view))


def _too_short(file: open_files.OpenFile, path: str, offset: int, size: int) -> CorpusError:
  return CorpusError(
      f"{path} is too short: expected bytes {offset} to {offset + size}, but it ends at byte"
      f" {os.fstat(file.fd).st_size}. It was truncated or replaced after the index was built:"
      " restore it, or build the index again and start a new run."
  )


def _error(verb: str, path: str, error: OSError, offset: int = 0, size: int = 0) -> CorpusError:
  where = f"bytes {offset} to {offset + size} of {path}" if size else path
  if error.errno == errno.EMFILE:
    remedy = (
        "Set olmo_max_open_files (max_open_files) to a smaller value, or raise the limit"
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
