"""Checks that a corpus matches its index.

`check_sizes` runs at every start of a run, with one stat per local file. `verify_corpus` adds the
checks that read the files: dtype, ids, EOS, checksums.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np

from maxtext_olmo.cores import available_cores
from maxtext_olmo.corpus import paths as paths_lib
from maxtext_olmo.corpus import scan
from maxtext_olmo.corpus.document_lengths import DocumentLengths
from maxtext_olmo.corpus.index import OlmoNpyIndex
from maxtext_olmo.corpus.storage import Storage
from maxtext_olmo.corpus.storage import reason
from maxtext_olmo.corpus.token_files import TokenFiles
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.progress import progress_bar

_SAMPLES = 16
_SAMPLE_BYTES = 4096
# Fewer groups of eight bytes than this prove nothing.
_ENOUGH_GROUPS = 32


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
    """The findings that should be looked at."""
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

  Makes one stat per file. Objects in stores are checked by each request that reads them: asking for
  all of them first would take longer the larger the corpus is.
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
    vocab_size: Token ids must be below it; None does not check them.
    eos_id: Id that ends documents; None does not look for it.
    path_remap: prefix → replacement, for paths that begin differently on this machine.
    workers: Number of threads; one per core by default.
    progress: Whether to show a progress bar.
    storage: Storage that holds the files; local files by default.
  """
  for name, value, least in (("vocab_size", vocab_size, 1), ("eos_id", eos_id, 0)):
    if value is not None and value < least:
      raise ConfigError(f"{name} must be {least} or more, got {value}.")
  files = TokenFiles.of_index(index, path_remap=path_remap, storage=storage)
  task = _Task(index, files, vocab_size, eos_id)
  sizes = [index.expected_size(i) for i in range(len(index.files))]
  with progress_bar("Verifying", sum(sizes), enabled=progress, unit="bytes") as advance:

    results, _ = scan.map_files(
        lambda i: _verify_file(task, i, advance),
        len(sizes),
        workers=available_cores() if workers is None else workers,
        block=1,
    )
  outcomes = [outcome for outcome in results if outcome is not None]
  findings = [finding for outcome in outcomes for finding in outcome.findings]
  lengths = [outcome.lengths for outcome in outcomes if outcome.lengths is not None]
  documents = DocumentLengths.total(lengths)
  findings += _eos_findings(task, outcomes, documents)
  sums = sum(entry.checksum is not None for entry in index.files)
  ids, eos = vocab_size is not None, eos_id is not None
  optional = [
      (ids, f"ids (vocab_size {vocab_size})", "ids: no vocab_size was given"),
      (eos, f"EOS (id {eos_id})", "EOS: no eos_id was given"),
      (sums > 0, f"checksums of {sums} files", "checksums: the index has none"),
  ]
  return VerifyReport(
      files=len(index.files),
      tokens=index.total_tokens,
      findings=tuple(sorted(findings, key=lambda finding: finding.level == "warning")),
      checks=(
          "sizes",
          "data offsets",
          "dtype (from samples)",
          *(yes for done, yes, _ in optional if done),
      ),
      unchecked=tuple(no for done, _, no in optional if not done),
      documents=documents.describe() if documents.documents else "",
  )


