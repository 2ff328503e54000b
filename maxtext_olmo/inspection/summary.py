"""Summarizes the data state of a run as text."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from maxtext_olmo import english
from maxtext_olmo import errors
from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.corpus import index_builder
from maxtext_olmo.inspection import run as run_lib
from maxtext_olmo.loader import corpus_change
from maxtext_olmo.loader import iterator as iterator_lib
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.order import skips as skips_lib
from maxtext_olmo.order import staged_stream
from maxtext_olmo.order import stages as stages_lib
from maxtext_olmo.order import timeline as timeline_lib
from maxtext_olmo.rows import content as content_lib

_SHOWN_ROWS = 8


@dataclasses.dataclass(frozen=True)
class Change:
  """The settings in force from a step on.

  Attributes:
    step: The first step.
    position: The position of that step.
    what: For the first entry of the history, a description of each setting; for a later entry, of
      each setting that changed.
  """

  step: int
  position: int
  what: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Summary:
  """The data state of a run.

  Attributes:
    path: The path that named the run.
    checkpoint: The checkpoint from which the state was read; None if there is none.
    step: The number of steps done, which is also the index of the next step.
    position: The position of the next sample; skipped samples count too.
    tokens: Tokens consumed, excluding skipped samples.
    skipped: The number of samples before `position` that olmo_skip left out.
    stage: The stage of the next sample, counted from 0; None if unknown or without stages.
    epoch: The epoch of the next sample, counted from the beginning of its stage; None if unknown.
    place: The place of the next sample in that epoch.
    epoch_length: Samples in that epoch; None if not counted yet.
    history: The settings at the first known step, and all later changes.
    identity: The identity of the stream; it determines the row at each position.
    next_rows: The numbers of the first few rows of the next step.
    resume: What would happen if the run resumed with the present config, as text.
    corpus: Whether the corpus is still the one that was trained on, as text.
  """

  path: str
  checkpoint: int | None
  step: int
  position: int
  tokens: int
  epoch: int | None
  place: int | None
  epoch_length: int | None
  history: tuple[Change, ...]
  identity: dict[str, Any]
  next_rows: tuple[int, ...]
  resume: str
  corpus: str
  stage: int | None = None
  skipped: int = 0

  def to_json(self) -> dict[str, Any]:
    """Returns the summary as a JSON-able dict."""
    return dataclasses.asdict(self)

  def lines(self) -> list[str]:
    """Returns the summary as lines of text."""
    where = "no checkpoint" if self.checkpoint is None else f"checkpoint {self.checkpoint}"
    taken = english.count(self.position - self.skipped, "sample")
    done = f"{english.count(self.step, 'step')}, {taken}, {self.tokens:,} tokens"
    if self.skipped:
      done += f" ({english.count(self.skipped, 'sample')} skipped; position {self.position:,})"
    lines = [f"{self.path}: {where}", f"  done      {done}"]
    if self.epoch is not None:
      of = "" if self.epoch_length is None else f" of {self.epoch_length:,}"
      stage = "" if self.stage is None else f"stage {self.stage}, "
      where = f"{stage}epoch {self.epoch}, place {self.place:,}{of}"
      lines.append(f"  next      step {self.step:,}: {where}")
    if self.next_rows:
      lines.append(f"  rows      {', '.join(map(str, self.next_rows))}, …")
    lines += [f"  identity  {name}: {value}" for name, value in self.identity.items()]
    for change in self.history:
      lines.append(f"  from step {change.step:,} (position {change.position:,}):")
      lines += [f"    {what}" for what in change.what]
    return [*lines, f"  corpus    {self.corpus}", f"  resume    {self.resume}"]


def summarize(run: run_lib.Run) -> Summary:
  """Summarizes a run, and opens its corpus if its config is known."""
  parsed = run.parsed()
  try:
    with run_lib.open_iterator(run) as iterator:
      return _summary(run, parsed, iterator)
  except (errors.ResumeError, errors.CorpusError, errors.ConfigError) as error:
    if parsed is None:
      raise
    step, position, history = parsed
    return Summary(
        path=run.path,
        checkpoint=run.label,
        step=step,
        position=position,
        tokens=_tokens(history, position),
        skipped=_skipped(history, position),
        epoch=None,
        place=None,
        epoch_length=None,
        history=_changes(history, {}),
        identity=history.present.identity,
        next_rows=(),
        resume=f"would be refused: {error}",
        corpus=_corpus(run, history, _index(run)),
    )


def _summary(
    run: run_lib.Run,
    parsed: tuple[int, int, timeline_lib.Timeline] | None,
    iterator: iterator_lib.BatchIterator,
) -> Summary:
  step, position, history = parsed or (iterator.step, iterator.position, iterator.history)
  stream = iterator.stream
  stage = epoch = place = length = None
  rows: tuple[int, ...] = ()
  if stream.has(iterator.position):
    stage, epoch, place, length = staged_stream.place_of(stream, iterator.position)
    numbers = iterator.row_numbers(iterator.step)
    rows = tuple(numbers[numbers >= 0][:_SHOWN_ROWS].tolist())
  return Summary(
      path=run.path,
      checkpoint=run.label,
      step=step,
      position=position,
      tokens=_tokens(history, position),
      skipped=_skipped(history, position),
      epoch=epoch,
      place=place,
      epoch_length=length,
      history=_changes(history, run_lib.exclusion_names(run, iterator)),
      identity=history.present.identity,
      next_rows=rows,
      resume=_resume(run, step, history, iterator),
      corpus=_corpus(run, history, _first_index(iterator), iterator.stream.identity()),
      stage=stage,
  )


def _resume(
    run: run_lib.Run,
    step: int,
    history: timeline_lib.Timeline,
    iterator: iterator_lib.BatchIterator,
) -> str:
  if run.label is None:
    return f"nothing to resume: the run begins with step {iterator.step:,}"
  size = iterator.history.present.schedule.size(iterator.step)
  where = f"step {iterator.step:,} at position {iterator.position:,}"
  text = f"continues with {where}, batches of {size:,}"
  if run.state is None:
    return f"{text}; the checkpoint has no data state, so only its step determines the position"
  if iterator.history.present.step >= step and not iterator.history.present.same_as(
      history.present
  ):
    names = run_lib.exclusion_names(run, iterator)
    changes = _differences(history.present, iterator.history.present, names)
    text += "; changes: " + "; ".join(changes)
  return text


def _first_index(iterator: iterator_lib.BatchIterator) -> index_lib.OlmoNpyIndex | None:
  """Returns the index of a run's first stage, without the files of other stages."""
  named = iterator.provenance
  return None if named is None else named.documented or named.index


