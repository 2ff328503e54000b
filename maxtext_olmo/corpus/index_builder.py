"""Building an index, and the names that belong to it.

The classes are in `index`, the JSON in `index_file`; everything can be imported from here.

Many files are examined at once: sizes and headers with one small read each, checksums in one pass.
Threads do it, because the time goes into waiting for a disk or a mount, or into hashing outside the
interpreter lock.
"""

import concurrent.futures
import dataclasses
import hashlib
import io
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from maxtext_olmo.cores import available_cores
from maxtext_olmo.corpus import manifest
from maxtext_olmo.corpus import npy_header
from maxtext_olmo.corpus.index import INDEX_FORMAT_VERSION
from maxtext_olmo.corpus.index import OlmoNpyFileEntry
from maxtext_olmo.corpus.index import OlmoNpyIndex
from maxtext_olmo.corpus.index import check_lengths
from maxtext_olmo.corpus.index import compute_fingerprint
from maxtext_olmo.corpus.index import global_to_local
from maxtext_olmo.corpus.index import keep_split
from maxtext_olmo.corpus.index import make_index
from maxtext_olmo.corpus.index_file import load_index
from maxtext_olmo.corpus.npy_header import has_npy_magic
from maxtext_olmo.corpus.npy_header import parse_npy_header
from maxtext_olmo.corpus.npy_header import read_npy_header_from_path
from maxtext_olmo.corpus.npy_header import read_raw_metadata_from_path
from maxtext_olmo.corpus.npy_header import token_dtype
from maxtext_olmo.corpus.storage import LocalStorage
from maxtext_olmo.corpus.storage import Storage
from maxtext_olmo.corpus.storage import reason
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
class FileInfo:
  """The size and the token count of a token file."""

  size_bytes: int
  data_offset: int
  n_tokens: int