def likelier_dtype(index: OlmoNpyIndex, files: TokenFiles, file_id: int) -> str | None:
  """Returns the dtype that samples of a file look like; None if it is the dtype of the index."""
  entry, itemsize = index.files[file_id], index.token_dtype.itemsize
  groups = entry.n_tokens * itemsize // 8
  # Groups of eight bytes, counted from the first token, so that each place in a group always has
  # the same meaning.
  width = min(groups * 8, _SAMPLE_BYTES)
  starts = np.unique(np.linspace(0, groups - width // 8, _SAMPLES).astype(np.int64)) * 8
  sample = np.empty(len(starts) * width, np.uint8)
  files.storage.fill(
      files.paths,
      np.full(len(starts), file_id),
      starts + entry.data_offset,
      np.full(len(starts), width),
      sample,
      np.arange(len(starts)) * width,
  )
  return likelier_dtype_of_bytes(sample, itemsize)


def likelier_dtype_of_bytes(sample: np.ndarray, itemsize: int) -> str | None:
  """Returns the dtype that a sample looks like; None if it has `itemsize` bytes or is unclear.

  A file does not name its dtype, but its bytes reveal it. Token ids are far below 2^24, so in a
  file of 4-byte tokens every fourth byte is zero, and so are most third bytes:

      byte       0   1   2   3   4   5   6   7
      uint32     ..  ..  0   0   ..  ..  0   0        two tokens
      uint64     ..  ..  0   0   0   0   0   0        one token
      uint16     ..  ..  ..  ..  ..  ..  ..  ..       four tokens
      uint16     ..  0   ..  0   ..  0   ..  0        four tokens of a tiny vocabulary

  If tokens are read as a wider dtype than their own, the ids are far above any vocabulary.

  Args:
    sample: Bytes of the file (uint8) in groups of eight, each beginning at a token.
    itemsize: Number of bytes per token that the index says.
  """
  groups = sample[: len(sample) // 8 * 8].reshape(-1, 8)
  groups = groups[groups.any(axis=1)]  # Zeros (padding, sparse files) are valid in every dtype.
  if len(groups) < _ENOUGH_GROUPS:
    return None
  zeros = (groups == 0).mean(axis=0)
  empty = zeros > 0.999
  guess = None
  if empty[4:].all():
    guess = 8
  elif empty[[3, 7]].all() and zeros[[2, 6]].min() > 0.5:
    guess = 4
  elif zeros[1::2].min() > 0.9 and zeros[::2].max() < 0.5:
    guess = 2
  elif itemsize >= 4 and zeros[[3, 7]].max() < 0.5:
    guess = 2  # Or 1: most ids would be above 2^24.
  return None if guess is None or guess == itemsize else f"uint{8 * guess}"


@dataclasses.dataclass(frozen=True, slots=True)
class _Task:
  index: OlmoNpyIndex
  files: TokenFiles
  vocab_size: int | None
  eos_id: int | None

  def reads_all(self, file_id: int) -> bool:
    """Returns whether the whole file must be read."""
    wanted = self.vocab_size is not None or self.eos_id is not None
    return wanted or self.index.files[file_id].checksum is not None


@dataclasses.dataclass(frozen=True, slots=True)
class _Outcome:
  """The result for one file; `lengths` is None if the EOS was not checked."""

  findings: list[Finding]
  lengths: DocumentLengths | None = None


def _check_size(index: OlmoNpyIndex, files: TokenFiles, file_id: int) -> None:
  path = files.paths[file_id]
  found = files.storage.size(path)
  if found != (expected := index.expected_size(file_id)):
    raise CorpusError(f"{path}: expected {expected} bytes, found {found}")


def _verify_file(task: _Task, file_id: int, advance: Callable[[int], None]) -> _Outcome:
  path, storage = task.files.paths[file_id], task.files.storage
  entry, dtype = task.index.files[file_id], task.index.token_dtype
  try:
    _check_size(task.index, task.files, file_id)
    info = scan.scan_file(path, dtype, storage)
    if info.data_offset != entry.data_offset:
      raise CorpusError(
          f"{path}: the tokens begin at byte {info.data_offset}, but the index says"
          f" {entry.data_offset}"
      )
    if other := likelier_dtype(task.index, task.files, file_id):
      raise CorpusError(
          f"{path}: the data look like {other}, but the index says {dtype.name}. Build the index"
          f" again with `--dtype {other}`."
      )
    advance(entry.data_offset)
    if task.reads_all(file_id):
      outcome = _read_all(task, file_id, advance)
    else:
      outcome = _Outcome([])
      advance(info.size_bytes - entry.data_offset)
  except CorpusError as error:
    # A file that is broken as a whole gives one finding; checking its tokens would only add noise.
    return _Outcome([_finding("error", path, reason(error))])
  rest = (info.size_bytes - info.data_offset) % dtype.itemsize
  if rest:
    message = (
        f"ends with an incomplete token ({rest} of the {dtype.itemsize} bytes of a {dtype.name}),"
        " which is never read; the file may be truncated"
    )
    outcome.findings.append(_finding("warning", path, message))
  return outcome


def _finding(level: Literal["error", "warning"], path: str, message: str) -> Finding:
  return Finding(level, path, message.removeprefix(f"{path}: "))


def _read_all(task: _Task, file_id: int, advance: Callable[[int], None]) -> _Outcome:
  path, storage = task.files.paths[file_id], task.files.storage
  entry, dtype = task.index.files[file_id], task.index.token_dtype
  algorithm, _, expected = (entry.checksum or "").partition(":")
  digest = scan.new_hash(algorithm) if algorithm else None
  place, bad_count, first_bad, lengths = 0, 0, None, DocumentLengths()
  if digest is not None and entry.data_offset:
    digest.update(storage.read(path, 0, entry.data_offset))
  rest = task.index.expected_size(file_id) - entry.data_offset
  for piece in storage.pieces(path, entry.data_offset, rest, scan.CHUNK_BYTES):
    if digest is not None:
      digest.update(piece)
    tokens = np.frombuffer(piece, dtype, len(piece) // dtype.itemsize)
    if task.vocab_size is not None and tokens.size and int(tokens.max()) >= task.vocab_size:
      bad = np.flatnonzero(tokens >= task.vocab_size)
      bad_count += len(bad)
      if first_bad is None:
        first_bad = place + int(bad[0]), int(tokens[bad[0]])
    if task.eos_id is not None:
      lengths.add(tokens == task.eos_id)
    place += tokens.size
    advance(len(piece))
  findings = []
  if first_bad is not None:
    token, value = first_bad
    byte = entry.data_offset + token * dtype.itemsize
    message = (
        f"token {token} (byte {byte}) is {value}, expected less than vocab_size {task.vocab_size}"
    )
    more = f"; {bad_count - 1} more in this file" if bad_count > 1 else ""
    findings.append(_finding("error", path, message + more))
  if digest is not None and digest.hexdigest() != expected:
    message = (
        f"the {algorithm} is {digest.hexdigest()}, but the index says {expected}: the content has"
        " changed"
    )
    findings.append(_finding("error", path, message))
  looked = task.eos_id is not None and entry.n_tokens > 0
  return _Outcome(findings, lengths if looked else None)


def _eos_findings(
    task: _Task, outcomes: list[_Outcome], documents: DocumentLengths
) -> list[Finding]:
  """Returns an error if no file has the EOS, and warnings if the id is unlikely to be the EOS."""
  if documents.files and not documents.documents:
    message = f"no file contains the EOS id {task.eos_id}: check that it belongs to this tokenizer"
    return [Finding("error", "", message)]
  message = f"does not contain the EOS id {task.eos_id}: no document ends in this file"
  findings = [
      Finding("warning", task.files.paths[i], message)
      for i, outcome in enumerate(outcomes)
      if outcome.lengths is not None and not outcome.lengths.documents
  ]
  if doubts := documents.doubts():
    message = f"id {task.eos_id} may not be the EOS, because {' and '.join(doubts)}"
    findings.append(Finding("warning", "", f"{message}: {documents.describe()}"))
  return findings
