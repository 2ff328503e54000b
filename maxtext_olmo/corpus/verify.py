"""Checks that a corpus is what its index says.

`check_sizes` is for every start of a run: one stat per file. `verify_corpus` adds the checks that
have to read: dtype, ids, EOS, checksums.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np

from maxtext_olmo.cores import available_cores
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
  """A fault or an oddity of a file, or of the whole corpus where the path is empty."""

  level: Literal["error", "warning"]
  path: str
  message: str


@dataclasses.dataclass(frozen=True, slots=True)
class VerifyReport:
  """The checks `verify_corpus` made, and what they found.

  Attributes:
    checks: what was checked, in words.
    unchecked: what was not, and why.
    documents: the figures of the documents that the EOS makes; "" where none was given.
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
    """The findings that must not reach a training run."""
    return self._of("error")

  @property
  def warnings(self) -> tuple[Finding, ...]:
    """The findings that deserve a look."""
    return self._of("warning")

  @property
  def ok(self) -> bool:
    """Whether there are no errors; there may be warnings."""
    return not self.errors


def check_sizes(
    index: OlmoNpyIndex,
    *,
    path_remap: Mapping[str, str] | None = None,
    workers: int = 16,
    storage: Storage | None = None,
) -> None:
  """Raises a CorpusError unless every file exists with its size; one stat per file."""
  files = TokenFiles.of_index(index, path_remap=path_remap, storage=storage)

  def check(i: int) -> None:
    _check_size(index, files, i)

  results, errors = scan.map_files(check, len(index.files), workers=workers)
  if errors:
    raise scan.kind_of(errors)(
        f"{len(errors)} of {len(results)} files of the corpus are not what the index says:\n"
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
  """Checks every file and its tokens against the index; reports faults of the data.

  Args:
    vocab_size: token ids must be below it; ids are not checked unless it is given.
    eos_id: the id that ends documents; not looked for unless it is given.
    workers: threads; one per core unless given.
    storage: where the files are read from; local files unless given.
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
  """Returns the dtype that samples of a file look like; None where they look like the index's."""
  entry, itemsize = index.files[file_id], index.token_dtype.itemsize
  groups = entry.n_tokens * itemsize // 8
  # Groups of eight bytes, counted from the first token, so that the same place in a group always
  # has the same meaning.
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
  """Returns the dtype that a sample looks like; None where that is one of `itemsize` bytes.

  A file does not name its dtype, but its bytes show it. A token id is far below 2^24, so in files
  of 4-byte tokens every fourth byte is zero, and most of the third ones:

      byte       0   1   2   3   4   5   6   7
      uint32     ..  ..  0   0   ..  ..  0   0        two tokens
      uint64     ..  ..  0   0   0   0   0   0        one token
      uint16     ..  ..  ..  ..  ..  ..  ..  ..       four tokens
      uint16     ..  0   ..  0   ..  0   ..  0        four tokens of a tiny vocabulary

  Read as a wider dtype than they have, ids are far above any vocabulary.

  Args:
    sample: uint8; begins where a token begins, in groups of eight bytes.
  """
  groups = sample[: len(sample) // 8 * 8].reshape(-1, 8)
  groups = groups[groups.any(axis=1)]  # Zeros fit every dtype: padding, or holes in a sparse file.
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
    """Returns whether a sample of the file is not enough."""
    wanted = self.vocab_size is not None or self.eos_id is not None
    return wanted or self.index.files[file_id].checksum is not None


@dataclasses.dataclass(frozen=True, slots=True)
class _Outcome:
  """The result for one file; `lengths` is None where no EOS was looked for."""

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
          f"{path}: the tokens begin at byte {info.data_offset}, the index says"
          f" {entry.data_offset}"
      )
    if other := likelier_dtype(task.index, task.files, file_id):
      raise CorpusError(
          f"{path}: the data look like {other}, the index says {dtype.name}. Build the index again"
          f" with `--dtype {other}`."
      )
    advance(entry.data_offset)
    if task.reads_all(file_id):
      outcome = _read_all(task, file_id, advance)
    else:
      outcome = _Outcome([])
      advance(info.size_bytes - entry.data_offset)
  except CorpusError as error:
    # A file that is broken as a whole is one finding; its tokens would only add noise.
    return _Outcome([_finding("error", path, reason(error))])
  rest = (info.size_bytes - info.data_offset) % dtype.itemsize
  if rest:
    message = (
        f"ends within a token ({rest} of the {dtype.itemsize} bytes of a {dtype.name}), which is"
        " never read: was the file cut off?"
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
        f"the {algorithm} is {digest.hexdigest()}, the index says {expected}: the content has"
        " changed"
    )
    findings.append(_finding("error", path, message))
  looked = task.eos_id is not None and entry.n_tokens > 0
  return _Outcome(findings, lengths if looked else None)


def _eos_findings(
    task: _Task, outcomes: list[_Outcome], documents: DocumentLengths
) -> list[Finding]:
  """Returns an error where no file has an EOS, and warnings where it is unlikely to be one."""
  if documents.files and not documents.documents:
    message = f"no file holds the EOS id {task.eos_id}: is it this tokenizer's?"
    return [Finding("error", "", message)]
  message = f"holds no EOS id {task.eos_id}: no document ends in this file"
  findings = [
      Finding("warning", task.files.paths[i], message)
      for i, outcome in enumerate(outcomes)
      if outcome.lengths is not None and not outcome.lengths.documents
  ]
  if doubts := documents.doubts():
    message = f"id {task.eos_id} may not be the EOS, because {' and '.join(doubts)}"
    findings.append(Finding("warning", "", f"{message}: {documents.describe()}"))
  return findings