def map_files(
    function: Callable[[int], T], count: int, *, workers: int | None, block: int | None = None
) -> tuple[list[T | None], list[CorpusError]]:
  """Calls `function(i)` for i below `count` in threads; returns results and CorpusErrors, in order.

  A file's error does not stop the others, so that a report can name them all.

  Args:
    block: files per task. The default is many, because passing a task to a thread costs more than
      a stat on a local disk.
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
    except BaseException:  # Ctrl-C too: the threads must not continue to read terabytes.
      stop.set()
      raise
  return results, [errors[i] for i in sorted(errors)]


def all_or_error(results: Sequence[T | None], errors: Sequence[CorpusError], what: str) -> list[T]:
  """Returns the results, or raises one error that shows the first few and counts the rest."""
  if errors:
    message = f"{what} ({len(errors)} of {len(results)} files):\n{list_errors(errors)}"
    if any(isinstance(error.__cause__, OSError) for error in errors):
      message += (
          "\nCheck the base (--base), the tokenizer's name in the paths (--tokenizer), and the"
          " mount."
      )
    raise CorpusError(message)
  return list(results)  # type: ignore[arg-type]


def list_errors(errors: Sequence[CorpusError]) -> str:
  """Returns one indented line for each of the first ten, and how many more there are."""
  lines = [f"  {_in_short(error)}" for error in errors[:_SHOWN]]
  if len(errors) > _SHOWN:
    lines.append(f"  … and {len(errors) - _SHOWN} more")
  return "\n".join(lines)


def _in_short(error: CorpusError) -> str:
  """Returns the message; where the system refused a file, only its path and why."""
  cause = error.__cause__
  named = isinstance(cause, OSError) and cause.filename is not None
  return f"{cause.filename}: {reason(error)}" if named else str(error)  # type: ignore[union-attr]


def scan_file(path: str, dtype: np.dtype, storage: Storage) -> FileInfo:
  """Finds how many tokens a file has and where they begin, with one small read."""
  size = storage.size(path)
  first = storage.read(path, 0, min(size, _FIRST_BYTES))
  if not npy_header.has_npy_magic(first):
    return FileInfo(size_bytes=size, data_offset=0, n_tokens=size // dtype.itemsize)
  header = _header(first, size, path, storage)
  n_tokens = npy_header.check_header(header, dtype, size, path)
  return FileInfo(size_bytes=size, data_offset=header.data_offset, n_tokens=n_tokens)


def scan_files(
    full_paths: Sequence[str],
    dtype: np.dtype,
    storage: Storage,
    *,
    workers: int | None,
    progress: bool,
) -> list[FileInfo]:
  """Scans all files, in order; one error names every file that cannot be used."""
  with progress_bar("Scanning files", len(full_paths), enabled=progress) as advance:

    def scan(i: int) -> FileInfo:
      info = scan_file(full_paths[i], dtype, storage)
      advance(1)
      return info

    results, errors = map_files(scan, len(full_paths), workers=workers)
  return all_or_error(results, errors, "Token files cannot be indexed")


def new_hash(algorithm: str) -> Any:
  """Returns a hash object with `update` and `hexdigest`."""
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
    storage: Storage,
    *,
    workers: int | None,
    progress: bool,
) -> list[str]:
  """Returns `algorithm:hex` of each whole file, read in pieces."""
  new_hash(algorithm)  # An unknown name is an error before anything is read.
  with progress_bar("Checksums", sum(sizes), enabled=progress, unit="bytes") as advance:

    def checksum(i: int) -> str:
      digest = new_hash(algorithm)
      for piece in storage.pieces(full_paths[i], piece_bytes=CHUNK_BYTES):
        digest.update(piece)
        advance(len(piece))
      return f"{algorithm}:{digest.hexdigest()}"

    # Hashing needs a core per thread; more threads than that only compete for the disk.
    workers = min(available_cores(), DEFAULT_WORKERS if workers is None else workers)
    results, errors = map_files(checksum, len(full_paths), workers=workers, block=1)
  return all_or_error(results, errors, "Token files cannot be read")


def _header(first: bytes, size: int, path: str, storage: Storage) -> npy_header.NpyHeader:
  try:
    return npy_header.read_header(io.BytesIO(first), path)
  except CorpusError:
    # A header may be longer than what was read at first.
    more = storage.read(path, 0, min(size, npy_header.MAX_BYTES))
    return npy_header.read_header(io.BytesIO(more), path)


__all__ = [
    "INDEX_FORMAT_VERSION",
    "OlmoNpyFileEntry",
    "OlmoNpyIndex",
    "build_index",
    "compute_fingerprint",
    "global_to_local",
    "has_npy_magic",
    "keep_split",
    "load_index",
    "parse_npy_header",
    "read_npy_header_from_path",
    "read_raw_metadata_from_path",
]

HeaderReader = Callable[[str], tuple[str, tuple[int, ...]]]


def build_index(
    paths_and_labels: Sequence[tuple[str, str]],
    sequence_length: int,
    *,
    tokenizer: str,
    header_reader: HeaderReader | None = None,
    dtype: str = "uint32",
    base: str | os.PathLike[str] | None = None,
    max_target_sequence_length: int | None = None,
    checksums: str | None = None,
    workers: int | None = None,
    progress: bool = False,
    extends: OlmoNpyIndex | None = None,
    storage: Storage | None = None,
) -> OlmoNpyIndex:
  """Scans every file once and builds the index of a corpus.

  Args:
    paths_and_labels: (path, label) of each token file, in the order of the stream; relative paths
      count from `base`.
    header_reader: path → (dtype, shape), for files that cannot be opened from here; its dtype is
      used instead of `dtype`.
    dtype: of the files; a file with a `.npy` header must agree with it.
    base: the directory that stored paths are relative to; the files' common directory unless given.
    max_target_sequence_length: the longest window that a later stage may ask for.
    checksums: "xxh3" or "sha256" to record a checksum of each file, which reads all of it.
    workers: threads that scan files.
    extends: an older index that this corpus continues; its held-out split is kept.
    storage: where the files are read from; local files unless given.
  """
  storage = LocalStorage() if storage is None else storage
  check_lengths(sequence_length, max_target_sequence_length)
  given = [(os.fspath(path), label) for path, label in paths_and_labels]
  if not given:
    raise CorpusError("There are no files to index: paths_and_labels is empty.")
  names = [path for path, _ in given]
  if base is None and extends is not None:
    base = extends.base
  if base is None:
    full = [manifest.absolute(path) for path in names]
    base = manifest.common_base(full)
  else:
    base = manifest.absolute(base)
    names = full = [manifest.join(base, path) for path in names]

  if header_reader is not None:
    dtype, infos = _infos_from_reader(header_reader, names, full, storage, workers)
  else:
    infos = scan_files(full, token_dtype(dtype), storage, workers=workers, progress=progress)
  sums: Sequence[str | None] = [None] * len(full)
  if checksums is not None:
    sizes = [info.size_bytes for info in infos]
    sums = checksum_files(full, sizes, checksums, storage, workers=workers, progress=progress)

  unplaced = [
      OlmoNpyFileEntry(
          path=manifest.relative_to(base, path),
          label=label,
          n_tokens=info.n_tokens,
          n_instances=0,
          instance_offset=0,
          size_bytes=info.size_bytes,
          data_offset=info.data_offset,
          checksum=checksum,
      )
      for path, (_, label), info, checksum in zip(full, given, infos, sums)
  ]
  index = make_index(
      unplaced,
      sequence_length,
      dtype=token_dtype(dtype).name,
      tokenizer=tokenizer,
      base=base,
      max_target_sequence_length=max_target_sequence_length,
  )
  return index if extends is None else keep_split(index, extends)


def _infos_from_reader(
    header_reader: HeaderReader,
    names: Sequence[str],
    full: Sequence[str],
    storage: Storage,
    workers: int | None,
) -> tuple[str, list[FileInfo]]:
  """Returns what the caller's reader says of the files; those that exist here must agree."""
  results, errors = map_files(lambda i: header_reader(names[i]), len(names), workers=workers)
  headers = all_or_error(results, errors, "Token files cannot be indexed")
  dtype = token_dtype(headers[0][0])
  infos = []
  for path, (name, shape) in zip(full, headers):
    if token_dtype(name) != dtype:
      raise CorpusError(
          f"All files of a corpus have one dtype: {full[0]} has {dtype.name}, {path} has {name}."
      )
    if len(shape) != 1:
      raise CorpusError(f"{path} has shape {tuple(shape)}; expected one dimension.")
    info = FileInfo(shape[0] * dtype.itemsize, data_offset=0, n_tokens=int(shape[0]))
    if storage.exists(path):
      info = scan_file(path, dtype, storage)
      if info.n_tokens != shape[0]:
        raise CorpusError(
            f"{path}: the header reader says {shape[0]} tokens of {dtype.name}, the file holds"
            f" {info.n_tokens}."
        )
    infos.append(info)
  return dtype.name, infos
