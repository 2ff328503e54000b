"""Makes a corpus from text files, with many workers.

    files ─ plan ─► units ─ tokenize ─► token files of units ─ assemble ─► parts ─ publish ─► corpus
                    (`text_units`)      (`tokenize_units`)                 (`assemble_parts`)

The corpus depends only on the files and the settings, not on the number of workers, the engine, or
interruptions. If anything is killed, the units that were tokenized stay in the results directory,
and the next run with the same arguments continues with the rest.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import NamedTuple

from maxtext_olmo.cores import available_cores
from maxtext_olmo.corpus import assemble_parts
from maxtext_olmo.corpus import boundaries
from maxtext_olmo.corpus import paths as paths_lib
from maxtext_olmo.corpus import publish
from maxtext_olmo.corpus import scan
from maxtext_olmo.corpus import text_files
from maxtext_olmo.corpus import text_units
from maxtext_olmo.corpus import tokenize
from maxtext_olmo.corpus import tokenize_units
from maxtext_olmo.corpus import tokenizer as tokenizer_lib
from maxtext_olmo.corpus import unit_results
from maxtext_olmo.corpus import urls
from maxtext_olmo.corpus.storage import open_storage
from maxtext_olmo.corpus.storage import writing
from maxtext_olmo.corpus.work import options as options_lib
from maxtext_olmo.corpus.work import results as results_lib
from maxtext_olmo.corpus.work import run as run_lib
from maxtext_olmo.corpus.work import tasks
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.errors import MissingFileError

_REQUESTS_AT_ONCE = 32
_THREADS = "RAYON_NUM_THREADS"  # Read by the package `tokenizers`.


@dataclasses.dataclass(frozen=True)
class MakeSettings:
  """What a corpus is made of, and how.

  Attributes:
    tokenizer: The tokenizer.
    form: How documents are found in text files.
    tokens_per_file: A part ends after the document that reaches this number of tokens.
    skip_unreadable: Whether to leave out files that cannot be read, instead of raising an error.
    unit_bytes: Size of a unit of work; by default, it depends on the size of the text.
  """

  tokenizer: tokenizer_lib.TokenizerSource
  form: text_files.TextFormat = dataclasses.field(default_factory=text_files.TextFormat)
  tokens_per_file: int = tokenize.DEFAULT_TOKENS_PER_FILE
  skip_unreadable: bool = False
  unit_bytes: int | None = None


class PartSummary(NamedTuple):
  """What is known about a part of the work.

  Attributes:
    skipped: Reason for each file that is left out: those of the part, and those of any part whose
      beginning cannot be read.
  """

  skipped: tuple[str, ...]


def make_from_files(
    files: Mapping[str, Sequence[str]],
    out_dir: str | os.PathLike[str],
    settings: MakeSettings,
    options: options_lib.WorkOptions,
    *,
    overwrite: bool = False,
    progress: bool = False,
) -> tokenize.CorpusSummary | PartSummary:
  """Tokenizes text files and writes token files, their boundary files and a mix manifest.

  Args:
    files: label → text files, whose documents keep their order.
    out_dir: Directory or URL of the corpus. A missing directory is created.
    settings: How to make the corpus.
    options: Which workers do it, and where units are kept until the corpus is complete. Workers on
      this machine are processes, unless there is only one.
    overwrite: Whether to replace an existing corpus once the new one is complete.
    progress: Whether to show progress bars.

  Returns:
    A summary of the corpus, or of a part if the options select only a part of the work.

  Raises:
    CorpusError: Files cannot be read, or a label has no documents.
  """
  out_dir = urls.without_secrets(out_dir)
  tokenizer = settings.tokenizer.load()
  tokenize.check_names(files, tokenizer.name)
  if settings.tokens_per_file < 1:
    raise ConfigError(f"tokens_per_file must be positive, got {settings.tokens_per_file}.")
  publish.check_target(out_dir, overwrite=overwrite)
  job = _Job(paths_lib.absolute(out_dir), settings, options, progress)
  with publish.nothing_left(out_dir), _without_empty_directories(options.results):
    if options.part is None:
      publish.check_writable(out_dir)  # Now, and not after hours of work.
    # A part first does what it can, so that one bad file does not stop all machines.
    refuse = not settings.skip_unreadable and options.part is None
    readable, skipped = _examine(files, settings, refuse=refuse)
    units = text_units.plan_units(readable, settings.form, settings.unit_bytes)
    tokenized, results = _tokenize(job, units)
    unreadable = _find_unreadable(job, skipped, tokenized, results)
    if options.part is not None:
      return PartSummary((*skipped, *unreadable.values()))
    found = unit_results.join_units(units, results, unreadable)
    groups = _plan_groups(job, found)
    itemsize = tokenizer_lib.dtype_for(tokenizer.vocab_size).itemsize
    with publish.new_corpus(
        out_dir, overwrite=overwrite, name=_digest(*(one.key for one in groups)), in_place=True
    ) as corpus:
      assembled = _assemble(job, groups, corpus, tokenizer.name, itemsize)
    job.remove_units()
    for outcome in (tokenized, assembled):
      outcome.discard()
  return tokenize.CorpusSummary(
      mix_file=corpus.mix_file,
      tokenizer=tokenizer.name,
      dtype=tokenizer_lib.dtype_for(tokenizer.vocab_size).name,
      vocab_size=tokenizer.vocab_size,
      eos_id=tokenizer.eos_id,
      files=len(corpus.lines),
      documents=sum(unit.kept_documents for some in found.units.values() for unit in some),
      empty_documents=found.empty,
      tokens=sum(unit.kept_tokens for some in found.units.values() for unit in some),
      skipped=(*skipped, *unreadable.values()),
  )


@dataclasses.dataclass(frozen=True)
class _Job:
  """What all steps of making a corpus need to know.

  Attributes:
    target: Absolute path or URL of the corpus.
    settings: How to make the corpus.
    options: Which workers do it.
    progress: Whether to show progress bars.
  """

  target: str
  settings: MakeSettings
  options: options_lib.WorkOptions
  progress: bool

  @property
  def units_place(self) -> str:
    """Directory or URL of the tokenized units."""
    return f"{self.options.results.rstrip('/')}/units-{_digest(self.target)}"

  def run(
      self,
      work: run_lib.Work,
      items: Sequence[tasks.Item],
      options: options_lib.WorkOptions,
      description: str,
      unit: str = "bytes",
  ) -> run_lib.Outcome:
    """Processes the items that have no result yet; `unit` is the unit of their weights."""
    return run_lib.run_work(
        work,
        items,
        _for_items(options, len(items)),
        fingerprint=self.target,
        description=description,
        unit=unit,
        progress=self.progress,
    )

  def remove_units(self) -> None:
    """Removes the tokenized units."""
    if not urls.is_url(self.units_place):
      shutil.rmtree(self.units_place, ignore_errors=True)
      return
    with contextlib.suppress(MissingFileError):
      found = list(open_storage().remote.list_folder(self.units_place))
      with concurrent.futures.ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:
        list(pool.map(writing.remove, found))


def _digest(*texts: str) -> str:
  return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def _for_items(options: options_lib.WorkOptions, count: int) -> options_lib.WorkOptions:
  """Returns options that use processes, but no more of them than there are items."""
  if options.dask or options.ray:
    return options
  workers = max(1, min(options.workers or available_cores(), count))
  return dataclasses.replace(options, workers=workers, processes=workers > 1)


@contextlib.contextmanager
def _without_empty_directories(results: str) -> Iterator[None]:
  """Removes the directory for results, and those in it, if they are empty at the end."""
  try:
    yield
  finally:
    if not urls.is_url(results) and results.endswith(results_lib.OWN_SUFFIX):
      with contextlib.suppress(OSError):
        for name in os.listdir(results):
          with contextlib.suppress(OSError):
            os.rmdir(os.path.join(results, name))
        os.rmdir(results)


def _examine(
    files: Mapping[str, Sequence[str]], settings: MakeSettings, *, refuse: bool
) -> tuple[dict[str, list[text_units.TextFile]], list[str]]:
  """Returns the files that can be read, by label, and the reason for each that cannot.

  Raises:
    CorpusError: `refuse` is set, and there are files that cannot be read.
  """
  paths = list(dict.fromkeys(path for some in files.values() for path in some))
  found, errors = text_units.examine_files(paths, settings.form)
  reasons = [str(error) for error in errors]
  if refuse:
    _refuse(reasons)
  readable = {file.path: file for file in found if file is not None}
  kept = {
      label: [readable[path] for path in some if path in readable] for label, some in files.items()
  }
  return kept, reasons


def _refuse(reasons: Sequence[str]) -> None:
  """Raises an error if there are files that cannot be read."""
  hint = "To leave out such files, use --skip-unreadable."
  if len(reasons) == 1:
    raise CorpusError(f"{reasons[0]} {hint}")
  if reasons:
    listed = scan.list_errors([CorpusError(reason) for reason in reasons])
    raise CorpusError(f"{len(reasons):,} files cannot be read:\n{listed}\n{hint}")


def _tokenize(
    job: _Job, units: Mapping[str, Sequence[text_units.TextUnit]]
) -> tuple[run_lib.Outcome, dict[str, unit_results.UnitResult]]:
  """Tokenizes all units that are not done yet, and returns the result of each by its key."""
  # A file that has several labels is tokenized once.
  unique = {unit.key: unit for some in units.values() for unit in some}
  settings = job.settings
  work = tokenize_units.TokenizeUnits(settings.tokenizer, settings.form, job.units_place)
  workers = _for_items(job.options, len(unique)).workers or 1

  def run() -> tuple[run_lib.Outcome, dict[str, unit_results.UnitResult]]:
    outcome = job.run(work, list(unique.values()), job.options, "Tokenizing")
    outcome.check("Some text was not tokenized")
    return outcome, unit_results.read_results(outcome, job.units_place)

  with _tokenizer_threads(max(1, available_cores() // workers) if workers > 1 else None):
    outcome, results = run()
    if job.options.retry_failed and outcome.reused and _remove_unreadable(outcome, results):
      outcome, results = run()
  return outcome, results


def _remove_unreadable(
    outcome: run_lib.Outcome, results: Mapping[str, unit_results.UnitResult]
) -> bool:
  """Removes the results of units with unreadable files, and returns whether there are any."""
  names = [outcome.done[key] for key, result in results.items() if not result.is_complete]
  outcome.results.remove(names)
  return bool(names)


@contextlib.contextmanager
def _tokenizer_threads(count: int | None) -> Iterator[None]:
  """Sets the number of threads of `tokenizers` in each new process, unless the user has set it."""
  if count is None or _THREADS in os.environ:
    yield
    return
  os.environ[_THREADS] = str(count)
  try:
    yield
  finally:
    del os.environ[_THREADS]


def _find_unreadable(
    job: _Job,
    skipped: Sequence[str],
    outcome: run_lib.Outcome,
    results: Mapping[str, unit_results.UnitResult],
) -> dict[str, str]:
  """Returns why files cannot be read completely, by path.

  Raises:
    CorpusError: There are such files, or files that were skipped before, and none may be left out.
  """
  unreadable = unit_results.find_unreadable(outcome.items, results)
  if not job.settings.skip_unreadable:
    if unreadable and job.options.part is None and not job.options.merge:
      _remove_unreadable(outcome, results)  # The next run tries to read these files again.
    _refuse([*skipped, *unreadable.values()])
  return unreadable


def _plan_groups(job: _Job, found: unit_results.Found) -> list[assemble_parts.PartGroup]:
  storage = open_storage()
  read_lengths = functools.partial(assemble_parts.read_lengths, storage)
  groups = []
  for label, units in found.units.items():
    groups += assemble_parts.plan_groups(label, units, job.settings.tokens_per_file, read_lengths)
  return groups


def _assemble(
    job: _Job,
    groups: Sequence[assemble_parts.PartGroup],
    corpus: publish.NewCorpus,
    tokenizer: str,
    itemsize: int,
) -> run_lib.Outcome:
  """Writes the parts, and appends the lines of the manifest."""
  directory = f"{corpus.directory}/{tokenizer}"
  work = assemble_parts.AssembleParts(directory, itemsize, job.settings.tokens_per_file)
  options = dataclasses.replace(job.options, merge=False, retry_failed=True)
  if urls.is_url(directory):
    corpus.remove_manifest()
  outcome = job.run(work, groups, options, "Writing", "tokens")
  if outcome.reused and not _is_complete(outcome, directory, itemsize):
    outcome.discard()  # The parts of an earlier run were removed.
    outcome = job.run(work, groups, options, "Writing", "tokens")
  outcome.check("Some files were not written")
  written = set()
  for group, result in outcome:
    corpus.lines.extend(f"{group.label},{{TOKENIZER}}/{group.label}/{p}\n" for p in result["parts"])
    written |= {f"{directory}/{group.label}/{part}" for part in result["parts"]}
  if not urls.is_url(directory):
    _remove_others(corpus.directory, written | {boundaries.boundary_path(p) for p in written})
  return outcome


def _is_complete(outcome: run_lib.Outcome, directory: str, itemsize: int) -> bool:
  """Returns whether the token files that an outcome names have all their tokens."""
  storage = open_storage()
  try:
    for group, result in outcome:
      paths = [f"{directory}/{group.label}/{part}" for part in result["parts"]]
      if sum(map(storage.size, paths)) != group.tokens * itemsize:
        return False
      if not all(storage.exists(boundaries.boundary_path(path)) for path in paths):
        return False
  except MissingFileError:
    return False
  return True


def _remove_others(directory: str, kept: Set[str]) -> None:
  """Removes the files left behind by workers that were killed."""
  for folder, _, names in os.walk(directory):
    for name in names:
      if (path := os.path.join(folder, name)) not in kept:
        os.unlink(path)
