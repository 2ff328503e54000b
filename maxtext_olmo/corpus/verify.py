"""Checks that a corpus matches its index.

`check_sizes` runs whenever a run starts, with one stat per local file. `verify_corpus` adds the
checks that read the files: dtype, ids, EOS, checksums. It reads them piece by piece, on one machine
or on many (`verify_work`, `work`).
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Literal

from maxtext_olmo import english
from maxtext_olmo.corpus import checksums
from maxtext_olmo.corpus import paths as paths_lib
from maxtext_olmo.corpus import scan
from maxtext_olmo.corpus import urls
from maxtext_olmo.corpus import verify_work
from maxtext_olmo.corpus.document_lengths import DocumentLengths
from maxtext_olmo.corpus.index import OlmoNpyIndex
from maxtext_olmo.corpus.storage import Storage
from maxtext_olmo.corpus.storage import narrowed
from maxtext_olmo.corpus.storage import open_storage
from maxtext_olmo.corpus.token_files import TokenFiles
from maxtext_olmo.corpus.verify_work import FileCheck
from maxtext_olmo.corpus.work import pieces as pieces_lib
from maxtext_olmo.corpus.work import run as run_lib
from maxtext_olmo.corpus.work.options import WorkOptions
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError

_SHOWN = 3  # Byte ranges that a finding lists.


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
  """A problem with a file, or with the whole corpus if the path is empty."""

  level: Literal["error", "warning"]
  path: str
  message: str


@dataclasses.dataclass(frozen=True, slots=True)
class VerifyReport:
  """The result of `verify_corpus`.

  Attributes:
    files: Number of files.
    tokens: Number of tokens in the corpus.
    findings: Problems, errors first.
    checks: Checks that were made, in words.
    unchecked: Checks that were not made, and why.
    documents: Statistics of the documents that the EOS ends; "" if no EOS was given.
  """

  files: int
  tokens: int
  findings: tuple[Finding, ...]
  checks: tuple[str, ...] = ()
  unchecked: tuple[str, ...] = ()
  documents: str = ""

  def _of(self, level: str) -> tuple[Finding, ...]:
    return tuple(finding for finding in self.findings if finding.level == level)

  @property
  def errors(self) -> tuple[Finding, ...]:
    """The findings that make the corpus unfit for training."""
    return self._of("error")

  @property
  def warnings(self) -> tuple[Finding, ...]:
    """The findings that deserve a closer look."""
    return self._of("warning")

  @property
  def ok(self) -> bool:
    """True if there are no errors; there may be warnings."""
    return not self.errors


def check_sizes(
    index: OlmoNpyIndex,
    *,
    path_remap: Mapping[str, str] | None = None,
    workers: int = 16,
    storage: Storage | None = None,
) -> None:
  """Raises CorpusError unless every local file exists and has the right size.

  Makes one stat per file. Objects in stores are checked by each request that reads them: checking
  all of them first would take time that grows with the corpus.
  """
  files = TokenFiles.of_index(index, path_remap=path_remap, storage=storage)
  local = [i for i, path in enumerate(files.paths) if not paths_lib.is_url(path)]

  def check(i: int) -> None:
    _check_size(index, files, local[i])

  results, errors = scan.map_files(check, len(local), workers=workers)
  if errors:
    raise scan.kind_of(errors)(
        f"{len(errors)} of {len(results)} files of the corpus do not match the index:\n"
        f"{scan.list_errors(errors)}\n"
        f"The index expects them below {index.base or '/'}. If the corpus has moved, remap its"
        " paths (olmo_path_remap_from and olmo_path_remap_to), or load the index with the new base."
        " If files were changed, restore them, or build the index again with `maxtext-olmo index"
        " build` and start a new run."
    )


def verify_corpus(
    index: OlmoNpyIndex,
    *,
    vocab_size: int | None = None,
    eos_id: int | None = None,
    path_remap: Mapping[str, str] | None = None,
    workers: int | None = None,
    progress: bool = False,
    storage: Storage | None = None,
) -> VerifyReport:
  """Checks every file and its tokens against the index, and reports the problems.

  Args:
    index: Index of the corpus.
    vocab_size: Token ids must be below this; None does not check ids.
    eos_id: Id that ends documents; None does not check the EOS.
    path_remap: prefix → replacement, for paths that begin differently on this machine.
    workers: Number of threads; one per core by default.
    progress: Whether to show a progress bar.
    storage: Storage that holds the files; `open_storage()` by default.
  """
  outcome = check_pieces(
      index,
      WorkOptions(workers=workers),
      vocab_size=vocab_size,
      eos_id=eos_id,
      path_remap=path_remap,
      progress=progress,
      storage=storage,
  )
  return make_report(index, outcome, vocab_size=vocab_size, eos_id=eos_id)


def check_pieces(
    index: OlmoNpyIndex,
    options: WorkOptions,
    *,
    vocab_size: int | None = None,
    eos_id: int | None = None,
    path_remap: Mapping[str, str] | None = None,
    description: str = "Verifying",
    progress: bool = False,
    storage: Storage | None = None,
    piece_bytes: int = pieces_lib.PIECE_BYTES,
) -> run_lib.Outcome:
  """Checks the pieces of all files, or a part of them, on one machine or on many.

  Args:
    index: Index of the corpus.
    options: How the work is done.
    vocab_size: Token ids must be below this; None does not check ids.
    eos_id: Id that ends documents; None does not check the EOS.
    path_remap: prefix → replacement, for paths that begin differently on this machine.
    description: Text before the progress bar.
    progress: Whether to show a progress bar.
    storage: Storage that holds the files; `open_storage()` by default.
    piece_bytes: Size of a piece in bytes, for files without a checksum.
  """
  for name, value, least in (("vocab_size", vocab_size, 1), ("eos_id", eos_id, 0)):
    if value is not None and value < least:
      raise ConfigError(f"{name} must be {least} or more, got {value}.")
  sources = pieces_lib.source_files(index, path_remap=path_remap)
  for algorithm in {source.checksum.partition(":")[0] for source in sources if source.checksum}:
    checksums.new_hash(algorithm)  # Raises for an unknown name before anything is read.
  if storage is None and not options.in_other_processes:
    storage = narrowed(open_storage(), [source.path for source in sources])
  work = verify_work.VerifyWork(vocab_size, eos_id, storage=storage)
  return run_lib.run_work(
      work,
      [piece for source in sources for piece in work.pieces(source, piece_bytes)],
      options,
      # The checksums decide what is computed, and are not part of the fingerprint.
      fingerprint=f"{index.fingerprint} {index.annotations}",
      description=description,
      progress=progress,
  )


def make_report(
    index: OlmoNpyIndex,
    outcome: run_lib.Outcome,
    *,
    vocab_size: int | None = None,
    eos_id: int | None = None,
) -> VerifyReport:
  """Joins the results of all pieces; raises CorpusError if pieces are missing.

  If a piece of a file failed, the file could not be read, which is a finding.

  Args:
    index: Index of the corpus.
    outcome: What `check_pieces` returned, for all pieces.
    vocab_size: The vocabulary size that it was given.
    eos_id: The EOS that it was given.
  """
  dataclasses.replace(outcome, failures=()).check("The corpus cannot be verified")
  files = files_of(outcome)
  findings: list[Finding] = []
  for file in files:
    findings += _file_findings(file, vocab_size, index.files[file.source.id].piece_sums)
  documents = DocumentLengths.total([file.lengths for file in files if file.lengths is not None])
  findings += _eos_findings(eos_id, files, documents)
  sums = sum(file.source.checksum is not None for file in files)
  tags = sum(file.source.etag is not None and urls.is_url(file.source.path) for file in files)
  ids, eos = vocab_size is not None, eos_id is not None
  optional = [
      (ids, f"ids (vocab_size {vocab_size})", "ids: no vocab_size was given"),
      (eos, f"EOS (id {eos_id})", "EOS: no eos_id was given"),
      (sums > 0, f"checksums of {english.count(sums, 'file')}", "checksums: the index has none"),
  ]
  return VerifyReport(
      files=len(index.files),
      tokens=index.total_tokens,
      findings=tuple(sorted(findings, key=lambda finding: finding.level == "warning")),
      checks=(
          "sizes",
          "data offsets",
          "dtype (from samples)",
          *([f"ETags of {english.count(tags, 'object')}"] if tags else []),
          *(yes for done, yes, _ in optional if done),
      ),
      unchecked=tuple(no for done, _, no in optional if not done),
      documents=documents.describe() if documents.documents else "",
  )


def _check_size(index: OlmoNpyIndex, files: TokenFiles, file_id: int) -> None:
  path = files.paths[file_id]
  found = files.storage.size(path)
  if found != (expected := index.expected_size(file_id)):
    raise CorpusError(f"{path}: expected {expected} bytes, found {found}")


def files_of(outcome: run_lib.Outcome) -> list[FileCheck]:
  """Returns what was found in each file, in file order."""
  found: dict[int, FileCheck] = {}
  for file, group in itertools.groupby(outcome, key=lambda pair: pair[0].file):
    pairs = list(group)
    found[file] = verify_work.join_pieces(pairs[0][0].source, [result for _, result in pairs])
  for failure in outcome.failures:
    item = failure.item
    if item.file not in found or found[item.file].broken is None:
      found[item.file] = FileCheck(item.source, broken=failure.reason)
  return [found[file] for file in sorted(found)]


def _file_findings(
    file: FileCheck, vocab_size: int | None, piece_sums: str | None
) -> Iterator[Finding]:
  source, dtype = file.source, file.source.token_dtype
  if file.broken is not None:
    yield _finding("error", source.path, file.broken)
    return
  if file.first_bad is not None:
    token, value = file.first_bad
    byte = source.data_offset + token * dtype.itemsize
    message = f"token {token} (byte {byte}) is {value}, expected less than vocab_size {vocab_size}"
    more = f"; {file.bad - 1} more in this file" if file.bad > 1 else ""
    yield _finding("error", source.path, message + more)
  algorithm, _, expected = (source.checksum or "").partition(":")
  if algorithm and file.digest != expected:
    message = (
        f"the {algorithm} is {file.digest}, but the index says {expected}: the content has changed"
    )
    yield _finding("error", source.path, message + _changed_bytes(file, piece_sums or ""))
  rest = (source.size - source.data_offset) % dtype.itemsize
  if rest:
    message = (
        f"ends with an incomplete token ({rest} of the {dtype.itemsize} bytes of a {dtype.name}),"
        " which is never read; the file may be truncated"
    )
    yield _finding("warning", source.path, message)


def _changed_bytes(file: FileCheck, piece_sums: str) -> str:
  """Returns the byte ranges of the pieces that have changed, in words; "" if they are not known.

  Args:
    file: What was found in a file whose checksum differs.
    piece_sums: The sums of its pieces in the index.
  """
  size = checksums.piece_bytes((file.source.checksum or "").partition(":")[0])
  expected, found = checksums.split_pieces(piece_sums), file.piece_sums
  if size is None or not found or len(expected) != len(found):
    return ""
  changed = [i for i in range(len(found)) if found[i] != expected[i]]
  ranges = [f"{i * size} to {min((i + 1) * size, file.source.size)}" for i in changed[:_SHOWN]]
  more = f", and {len(changed) - _SHOWN} more pieces" if len(changed) > _SHOWN else ""
  return f" in bytes {', '.join(ranges)}{more}"


def _finding(level: Literal["error", "warning"], path: str, message: str) -> Finding:
  return Finding(level, path, message.removeprefix(f"{path}: "))


def _eos_findings(
    eos_id: int | None, files: list[FileCheck], documents: DocumentLengths
) -> list[Finding]:
  """Returns an error if no file has the EOS, and warnings if the id is unlikely to be the EOS."""
  if documents.files and not documents.documents:
    message = f"no file contains the EOS id {eos_id}: check that it belongs to this tokenizer"
    return [Finding("error", "", message)]
  message = f"does not contain the EOS id {eos_id}: no document ends in this file"
  findings = [
      Finding("warning", file.source.path, message)
      for file in files
      if file.lengths is not None and not file.lengths.documents
  ]
  if doubts := documents.doubts():
    message = f"id {eos_id} may not be the EOS, because {' and '.join(doubts)}"
    findings.append(Finding("warning", "", f"{message}: {documents.describe()}"))
  return findings
