"""Storage on local disks and mounts."""

import errno
import os
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from maxtext_olmo.corpus import paths as paths_lib
from maxtext_olmo.corpus.storage import base
from maxtext_olmo.corpus.storage import open_files
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError


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
    self._files = open_files.OpenFiles(max_open_files)

  def __reduce__(self) -> tuple:
    return type(self), (self.max_open_files,)

  def __repr__(self) -> str:
    return f"{type(self).__name__}(max_open_files={self.max_open_files})"

  def size(self, path: str) -> int:
    """Returns the size of a file in bytes."""
    _check_local(path)
    try:
      return os.stat(path).st_size
    except OSError as error:
      raise CorpusError(_cannot("find the size of", path, error)) from error

  def exists(self, path: str) -> bool:
    """Returns whether there is a file at `path`."""
    return os.path.exists(path)

  def read(self, path: str, offset: int = 0, size: int | None = None) -> bytes:
    """Returns `size` bytes from `offset`, or the rest of the file."""
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
    end = None if size is None else offset + size
    while end is None or offset < end:
      wanted = piece_bytes if end is None else min(piece_bytes, end - offset)
      piece = _read_bytes(file, path, offset, wanted)
      offset += len(piece)
      if end is not None and len(piece) < wanted:
        raise _too_short(file, path, offset - len(piece), wanted)
      if piece:
        yield piece
      if len(piece) < wanted:
        return

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
      raise CorpusError(_cannot("open", error.filename, error)) from error

  def _opened(self, opener: Callable[[str], open_files.OpenFile], path: str) -> open_files.OpenFile:
    _check_local(path)
    try:
      return opener(path)
    except OSError as error:
      raise CorpusError(_cannot("open", path, error)) from error


def _check_local(path: str) -> None:
  if paths_lib.is_url(path):
    raise CorpusError(
        f"{path}: only local files can be read. Mount the store and give the mount as base, or"
        " remap the path to it."
    )


def _read_into(file: open_files.OpenFile, path: str, offset: int, view: memoryview) -> None:
  done = 0
  try:
    while done < len(view):
      # The kernel may return less than asked for, and always does above 2 GiB; only 0 is the end.
      got = os.preadv(file.fd, [view[done:] if done else view], offset + done)
      if not got:
        break
      done += got
  except OSError as error:
    raise CorpusError(_cannot("read", path, error, offset, len(view))) from error
  if done < len(view):
    raise _too_short(file, path, offset, len(view))


def _read_bytes(file: open_files.OpenFile, path: str, offset: int, size: int) -> bytes:
  """Returns `size` bytes, or fewer where the file ends."""
  parts: list[bytes] = []
  done = 0
  try:
    while done < size and (part := os.pread(file.fd, size - done, offset + done)):
      parts.append(part)
      done += len(part)
  except OSError as error:
    raise CorpusError(_cannot("read", path, error, offset, size)) from error
  return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_short(file: open_files.OpenFile, path: str, offset: int, size: int) -> CorpusError:
  return CorpusError(
      f"{path} is too short: bytes {offset} to {offset + size} were expected, but it ends at byte"
      f" {os.fstat(file.fd).st_size}. It was cut off or replaced after the index was built: restore"
      " it, or build the index again and start a new run."
  )


def _cannot(verb: str, path: str, error: OSError, offset: int = 0, size: int = 0) -> str:
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
  return f"Cannot {verb} {where}: {error.strerror}. {remedy}"
