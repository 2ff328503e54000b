"""Copies token files to a disk or a bucket: in parallel, resumable, verified.

The copy of a file has the same path relative to the base, so the corpus keeps its fingerprint:

    https://host/data/wiki/part-0.npy    →    /data/olmo/wiki/part-0.npy

A file on a disk gets its final name, and an object becomes visible, only once the whole source file
has been read and checked. The size and version of each source file are recorded: in a file named
`.copied` if the output is a directory, or in the metadata of each object if it is a bucket. A
second run therefore copies only files that are missing or have changed.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import os
from collections.abc import Callable, Iterator, Sequence

from maxtext_olmo.corpus import checksums
from maxtext_olmo.corpus import copy_targets
from maxtext_olmo.corpus import paths as paths_lib
from maxtext_olmo.corpus import scan
from maxtext_olmo.corpus.storage import StorageRouter
from maxtext_olmo.corpus.storage import open_storage
from maxtext_olmo.corpus.storage import writing
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.errors import MissingFileError
from maxtext_olmo.progress import progress_bar

_SIDECAR = ".csv.gz"
_OTHER_FILE = "Restore the file, or build the index again."


@dataclasses.dataclass(frozen=True)
class SourceFile:
  """A token file to copy.

  Attributes:
    path: Path relative to the base.
    label: Label of the file.
    size: Size in bytes recorded in an index; None if unknown.
    checksum: Checksum recorded in an index, `xxh3:<hex>` or `sha256:<hex>`; None if unknown.
    etag: ETag recorded in an index; None if unknown.
    optional: Whether the file may be missing.
  """

  path: str
  label: str
  size: int | None = None
  checksum: str | None = None
  etag: str | None = None
  optional: bool = False


@dataclasses.dataclass(frozen=True)
class CopySummary:
  """The result of a copy.

  Attributes:
    copied: Number of files that were copied.
    skipped: Number of files that had been copied before.
    bytes: Number of bytes that were copied.
    checked: Number of files whose checksum was compared with the one in an index.
    reread: Number of copies that were read again and compared.
  """

  copied: int = 0
  skipped: int = 0
  bytes: int = 0
  checked: int = 0
  reread: int = 0

  def __add__(self, other: CopySummary) -> CopySummary:
    sums = zip(dataclasses.astuple(self), dataclasses.astuple(other))
    return CopySummary(*(one + more for one, more in sums))


def select(
    files: Sequence[SourceFile],
    *,
    labels: Sequence[str] = (),
    patterns: Sequence[str] = (),
    first: int | None = None,
) -> list[SourceFile]:
  """Returns the files that match one of the labels and one of the patterns, in the given order.

  >>> files = [SourceFile("wiki/a.npy", "wiki"), SourceFile("code/b.npy", "code")]
  >>> [file.path for file in select(files, labels=["w*"])]
  ['wiki/a.npy']

  Args:
    files: All files.
    labels: Labels to keep, with the wildcards `*` and `?`; empty keeps all.
    patterns: Paths to keep, with the wildcards `*` and `?`; empty keeps all.
    first: Number of files to keep per label; None keeps all.

  Raises:
    ConfigError: A label or pattern matches nothing.
  """
  for names, given, what in (
      ({file.label for file in files}, labels, "label"),
      ({file.path for file in files}, patterns, "file"),
  ):
    for pattern in given:
      if not fnmatch.filter(names, pattern):
        known = ", ".join(sorted(names)[:10])
        raise ConfigError(f"{pattern!r} matches no {what}. Some that exist: {known}.")
  taken: dict[str, int] = {}
  chosen = []
  for file in files:
    if not (_matches(file.label, labels) and _matches(file.path, patterns)):
      continue
    taken[file.label] = taken.get(file.label, 0) + 1
    if first is None or taken[file.label] <= first:
      chosen.append(file)
  return chosen


def _matches(name: str, patterns: Sequence[str]) -> bool:
  return not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def with_sidecars(files: Sequence[SourceFile]) -> list[SourceFile]:
  """Returns each file, followed by its boundary file (`.csv.gz`), which may be missing."""
  return [
      one
      for file in files
      for one in (
          file,
          SourceFile(os.path.splitext(file.path)[0] + _SIDECAR, file.label, optional=True),
      )
  ]


def copy_files(
    files: Sequence[SourceFile],
    base: str,
    output: str,
    storage: StorageRouter,
    *,
    workers: int = 8,
    reread: bool = False,
    progress: bool = False,
) -> CopySummary:
  """Copies files from one base to another.

  Args:
    files: Files to copy.
    base: Directory or URL that the paths are relative to.
    output: Directory or URL to copy them to.
    storage: Storage to read from. The copies are written, and read again, with the default options
      of this process, which may differ.
    workers: Number of files to copy at a time.
    reread: Whether to read each copy again, including those of earlier runs, and compare its
      checksum with that of the source. Only a directory records the checksums of earlier runs.
    progress: Whether to show a progress bar.

  Raises:
    CorpusError: A file is missing, does not match the index, or differs from its copy. All other
      files are copied first.
  """
  for file in files:
    if file.path.startswith("/") or paths_lib.is_url(file.path) or ".." in file.path.split("/"):
      raise ConfigError(
          f"{file.path} is not below the base {base}, so it cannot be copied. Give a base that"
          " contains all files."
      )
  unique = list({file.path: file for file in files}.values())
  target = copy_targets.open_target(output)
  known = [file.size for file in unique]
  total = None if None in known else sum(size or 0 for size in known)
  with progress_bar("copying", total, enabled=progress, unit="bytes") as advance:
    job = _Job(base, storage, open_storage(), target, reread, advance)
    results, errors = scan.map_files(
        lambda i: job.copy(unique[i]), len(unique), workers=workers, block=1
    )
  if errors:
    raise scan.kind_of(errors)(
        f"{len(errors)} of {len(unique)} files were not copied; run the command again to copy the"
        f" rest:\n{scan.list_errors(errors)}"
    )
  return sum((result for result in results if result is not None), CopySummary())


def write_manifest(files: Sequence[SourceFile], output: str) -> str:
  """Writes the manifest of a copy, and returns its path."""
  path = paths_lib.join(output, "mix.txt")
  writing.write_file(path, "".join(f"{file.label},{file.path}\n" for file in files))
  return path


@dataclasses.dataclass(frozen=True)
class _Job:
  base: str
  storage: StorageRouter
  copies: StorageRouter
  target: copy_targets.Target
  reread: bool
  advance: Callable[[int], None]

  def copy(self, file: SourceFile) -> CopySummary:
    source = paths_lib.join(self.base, file.path)
    try:
      size, tag = self._identity(source)
    except MissingFileError:
      if file.optional:
        return CopySummary()
      raise
    if file.size is not None and size != file.size:
      raise CorpusError(
          f"{source} has {size} bytes, but the index recorded {file.size}. {_OTHER_FILE}"
      )
    if file.etag is not None and paths_lib.is_url(source) and tag != file.etag:
      raise CorpusError(
          f"{source} has the ETag {tag}, but the index recorded {file.etag}. {_OTHER_FILE}"
      )
    done = self.target.checksum_of(file.path, size, tag)
    if done is not None:
      self.advance(size)
      return CopySummary(skipped=1, reread=self._compare(file.path, done))
    digests = copy_targets.Digests(file.checksum)

    def read(offset: int) -> Iterator[bytes]:
      for piece in self.storage.pieces(source, offset, size - offset, copy_targets.PIECE_BYTES):
        digests.update(piece)
        self.advance(len(piece))
        yield piece

    def check() -> str | None:
      if (found := self._identity(source)) != (size, tag):
        return (
            f"{source} was replaced during the copy: its size and version are now {found}. Copy it"
            " again."
        )
      if digests.expected is not None and digests.found != digests.expected:
        return (
            f"{source} does not match its checksum in the index: expected {digests.expected}, found"
            f" {digests.found}. {_OTHER_FILE}"
        )
      return None

    written = self.target.write(file.path, size, tag, read, digests, check)
    self.target.record(file.path, size, tag, digests.own)
    checked = int(digests.expected is not None)
    again = self._compare(file.path, digests.own)
    return CopySummary(copied=1, bytes=written, checked=checked, reread=again)

  def _identity(self, path: str) -> tuple[int, str]:
    """Returns the size of a file, and a tag that changes if the file is replaced."""
    if paths_lib.is_url(path):
      found = self.storage.remote.identity(path)
      return found.size or 0, found.tag
    size = self.storage.size(path)
    return size, f"changed {os.stat(path).st_mtime_ns}"

  def _compare(self, path: str, checksum: str) -> int:
    """Reads a copy again, if requested, and checks its checksum; returns 1 if it was read."""
    if not self.reread or not checksum:
      return 0
    digest = checksums.new_hash("xxh3")
    full = paths_lib.join(self.target.base, path)
    for piece in self.copies.pieces(full, piece_bytes=copy_targets.PIECE_BYTES):
      digest.update(piece)
    if (found := f"xxh3:{digest.hexdigest()}") != checksum:
      self.target.remove(path)
      raise CorpusError(
          f"The copy {full} differs from the source: expected {checksum}, found {found}. The copy"
          " was removed; check the disk, and copy the file again."
      )
    return 1
