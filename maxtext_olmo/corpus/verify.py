"""Is the corpus what its index says?

`check_sizes` is for every start: one stat per file. `verify_corpus` adds what takes reading: dtype,
ids, EOS, checksums.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np

from maxtext_olmo.corpus import paths
from maxtext_olmo.corpus import plausibility
from maxtext_olmo.corpus import scan
from maxtext_olmo.corpus.index_builder import OlmoNpyIndex
from maxtext_olmo.corpus.storage import LocalStorage
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.progress import progress_bar

_SAMPLES = 16
_SAMPLE_BYTES = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
  """Something about a file (or, with an empty path, about the corpus) that is wrong, or strange."""

  level: Literal["error", "warning"]
  path: str
  message: str


@dataclasses.dataclass(frozen=True, slots=True)
class VerifyReport:
  """What `verify_corpus` looked at, and what it found.

  Attributes:
    checks: what was checked, in words.
    unchecked: what was not, and why.
  """

  files: int
  tokens: int
  findings: tuple[Finding, ...]
  checks: tuple[str, ...] = ()
  unchecked: tuple[str, ...] = ()

  @property
  def errors(self) -> tuple[Finding, ...]:
    """The findings that must not reach a training run."""
    return tuple(finding for finding in self.findings if finding.level == "error")

  @property
  def warnings(self) -> tuple[Finding, ...]:
    """The findings that someone should look at."""
    return tuple(finding for finding in self.findings if finding.level == "warning")

  @property
  def ok(self) -> bool:
    """Whether there are no errors; warnings may be there."""
    return not self.errors


def check_sizes(
    index: OlmoNpyIndex, *, path_remap: Mapping[str, str] | None = None, workers: int = 16
) -> None:
  """Raises a CorpusError unless every file is there with its size; one stat per file."""

  def check(i: int) -> None:
    _check_size(index, i, paths.remap(index.resolve(i), path_remap))

  results, errors = scan.map_files(check, len(index.files), workers=workers)
  if errors:
    raise CorpusError(
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
) -> VerifyReport:
  """Checks every file against the index, and its tokens; what is wrong with data is reported.

  Args:
    vocab_size: token ids must be below it; ids are not checked unless it is given.
    eos_id: the id that ends documents; not looked for unless it is given.
    workers: threads; one per core unless given.
  """
  for name, value, least in (("vocab_size", vocab_size, 1), ("eos_id", eos_id, 0)):
    if value is not None and value < least:
      raise ConfigError(f"{name} must be {least} or more, got {value}.")
  task = _Task(index, vocab_size, eos_id, dict(path_remap or {}))
  total = sum(index.expected_size(i) for i in range(len(index.files)))
  if workers is None:
    workers = os.cpu_count() or 1
  with progress_bar("Verifying", total, enabled=progress, unit="bytes") as advance:

    def verify(i: int) -> _Outcome:
      done = 0

      def count(amount: int) -> None:
        nonlocal done
        done += amount
        advance(amount)

      outcome = _verify_file(task, i, count)
      # Of a file that is broken, or was only sampled, the rest is done as well.
      advance(index.expected_size(i) - done)
      return outcome

    results, _ = scan.map_files(verify, len(index.files), workers=workers, block=1)
  outcomes = [outcome for outcome in results if outcome is not None]
  findings = [finding for outcome in outcomes for finding in outcome.findings]
  if eos_id is not None:
    findings += _eos_findings(task, outcomes)
  checks, unchecked = _what_was_checked(task)
  return VerifyReport(
      files=len(index.files),
      tokens=index.total_tokens,
      findings=tuple(sorted(findings, key=lambda finding: finding.level == "warning")),
      checks=checks,
      unchecked=unchecked,
  )


def likelier_dtype(index: OlmoNpyIndex, file_id: int, path: str) -> str | None:
  """The dtype that samples of a file rather look like, or None where the index's looks right."""
  entry = index.files[file_id]
  groups = entry.n_tokens * index.token_dtype.itemsize // 8
  # Groups of eight bytes, counted from the first token: the same place in a group has the same
  # meaning.
  width = min(groups * 8, _SAMPLE_BYTES)
  places = np.unique(np.linspace(0, groups - width // 8, _SAMPLES).astype(np.int64)) * 8
  sample = np.empty(len(places) * width, np.uint8)
  sizes = np.full(len(places), width)
  LocalStorage(1).fill(
      [path],
      np.zeros(len(places), np.int64),
      places + entry.data_offset,
      sizes,
      sample,
      np.arange(len(places)) * width,
  )
  return plausibility.likelier_dtype(sample, index.token_dtype.itemsize)


@dataclasses.dataclass(frozen=True, slots=True)
class _Task:
  index: OlmoNpyIndex
  vocab_size: int | None
  eos_id: int | None
  path_remap: dict[str, str]

  def path(self, file_id: int) -> str:
    return paths.remap(self.index.resolve(file_id), self.path_remap)

  def reads_all(self, file_id: int) -> bool:
    """Whether a sample of the file is not enough."""
    wanted = self.vocab_size is not None or self.eos_id is not None
    return wanted or self.index.files[file_id].checksum is not None


@dataclasses.dataclass(frozen=True, slots=True)
class _Outcome:
  """Of one file; `has_eos` is None where nobody looked, or could look."""

  findings: tuple[Finding, ...]
  has_eos: bool | None = None


def _check_size(index: OlmoNpyIndex, file_id: int, path: str) -> None:
  try:
    found = os.stat(path).st_size
  except OSError as error:
    raise CorpusError(f"{path}: {error.strerror}") from error
  if found != (expected := index.expected_size(file_id)):
    raise CorpusError(f"{path}: expected {expected} bytes, found {found}")


def _verify_file(task: _Task, file_id: int, advance: Callable[[int], None]) -> _Outcome:
  path = task.path(file_id)
  entry, dtype = task.index.files[file_id], task.index.token_dtype
  try:
    _check_size(task.index, file_id, path)
    facts = scan.scan_file(path, dtype)
    if facts.data_offset != entry.data_offset:
      raise CorpusError(
          f"{path}: the tokens begin at byte {facts.data_offset}, the index says"
          f" {entry.data_offset}"
      )
    if other := likelier_dtype(task.index, file_id, path):
      raise CorpusError(
          f"{path}: the data look like {other}, the index says {dtype.name}. Build the index again"
          f" with `--dtype {other}`."
      )
    outcome = _Outcome(())
    if task.reads_all(file_id):
      outcome = _read_all(task, file_id, path, advance)
  except CorpusError as error:
    # A file that is broken as a whole is one finding; its tokens would only add noise.
    return _Outcome((_finding("error", path, str(error)),))
  rest = (facts.size_bytes - facts.data_offset) % dtype.itemsize
  if rest:
    message = (
        f"ends within a token ({rest} of the {dtype.itemsize} bytes of a {dtype.name}), which is"
        " never read: was the file cut off?"
    )
    odd = _finding("warning", path, message)
    outcome = dataclasses.replace(outcome, findings=(*outcome.findings, odd))
  return outcome


def _finding(level: Literal["error", "warning"], path: str, message: str) -> Finding:
  return Finding(level, path, message.removeprefix(f"{path}: "))


def _read_all(task: _Task, file_id: int, path: str, advance: Callable[[int], None]) -> _Outcome:
  entry, dtype = task.index.files[file_id], task.index.token_dtype
  algorithm, _, expected = (entry.checksum or "").partition(":")
  digest = scan.new_hash(algorithm) if algorithm else None
  place, bad_count, first_bad, has_eos = 0, 0, None, False
  with scan.open_token_file(path) as file:
    header = scan.read_bytes(file, path, entry.data_offset)
    if digest is not None:
      digest.update(header)
    advance(len(header))
    for piece in scan.pieces(file, path, alignment=dtype.itemsize):
      if digest is not None:
        digest.update(piece)
      tokens = np.frombuffer(piece[: len(piece) // dtype.itemsize * dtype.itemsize], dtype)
      if task.vocab_size is not None and tokens.size and int(tokens.max()) >= task.vocab_size:
        bad = np.flatnonzero(tokens >= task.vocab_size)
        bad_count += len(bad)
        if first_bad is None:
          first_bad = place + int(bad[0]), int(tokens[bad[0]])
      if task.eos_id is not None and not has_eos:
        has_eos = bool((tokens == task.eos_id).any())
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
  return _Outcome(tuple(findings), has_eos if looked else None)


def _eos_findings(task: _Task, outcomes: list[_Outcome]) -> list[Finding]:
  """No EOS anywhere is a wrong id; none in some file may be one long document."""
  looked = [i for i, outcome in enumerate(outcomes) if outcome.has_eos is not None]
  without = [i for i in looked if not outcomes[i].has_eos]
  if without and len(without) == len(looked):
    message = f"no file holds the EOS id {task.eos_id}: is it this tokenizer's?"
    return [Finding("error", "", message)]
  message = f"holds no EOS id {task.eos_id}: no document ends in this file"
  return [Finding("warning", task.path(i), message) for i in without]


def _what_was_checked(task: _Task) -> tuple[tuple[str, ...], tuple[str, ...]]:
  sums = sum(entry.checksum is not None for entry in task.index.files)
  checks = ["sizes", "data offsets", "dtype (from samples)"]
  unchecked: list[str] = []
  for done, yes, no in (
      (
          task.vocab_size is not None,
          f"ids (vocab_size {task.vocab_size})",
          "ids: no vocab_size was given",
      ),
      (task.eos_id is not None, f"EOS (id {task.eos_id})", "EOS: no eos_id was given"),
      (sums > 0, f"checksums of {sums} files", "checksums: the index has none"),
  ):
    (checks if done else unchecked).append(yes if done else no)
  return tuple(checks), tuple(unchecked)