def _index(run: run_lib.Run) -> index_lib.OlmoNpyIndex | None:
  """Returns the index of a run; None if it cannot be read."""
  try:
    return index_builder.load_index((run.config or {})["olmo_index_path"])
  except (KeyError, errors.CorpusError):
    return None


def _corpus(
    run: run_lib.Run,
    history: timeline_lib.Timeline,
    index: index_lib.OlmoNpyIndex | None,
    identity: Mapping[str, Any] | None = None,
) -> str:
  """Returns a text that says whether the corpus is the one that a run was trained on.

  Args:
    run: The run.
    history: The history of the run.
    index: The corpus as it is now.
    identity: The identity of the stream over this corpus; None if it cannot be opened.
  """
  if index is None:
    return "not compared: there is no index"
  was = str(history.present.identity.get("fingerprint", ""))
  is_now = str((identity or {}).get("fingerprint", index.fingerprint))
  if identity is None and was.startswith("packed-"):
    return "not compared: the packed rows cannot be opened"
  policy = corpus_change.CorpusPolicy(index, "no", run.checkpoint_dir)
  changes = policy.changes(was) if run.checkpoint_dir else None
  if changes:
    return "has changed: " + "; ".join(changes)
  if was != is_now:
    return f"has changed: its fingerprint was {was} and is now {is_now}"
  return (
      f"is the one trained on: {english.count(len(index.files), 'file')} with the sizes in the"
      " index"
  )


