"""Scans many files in parallel: sizes and headers, with one small read each.

Uses threads, because the time is spent waiting for a disk or a mount.
"""

import concurrent.futures
import dataclasses
import io
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from maxtext_olmo.corpus import npy_header
from maxtext_olmo.corpus.storage import Storage
from maxtext_olmo.corpus.storage import reason
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.errors import MissingFileError
from maxtext_olmo.errors import StoreUnavailableError
from maxtext_olmo.progress import progress_bar

DEFAULT_WORKERS = 32
CHUNK_BYTES = 4 << 20

_SHOWN = 10
_FIRST_BYTES = 256  # Enough for the magic and for a complete header as NumPy writes it.

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class FileInfo:
  """The size and the token count of a token file and, for an object in a store, its ETag."""

  size_bytes: int
  data_offset: int
  n_tokens: int
  etag: str | None = None


def map_files(
    function: Callable[[int], T], count: int, *, workers: int | None, block: int | None = None
) -> tuple[list[T | None], list[CorpusError]]:
  """Calls `function(i)` for each i below `count` in threads.

  An error in one file does not stop the others, so that a report can list all errors.

  Args:
    function: Function of a file number.
    count: Number of files.
    workers: Number of threads; 32 by default.
    block: Number of files per task. The default is up to 64, because passing a task to a thread
      costs more than a stat on a local disk.

  Returns:
    The results, and the CorpusErrors that were raised, both in file order.
  """
  workers = DEFAULT_WORKERS if workers is None else workers
  if workers < 1:
    raise ConfigError(f"workers must be at least 1, got {workers}.")
  results: list[T | None] = [None] * count
  errors: dict[int, CorpusError] = {}
  stop = threading.Event()
  step = block or max(1, min(64, count // (4 * workers)))

  def run_block(start: int) -> None:
    for i in range(start, min(start + step, count)):
      if stop.is_set():
        return
      try:
        results[i] = function(i)
      except CorpusError as error:
        errors[i] = error

  with concurrent.futures.ThreadPoolExecutor(min(workers, max(count, 1))) as pool:
    try:
      for _ in pool.map(run_block, range(0, count, step)):
        pass
    except BaseException:  # Including Ctrl-C: the threads must not keep reading terabytes.
      stop.set()
      raise
  return results, [errors[i] for i in sorted(errors)]


def all_or_error(results: Sequence[T | None], errors: Sequence[CorpusError], what: str) -> list[T]:
  """Returns the results, or raises one error that lists the first errors and counts the rest."""
  if not errors:
    return list(results)  # type: ignore[arg-type]
  message = f"{what} ({len(errors)} of {len(results)} files):\n{list_errors(errors)}"
  if any(isinstance(error.__cause__, OSError) for error in errors):
    message += (
        "\nCheck the base (--base), the tokenizer's name in the paths (--tokenizer), and the mount."
    )
  raise kind_of(errors)(message)


def kind_of(errors: Sequence[CorpusError]) -> type[CorpusError]:
  """Returns the type of an error that combines several: that of the first more specific one."""
  for kind in (StoreUnavailableError, MissingFileError):
    if any(isinstance(error, kind) for error in errors):
      return kind
  return CorpusError


def list_errors(errors: Sequence[CorpusError]) -> str:
  """Returns one indented line per error for the first ten, and the number of further errors."""
  lines = [f"  {_in_short(error)}" for error in errors[:_SHOWN]]
  if len(errors) > _SHOWN:
    lines.append(f"  … and {len(errors) - _SHOWN} more")
  return "\n".join(lines)


def _in_short(error: CorpusError) -> str:
  """Returns the message of an error; for an error of the operating system, only path and reason."""
  cause = error.__cause__
  named = isinstance(cause, OSError) and cause.filename is not None
  return f"{cause.filename}: {reason(error)}" if named else str(error)  # type: ignore[union-attr]


def scan_file(path: str, dtype: np.dtype, storage: Storage) -> FileInfo:
  """Finds the number of tokens of a file and the offset of the first one, with one small read."""
  size = storage.size(path)
  first = storage.read(path, 0, min(size, _FIRST_BYTES))
  if 4 <= size < len(npy_header.NPY_MAGIC) and npy_header.NPY_MAGIC.startswith(first):
    raise CorpusError(f"{path} ends within the magic of a .npy file. Copy it again.")
  if not npy_header.has_npy_magic(first):
    # Real tokens of two or more bytes never contain this text.
    if dtype.itemsize > 1 and b"'fortran_order'" in first:
      raise CorpusError(
          f"{path} contains a .npy header, but does not begin with one. Copy it again."
      )
    return FileInfo(size_bytes=size, data_offset=0, n_tokens=size // dtype.itemsize)
  try:
    header = npy_header.read_header(io.BytesIO(first), path)
  except CorpusError:  # The header may be longer than the first read.
    more = storage.read(path, 0, min(size, npy_header.MAX_BYTES))
    header = npy_header.read_header(io.BytesIO(more), path)
  n_tokens = npy_header.check_header(header, dtype, size, path)
  return FileInfo(size_bytes=size, data_offset=header.data_offset, n_tokens=n_tokens)


def scan_files(
    full_paths: Sequence[str],
    dtype: np.dtype,
    storage: Storage,
    *,
    workers: int | None,
    progress: bool,
    known: Mapping[str, FileInfo] | None = None,
) -> list[FileInfo]:
  """Scans all files, in order; raises one error for all files that cannot be used.

  Args:
    full_paths: Paths of the files.
    dtype: Dtype of the tokens.
    storage: Storage that holds the files.
    workers: Number of threads.
    progress: Whether to show a progress bar.
    known: Results for files that need not be scanned, by path.
  """
  with progress_bar("Scanning files", len(full_paths), enabled=progress) as advance:

    def scan(i: int) -> FileInfo:
      info = (known or {}).get(full_paths[i]) or scan_file(full_paths[i], dtype, storage)
      advance(1)
      return info

    results, errors = map_files(scan, len(full_paths), workers=workers)
  return all_or_error(results, errors, "Token files cannot be indexed")
