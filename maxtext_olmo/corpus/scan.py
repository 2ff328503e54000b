"""Looking at many files at once: sizes and headers in one small read each, checksums in one pass.

Threads, because the time goes into waiting for a disk or a mount, or into hashing outside the
interpreter lock.
"""

import concurrent.futures
import dataclasses
import hashlib
import io
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, TypeVar

import numpy as np

from maxtext_olmo.corpus import npy_header
from maxtext_olmo.corpus import paths
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.progress import progress_bar

CHECKSUMS = ("xxh3", "sha256")
DEFAULT_WORKERS = 32
CHUNK_BYTES = 4 << 20

_SHOWN = 10
_FIRST_BYTES = 256  # Enough for the magic, and for a whole header as NumPy writes it.

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class FileFacts:
  """What one look at a token file tells."""

  size_bytes: int
  data_offset: int
  n_tokens: int


def map_files(
    function: Callable[[int], T], count: int, *, workers: int | None, block: int | None = None
) -> tuple[list[T | None], list[CorpusError]]:
  """Calls `function(i)` for i below `count` in threads; returns results and CorpusErrors, in order.

  A file's error does not stop the others, so that a report can name them all.

  Args:
    block: files per task; many unless given, because handing a task over costs more than a stat on
      a local disk.
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
    except BaseException:  # Ctrl-C too: the threads must not go on reading terabytes.
      stop.set()
      raise
  return results, [errors[i] for i in sorted(errors)]


def all_or_error(results: Sequence[T | None], errors: Sequence[CorpusError], what: str) -> list[T]:
  """The results, or one error that shows the first few and says how many there are."""
  if errors:
    message = f"{what} ({len(errors)} of {len(results)} files):\n{list_errors(errors)}"
    if any(isinstance(error.__cause__, OSError) for error in errors):
      message += (
          "\nCheck the base (--base), the tokenizer's name in the paths (--tokenizer), and the"
          " mount."
      )
    raise CorpusError(message)
  return list(results)  # type: ignore[arg-type]


def list_errors(errors: Sequence[object]) -> str:
  """One indented line for each of the first ten, and how many more there are."""
  lines = [f"  {error}" for error in errors[:_SHOWN]]
  if len(errors) > _SHOWN:
    lines.append(f"  … and {len(errors) - _SHOWN} more")
  return "\n".join(lines)


def scan_file(path: str, dtype: np.dtype) -> FileFacts:
  """One open, one stat and one small read: how many tokens there are, and where they begin."""
  with open_token_file(path) as file:
    size = os.fstat(file.fileno()).st_size
    first = read_bytes(file, path, _FIRST_BYTES)
    if not npy_header.has_npy_magic(first):
      return FileFacts(size_bytes=size, data_offset=0, n_tokens=size // dtype.itemsize)
    header = _header(first, file, path)
    n_tokens = npy_header.check_header(header, dtype, size, path)
    return FileFacts(size_bytes=size, data_offset=header.data_offset, n_tokens=n_tokens)


def scan_files(
    full_paths: Sequence[str], dtype: np.dtype, *, workers: int | None, progress: bool
) -> list[FileFacts]:
  """The facts of all files, in order; one error names every file that cannot be used."""
  with progress_bar("Scanning files", len(full_paths), enabled=progress) as advance:

    def scan(i: int) -> FileFacts:
      facts = scan_file(full_paths[i], dtype)
      advance(1)
      return facts

    results, errors = map_files(scan, len(full_paths), workers=workers)
  return all_or_error(results, errors, "Token files cannot be indexed")


def new_hash(algorithm: str) -> Any:
  """A hash object with `update` and `hexdigest`."""
  if algorithm == "sha256":
    return hashlib.sha256()
  if algorithm == "xxh3":
    import xxhash

    return xxhash.xxh3_128()
  raise ConfigError(f"Unknown checksum {algorithm!r}: it must be one of {', '.join(CHECKSUMS)}.")


def checksum_files(
    full_paths: Sequence[str],
    sizes: Sequence[int],
    algorithm: str,
    *,
    workers: int | None,
    progress: bool,
) -> list[str]:
  """`algorithm:hex` of each whole file; reads all of it, in pieces."""
  new_hash(algorithm)  # An unknown name is an error before anything is read.
  with progress_bar("Checksums", sum(sizes), enabled=progress, unit="bytes") as advance:

    def checksum(i: int) -> str:
      digest = new_hash(algorithm)
      with open_token_file(full_paths[i]) as file:
        for piece in pieces(file, full_paths[i]):
          digest.update(piece)
          advance(len(piece))
      return f"{algorithm}:{digest.hexdigest()}"

    # Hashing needs a core per thread; more threads than that only thrash the disk.
    most = os.cpu_count() or 1
    workers = min(most, DEFAULT_WORKERS if workers is None else workers)
    results, errors = map_files(checksum, len(full_paths), workers=workers, block=1)
  return all_or_error(results, errors, "Token files cannot be read")


def open_token_file(path: str) -> BinaryIO:
  """Opens a token file unbuffered; what stands in the way is a CorpusError."""
  if paths.is_url(path):
    raise CorpusError(
        f"{path}: only local files can be read. Mount the store and give the mount as base, or"
        " remap the path to it."
    )
  try:
    file = open(path, "rb", buffering=0)  # noqa: SIM115 (the caller closes it)
  except OSError as error:
    raise CorpusError(f"{path}: {error.strerror}") from error
  return file  # type: ignore[return-value]


def read_bytes(file: BinaryIO, path: str, count: int) -> bytes:
  """Reads up to `count` bytes; a failing disk is a CorpusError."""
  try:
    return file.read(count)
  except OSError as error:
    raise CorpusError(f"{path}: {error.strerror}") from error


def pieces(file: BinaryIO, path: str, *, alignment: int = 1) -> Iterator[memoryview]:
  """The rest of a file in bounded memory; a piece is overwritten by the next one.

  Args:
    alignment: each piece but the last is a multiple of this many bytes.
  """
  buffer = memoryview(bytearray(CHUNK_BYTES - CHUNK_BYTES % alignment))
  filled = 0
  while True:
    try:
      got = file.readinto(buffer[filled:])  # type: ignore[attr-defined]
    except OSError as error:
      raise CorpusError(f"{path}: {error.strerror}") from error
    filled += got
    if filled == len(buffer) or (not got and filled):
      yield buffer[:filled]
      filled = 0
    if not got:
      return


def _header(first: bytes, file: BinaryIO, path: str) -> npy_header.NpyHeader:
  try:
    return npy_header.read_header(io.BytesIO(first), path)
  except CorpusError:
    # A header may be longer than what was read at first.
    more = first + read_bytes(file, path, 1 << 17)
    return npy_header.read_header(io.BytesIO(more), path)