def _tokens(history: timeline_lib.Timeline, position: int) -> int:
  """Returns the number of tokens consumed before a position of the last entry."""
  # When the sequence length changes, the position is converted, so it always counts samples of the
  # length in the last entry.
  return (position - _skipped(history, position)) * history.present.sequence_length


def _skipped(history: timeline_lib.Timeline, position: int) -> int:
  """Returns the number of skipped samples before a position of the last entry."""
  return position - history.present.schedule.skips.number(position)


def _changes(history: timeline_lib.Timeline, names: Mapping[str, str]) -> tuple[Change, ...]:
  found, before = [], None
  for entry in history.entries:
    what = _everything(entry, names)
    if before is not None:
      what = _differences(before, entry, names)
    found.append(Change(entry.step, entry.position, tuple(what)))
    before = entry
  return tuple(found)


def _everything(entry: timeline_lib.Entry, names: Mapping[str, str]) -> list[str]:
  return [
      f"{describe_batches(entry.schedule)} × {entry.sequence_length:,} tokens",
      *(
          f"{name}: {text}"
          for name, text in content_lib.describe_record(entry.content, names).items()
      ),
      *describe_skips(entry.skips),
      *describe_stages(entry.stages),
  ]


def describe_stages(stages: Sequence[stages_lib.Stage]) -> list[str]:
  """Returns a description of each stage after the first."""
  return [
      f"from {stage.request} (position {stage.position:,}) on:"
      f" {stage.settings.describe(before.settings)}"
      for before, stage in itertools.pairwise(stages)
  ]


def describe_skips(skips: Sequence[skips_lib.Skip]) -> list[str]:
  """Returns a description of each skip."""
  verbs = {"drop": "skips", "mask": "takes no loss on"}
  return [
      f"{verbs[skip.mode]} {skip.request} (positions {skip.first:,} to {skip.end - 1:,})"
      for skip in skips
  ]


def _differences(
    before: timeline_lib.Entry, after: timeline_lib.Entry, names: Mapping[str, str]
) -> list[str]:
  """Returns descriptions of the differences between two entries."""
  found = []
  batches = describe_batches(before.schedule), describe_batches(after.schedule)
  if batches[0] != batches[1]:
    found.append(f"{batches[1]} (before: {batches[0]})")
  values = [
      {"sequence_length": e.sequence_length, **e.identity, "extents": e.extents}
      for e in (before, after)
  ]
  for name in dict.fromkeys([*values[0], *values[1]]):
    was, now = (value.get(name) for value in values)
    if was != now:
      found.append(f"{name} {now} (before: {was})")
  found += content_lib.describe_changes(before.content, after.content, names)
  found += describe_skips([skip for skip in after.skips if skip not in before.skips])
  found += [
      f"no longer {text}"
      for text in describe_skips(before.skips)
      if text not in describe_skips(after.skips)
  ]
  was_planned, planned = describe_stages(before.stages), describe_stages(after.stages)
  found += [text for text in planned if text not in was_planned]
  found += [f"no longer {text}" for text in was_planned if text not in planned]
  if not found and before.stages != after.stages:
    found.append("the history now records the mixture")
  if not found:
    found.append(f"batches are counted from step {after.step:,}, position {after.position:,}")
  return found


def describe_batches(schedule: schedule_lib.BatchSchedule) -> str:
  """Returns the batch sizes of a schedule."""
  unit = "position" if schedule.by_position else "step"
  (_, size), *later = schedule.stages
  return f"batches of {size:,}" + "".join(
      f", of {rows:,} from {unit} {first:,}" for first, rows in later
  )
