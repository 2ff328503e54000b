"""`maxtext-olmo bench throughput`: loaders side by side, in turn, over the same tokens in the page cache.

Each loader has a process of its own. A round takes some batches from each of them, one after the other, and the next round
goes through them backwards, so that whatever else the machine does falls on all alike:

    round 1    limit   ours   peer A   peer B
    round 2    peer B   peer A   ours   limit
    …          medians and ranges over the rounds; contradictions are refused
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from maxtext_olmo import errors
from maxtext_olmo.cli import bench_children
from maxtext_olmo.cli import bench_corpus
from maxtext_olmo.cli import bench_figures
from maxtext_olmo.cli import bench_plan

_FEWEST_BATCHES = 4
_TRIAL_SECONDS = 0.4
_CHANCES = 3

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Effort:
  """How much is measured.

  Attributes:
    megabytes: Of the corpus.
    rounds: Of the main comparison.
    size_rounds: Of each other size; 0 leaves them out.
    seconds: What one measurement should take.
    try_settings: Whether each peer's settings are tried, or the one expected to be best is taken.
    all_sizes: Whether everything is measured at every size.
    repeats: Of the other measurements.
    patience: Seconds that a loader has to start with 50 or 724 million instances.
  """

  megabytes: int = 1000
  rounds: int = 5
  size_rounds: int = 3
  seconds: float = 0.3
  try_settings: bool = True
  all_sizes: bool = False
  repeats: int = 3
  patience: float = 30.0


QUICK = Effort(megabytes=400, rounds=3, size_rounds=0, try_settings=False, repeats=1, patience=10)
DEFAULT = Effort()
FULL = Effort(megabytes=4000, size_rounds=5, seconds=0.5, all_sizes=True, repeats=5, patience=240)


@dataclasses.dataclass
class _Entrant:
  """A candidate's variant that takes part."""

  candidate: bench_plan.Candidate
  child: bench_children.Child | None
  figure: bench_figures.Figure
  batches: int = 0

  @property
  def key(self) -> str:
    return f"{self.figure.name} {self.figure.filter} {self.figure.documents}"


