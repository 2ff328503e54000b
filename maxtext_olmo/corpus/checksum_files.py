"""Computes the checksums of a corpus piece by piece, on one machine or on many.

    outcome = sum_pieces(index, "xxh3-pieces", options)
    index = with_checksums(index, "xxh3-pieces", outcome)

This is the same work as in `verify`, which computes the checksums to compare them with the index.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from maxtext_olmo.cores import available_cores
from maxtext_olmo.corpus import checksums
from maxtext_olmo.corpus import index_changes
from maxtext_olmo.corpus import scan
from maxtext_olmo.corpus import verify
from maxtext_olmo.corpus.index import OlmoNpyIndex
from maxtext_olmo.corpus.storage import Storage
from maxtext_olmo.corpus.work.options import WorkOptions
from maxtext_olmo.corpus.work.run import Outcome
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError

_FAILED = "Checksums cannot be computed"


def sum_pieces(
    index: OlmoNpyIndex,
    algorithm: str,
    options: WorkOptions,
    *,
    replace: bool = False,
    path_remap: Mapping[str, str] | None = None,
    progress: bool = False,
    storage: Storage | None = None,
) -> Outcome:
  """Computes the checksums of the pieces of all files, or of a part of them.

  Args:
    index: Index of the corpus.
    algorithm: "xxh3", "sha256" or "xxh3-pieces"; only the last one divides files among workers.
    options: How the work is done.
    replace: Whether checksums of another algorithm may be replaced.
    path_remap: prefix → replacement, for paths that begin differently on this machine.
    progress: Whether to show a progress bar.
    storage: Storage that holds the files; `open_storage()` by default.

  Raises:
    ConfigError: The index has checksums of another algorithm, and `replace` is False.
  """
  name = checksums.full_name(algorithm)
  others = {(entry.checksum or name).partition(":")[0] for entry in index.files} - {name}
  if others and not replace:
    raise ConfigError(
        f"The index already has checksums: {', '.join(sorted(others))}. An index holds one checksum"
        f" per file, so {name} would replace them. Check the files with `maxtext-olmo verify`, then"
        " use --replace; or keep both in two indexes, with --replace and --output."
    )
  return verify.check_pieces(
      _with(index, [(f"{name}:", None)] * len(index.files)),
      options,
      path_remap=path_remap,
      description="Checksums",
      progress=progress,
      storage=storage,
  )


def with_checksums(
    index: OlmoNpyIndex, algorithm: str, outcome: Outcome, *, replace: bool = False
) -> OlmoNpyIndex:
  """Returns the index with the checksums that `sum_pieces` computed.

  Args:
    index: Index of the corpus.
    algorithm: The algorithm that `sum_pieces` was given.
    outcome: What it returned, for all pieces.
    replace: Whether files may differ from the checksums that the index already has.

  Raises:
    CorpusError: A file could not be read or does not match the index, results are missing, or
      `replace` is False and a file no longer matches its recorded checksum.
  """
  outcome.check(_FAILED)
  files = verify.files_of(outcome)
  if broken := [file for file in files if file.broken is not None]:
    errors = [CorpusError(f"{file.source.path}: {file.broken}") for file in broken]
    raise CorpusError(
        f"{_FAILED} ({len(errors)} of {len(files)} files):\n{scan.list_errors(errors)}"
    )
  name = checksums.full_name(algorithm)
  sums = [(f"{name}:{file.digest}", "".join(file.piece_sums) or None) for file in files]
  summed = _with(index, sums)
  if not replace and (changed := index_changes.describe_changes(index, summed)):
    raise CorpusError(
        "Files no longer match the checksums in the index, so no index was written:\n"
        + "\n".join(f"  {line}" for line in changed)
        + "\nRestore the files or, if they were replaced on purpose, use --replace."
    )
  return summed


def add_checksums(
    index: OlmoNpyIndex,
    algorithm: str,
    *,
    workers: int | None = None,
    progress: bool = False,
    storage: Storage | None = None,
) -> OlmoNpyIndex:
  """Returns the index with checksums, computed by threads of this process.

  Args:
    index: Index of the corpus.
    algorithm: "xxh3", "sha256" or "xxh3-pieces".
    workers: Maximum number of threads; at most one per core is used, because hashing keeps a core
      busy.
    progress: Whether to show a progress bar.
    storage: Storage that holds the files; `open_storage()` by default.
  """
  cores = available_cores()
  options = WorkOptions(workers=cores if workers is None else min(workers, cores))
  outcome = sum_pieces(index, algorithm, options, progress=progress, storage=storage)
  return with_checksums(index, algorithm, outcome)


def _with(index: OlmoNpyIndex, sums: Sequence[tuple[str, str | None]]) -> OlmoNpyIndex:
  """Returns the index with checksums, and the sums of the pieces that each was made from."""
  files = (
      dataclasses.replace(entry, checksum=checksum, piece_sums=pieces)
      for entry, (checksum, pieces) in zip(index.files, sums)
  )
  return dataclasses.replace(index, files=tuple(files))