class Comparison:
  """Runs loaders against each other.

  Args:
    corpus: What they load.
    effort: How much is measured.
    say: Gets a line about what is going on.
  """

  def __init__(self, corpus: bench_corpus.BenchCorpus, effort: Effort, say: Say):
    self._corpus = corpus
    self._effort = effort
    self._say = say
    self._children: dict[str, bench_children.Child | bench_children.Unavailable] = {}
    self._best: dict[str, tuple[str, dict[str, Any]]] = {}
    self._beginnings = {length: corpus.beginnings(length) for length in bench_corpus.LENGTHS}
    self.allocated = 0

  def __enter__(self) -> Comparison:
    return self

  def __exit__(self, *exception: Any) -> None:
    for child in self._children.values():
      if isinstance(child, bench_children.Child):
        child.close()

  def measure(
      self, candidates: Sequence[bench_plan.Candidate], batch: int, length: int, rounds: int
  ) -> list[bench_figures.Figure]:
    """The figures of one size, the missing ones with the reason why."""
    entrants: list[_Entrant] = []
    for candidate in candidates:
      entrants += self._enter(candidate, batch, length)
    running = [entrant for entrant in entrants if entrant.child is not None]
    self._run_rounds(running, rounds)
    try:
      bench_figures.check([entrant.figure for entrant in running])
    except bench_figures.ImpossibleFigureError as impossible:
      # One disturbance may spoil a round; one that comes back is a mistake in the measurement.
      self._say(f"{impossible} Measuring this size once more.")
      for entrant in running:
        entrant.figure = dataclasses.replace(entrant.figure, runs=())
      self._run_rounds(running, rounds)
    for entrant in running:
      if entrant.candidate is bench_plan.INLINE and entrant.figure.runs and entrant.child:
        answer = entrant.child.ask(do="allocations", name=entrant.key, batches=5)
        self.allocated = max(self.allocated, answer["largest"])
      if entrant.child is not None:
        with contextlib.suppress(bench_children.Unavailable):
          entrant.child.ask(do="close", name=entrant.key)
    figures = [entrant.figure for entrant in entrants]
    bench_figures.check(figures)
    return figures

  def _run_rounds(self, running: Sequence[_Entrant], rounds: int) -> None:
    """Takes turns, and makes sure that it was the page cache that was read from."""
    for number in range(rounds):
      self._say(f"round {number + 1} of {rounds}")
      turns = running if number % 2 == 0 else running[::-1]
      for chance in reversed(range(_CHANCES)):
        self._warm()
        before = [entrant.figure for entrant in turns]
        for entrant in turns:
          self._run(entrant)
        try:
          bench_corpus.check_resident(self._corpus.files)
          break
        except errors.CorpusError as gone:
          # A kernel may take pages back at any time; a round that lost some is not counted.
          if not chance:
            raise
          self._say(f"{gone} This round is measured once more.")
          for entrant, figure in zip(turns, before):
            entrant.figure = figure

  def _enter(self, candidate: bench_plan.Candidate, batch: int, length: int) -> Iterable[_Entrant]:
    for filter_ in candidate.filters:
      for documents in candidate.documents:
        figure = bench_figures.Figure(
            candidate.name,
            candidate.group,
            batch=batch,
            length=length,
            filter=filter_,
            documents=documents,
            device=candidate.device,
            threads=candidate.threads,
        )
        entrant = _Entrant(candidate, None, figure)
        try:
          self._open(entrant)
        except bench_children.Unavailable as reason:
          self._say(f"{candidate.name}: {reason}")
          entrant.figure = dataclasses.replace(figure, missing=str(reason))
          entrant.child = None
        yield entrant

  def _child(self, candidate: bench_plan.Candidate) -> bench_children.Child:
    found = self._children.get(candidate.name)
    if found is None:
      try:
        found = bench_children.Child(candidate.kind)
      except bench_children.Unavailable as reason:
        found = reason
      self._children[candidate.name] = found
    if isinstance(found, bench_children.Unavailable):
      raise found
    return found

  def _open(self, entrant: _Entrant) -> None:
    candidate, figure = entrant.candidate, entrant.figure
    child = self._child(candidate)
    if candidate.name not in self._best:
      self._best[candidate.name] = self._best_setting(child, entrant)
    title, setting = self._best[candidate.name]
    self._say(f"opening {candidate.name}{f', {title}' if title else ''}")
    opened = self._ask_open(child, entrant, setting)
    entrant.batches = self._calibrate(child, entrant.key, figure.tokens, self._effort.seconds)
    entrant.child = child
    settings = ", ".join(part for part in (title, opened["note"]) if part)
    entrant.figure = dataclasses.replace(
        figure,
        setting=settings,
        delivers=_deliveries(opened["arrays"]),
        bytes_per_token=opened["bytes_per_token"],
    )

  def _ask_open(
      self, child: bench_children.Child, entrant: _Entrant, setting: dict[str, Any]
  ) -> dict[str, Any]:
    figure = entrant.figure
    wanted = entrant.candidate.spec(setting, filter=figure.filter, documents=figure.documents)
    spec = {**self._corpus.spec(figure.length), **wanted, "batch": figure.batch}
    opened = child.ask(do="open", name=entrant.key, spec=spec)
    known = all(tuple(row) in self._beginnings[figure.length] for row in opened["samples"])
    if opened["shape"] != [figure.batch, figure.length] or not known:
      raise bench_figures.ImpossibleFigureError(
          f"{figure.name} delivered {opened['shape']} with rows that begin {opened['samples']}; windows"
          f" of the corpus in batches of {figure.batch} × {figure.length} were expected."
      )
    return opened

  def _best_setting(
      self, child: bench_children.Child, entrant: _Entrant
  ) -> tuple[str, dict[str, Any]]:
    """Tries each setting for a moment."""
    settings = entrant.candidate.settings
    if len(settings) == 1 or not self._effort.try_settings:
      return settings[0]
    rates: dict[int, float] = {}
    problem = None
    for place, (title, setting) in enumerate(settings):
      self._say(f"trying {entrant.candidate.name}, {title}")
      try:
        self._ask_open(child, entrant, setting)
        batches = self._calibrate(child, entrant.key, entrant.figure.tokens, _TRIAL_SECONDS)
        run = child.ask(do="run", name=entrant.key, batches=batches)
        child.ask(do="close", name=entrant.key)
      except bench_children.Unavailable as reason:
        problem = reason
        continue
      rates[place] = batches / run["seconds"]
    if not rates:
      raise problem or bench_children.Unavailable("no setting works")
    return settings[max(rates, key=lambda place: rates[place])]

  def _calibrate(self, child: bench_children.Child, key: str, tokens: int, seconds: float) -> int:
    """How many batches fill some seconds, within half an epoch."""
    most = max(_FEWEST_BATCHES, self._corpus.bytes // 4 // tokens // 2)
    batches = _FEWEST_BATCHES
    for _ in range(2):  # The first few batches compile, open files and fault pages in.
      run = child.ask(do="run", name=key, batches=batches)
      wanted = int(seconds * run["batches"] / max(run["seconds"], 1e-6))
      batches = min(most, max(batches, wanted))
    return batches

  def _run(self, entrant: _Entrant) -> None:
    if entrant.child is None:
      return
    try:
      run = entrant.child.ask(do="run", name=entrant.key, batches=entrant.batches)
    except bench_children.Unavailable as reason:
      entrant.figure = dataclasses.replace(entrant.figure, runs=(), missing=str(reason))
      entrant.child = None
      return
    entrant.figure = dataclasses.replace(entrant.figure, runs=(*entrant.figure.runs, run))

  def _warm(self) -> None:
    """Reads the corpus, and what peers have made of it, into the page cache."""
    converted = glob.glob(os.path.join(self._corpus.directory, "converted", "**"), recursive=True)
    bench_corpus.warm([*self._corpus.files, *filter(os.path.isfile, converted)])


def compare(
    corpus: bench_corpus.BenchCorpus, effort: Effort, say: Say, *, sizes: bool
) -> dict[str, Any]:
  """The main comparison and, with `sizes`, the other sizes."""
  with Comparison(corpus, effort, say) as comparison:
    batch, length = bench_plan.MAIN
    main = comparison.measure(bench_plan.CANDIDATES, batch, length, effort.rounds)
    found: dict[str, Any] = {"compare": main, "allocated": comparison.allocated, "sizes": []}
    if sizes and effort.size_rounds:
      chosen = [c for c in bench_plan.CANDIDATES if c.everywhere or effort.all_sizes]
      for batch, length in bench_plan.SIZES:
        if (batch, length) != bench_plan.MAIN:
          found["sizes"] += comparison.measure(chosen, batch, length, effort.size_rounds)
  return found


def _deliveries(arrays: Sequence[Sequence[Any]]) -> str:
  """What a batch holds, in few words: names by dtype and number of dimensions."""
  kinds: dict[str, list[str]] = {}
  for name, dtype, shape in arrays:
    kind = f"{dtype.removeprefix('torch.')} {'×'.join('BL'[: len(shape)])}"
    kinds.setdefault(kind, []).append(name)
  return "; ".join(f"{', '.join(names)}: {kind}" for kind, names in kinds.items())


def say_on_stderr() -> Say:
  """Lines with the time since the beginning."""
  began = time.monotonic()

  def say(line: str) -> None:
    sys.stderr.write(f"[{time.monotonic() - began:5.0f} s] {line}\n")
    sys.stderr.flush()

  return say


def prepare(directory: pathlib.Path, effort: Effort, say: Say) -> bench_corpus.BenchCorpus:
  """The corpus, in the page cache."""
  say(f"a corpus of {effort.megabytes} MB in {directory}")
  if effort.megabytes < 8:
    raise errors.ConfigError(f"--megabytes={effort.megabytes} is too small to measure anything.")
  corpus = bench_corpus.make(
      directory, megabytes=effort.megabytes, files=100 if effort.megabytes >= 100 else 4
  )
  bench_corpus.warm(corpus.files)
  return corpus
