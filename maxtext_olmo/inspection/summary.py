"""Summarizes the data state of a run as text, and compares two runs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from maxtext_olmo import errors
from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.corpus import index_builder
from maxtext_olmo.inspection import run as run_lib
from maxtext_olmo.loader import corpus_change
from maxtext_olmo.loader import iterator as iterator_lib
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.order import skips as skips_lib
from maxtext_olmo.order import stages as stages_lib
from maxtext_olmo.order import timeline as timeline_lib
from maxtext_olmo.rows import row_source

_BLOCK = 1 << 20
_SHOWN_ROWS = 8


@dataclasses.dataclass(frozen=True)
class Change:
  """The settings in force from a step on.

  Attributes:
    step: The first step.
    position: The position of that step.
    what: Descriptions: all settings for the first entry, then differences from the previous entry.
  """

  step: int
  position: int
  what: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Summary:
  """The data state of a run.

  Attributes:
    path: The path that named the run.
    checkpoint: The checkpoint from which the state was read; None without one.
    step: Steps done, which is the number of the next step.
    position: The position of the next sample, which includes skipped samples.
    tokens: Tokens consumed, without those of skipped samples.
    skipped: Samples before the position that olmo_skip left out.
    stage: The stage of the next sample, from 0; None if there are no stages, or if unknown.
    epoch: The epoch of the next sample, counted from the beginning of its stage; None if unknown.
    place: The place of the next sample in that epoch.
    epoch_length: Samples in that epoch; None if not counted yet.
    history: The settings in force from each step at which they changed.
    identity: The identity of the stream, which decides the row at each position.
    next_rows: The first rows of the next step.
    resume: What would happen on a resume with the present config.
    corpus: Whether the corpus is still the one that was trained on.
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
    done = f"{self.step:,} steps, {self.position - self.skipped:,} samples, {self.tokens:,} tokens"
    if self.skipped:
      done += f" ({self.skipped:,} samples skipped; position {self.position:,})"
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
        history=_changes(history),
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
    epoch, place = (int(found[0]) for found in stream.locate(np.array([iterator.position])))
    if stream.epochs is not None:
      place, length = iterator.position - stream.epochs.start(epoch), stream.epochs.length(epoch)
    if hasattr(stream, "stages"):
      ((stage, epoch),) = row_source.stages_of(stream, np.array([epoch]))
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
      history=_changes(history),
      identity=history.present.identity,
      next_rows=rows,
      resume=_resume(run, step, history, iterator),
      corpus=_corpus(run, history, _first_index(iterator)),
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
    return f"{text}; the checkpoint has no data state, so the step alone decides"
  if iterator.history.present.step >= step and not iterator.history.present.same_as(
      history.present
  ):
    text += "; changes: " + "; ".join(_differences(history.present, iterator.history.present))
  return text


def _first_index(iterator: iterator_lib.BatchIterator) -> index_lib.OlmoNpyIndex | None:
  """Returns the index that a run began with, without the files of other stages."""
  named = iterator.provenance
  return None if named is None else named.documented or named.index


def _index(run: run_lib.Run) -> index_lib.OlmoNpyIndex | None:
  """Returns the index of a run, as far as it can be read."""
  try:
    return index_builder.load_index((run.config or {})["olmo_index_path"])
  except (KeyError, errors.CorpusError):
    return None


def _corpus(
    run: run_lib.Run, history: timeline_lib.Timeline, index: index_lib.OlmoNpyIndex | None
) -> str:
  if index is None:
    return "not compared: there is no index"
  was = str(history.present.identity.get("fingerprint", ""))
  policy = corpus_change.CorpusPolicy(index, "no", run.checkpoint_dir)
  changes = policy.changes(was) if run.checkpoint_dir else None
  if changes:
    return "has changed: " + "; ".join(changes)
  if was != index.fingerprint:
    return f"has changed: its fingerprint was {was}, it is {index.fingerprint}"
  return f"is the one trained on: {len(index.files):,} files of the sizes in the index"


def _tokens(history: timeline_lib.Timeline, position: int) -> int:
  """Returns the tokens consumed up to a position of the last entry."""
  # A change of the sequence length converts the position, so it is in the unit of the last entry.
  return (position - _skipped(history, position)) * history.present.sequence_length


def _skipped(history: timeline_lib.Timeline, position: int) -> int:
  """Returns the number of skipped samples before a position of the last entry."""
  return position - history.present.schedule.skips.number(position)


def _changes(history: timeline_lib.Timeline) -> tuple[Change, ...]:
  found, before = [], None
  for entry in history.entries:
    what = _everything(entry) if before is None else _differences(before, entry)
    found.append(Change(entry.step, entry.position, tuple(what)))
    before = entry
  return tuple(found)


def _everything(entry: timeline_lib.Entry) -> list[str]:
  return [
      f"{_batches(entry.schedule)} × {entry.sequence_length:,} tokens",
      *(f"{name} {value}" for name, value in entry.content.items()),
      *_skips(entry.skips),
      *_stages(entry.stages),
  ]


def _stages(stages: Sequence[stages_lib.Stage]) -> list[str]:
  return [
      f"from {stage.request} (position {stage.position:,}) on:"
      f" {stage.settings.describe(before.settings)}"
      for before, stage in itertools.pairwise(stages)
  ]


def _skips(skips: Sequence[skips_lib.Skip]) -> list[str]:
  verbs = {"drop": "skips", "mask": "takes no loss on"}
  return [
      f"{verbs[skip.mode]} {skip.request} (positions {skip.first:,} to {skip.end - 1:,})"
      for skip in skips
  ]


def _differences(before: timeline_lib.Entry, after: timeline_lib.Entry) -> list[str]:
  """Returns descriptions of the differences between two entries."""
  found = []
  batches = _batches(before.schedule), _batches(after.schedule)
  if batches[0] != batches[1]:
    found.append(f"{batches[1]} (before: {batches[0]})")
  values = [
      {"sequence_length": e.sequence_length, **e.identity, **e.content, "extents": e.extents}
      for e in (before, after)
  ]
  for name in dict.fromkeys([*values[0], *values[1]]):
    was, now = (value.get(name) for value in values)
    if was != now:
      found.append(f"{name} {now} (before: {was})")
  found += _skips([skip for skip in after.skips if skip not in before.skips])
  found += [f"no longer {text}" for text in _skips(before.skips) if text not in _skips(after.skips)]
  was_planned, planned = _stages(before.stages), _stages(after.stages)
  found += [text for text in planned if text not in was_planned]
  found += [f"no longer {text}" for text in was_planned if text not in planned]
  if not found and before.stages != after.stages:
    found.append("the history says what the mixture is")
  if not found:
    found.append(f"batches are counted from step {after.step:,}, position {after.position:,}")
  return found


def _batches(schedule: schedule_lib.BatchSchedule) -> str:
  unit = "position" if schedule.by_position else "step"
  (_, size), *later = schedule.stages
  return f"batches of {size:,}" + "".join(
      f", of {rows:,} from {unit} {first:,}" for first, rows in later
  )


@dataclasses.dataclass(frozen=True)
class Comparison:
  """A comparison of the streams of two runs.

  Attributes:
    same_until: The first step at which they differ; None if all past and future steps are equal.
    compared: The number of steps that were compared.
    differences: Descriptions of the differences from that step on.
  """

  same_until: int | None
  compared: int
  differences: tuple[str, ...]

  def to_json(self) -> dict[str, Any]:
    """Returns the comparison as a JSON-able dict."""
    return dataclasses.asdict(self)

  def lines(self) -> list[str]:
    """Returns the comparison as lines of text."""
    if self.same_until is None:
      return [f"The same stream: {self.compared:,} steps compared, and what comes after them."]
    first = f"They differ from step {self.same_until:,} on; every step before it is the same."
    if self.same_until == 0:
      first = "They differ from the first step on."
    return [first, *(f"  {line}" for line in self.differences)]


def compare(a: run_lib.Run, b: run_lib.Run) -> Comparison:
  """Compares the streams of two runs step by step, without reading data."""
  states = []
  for run in (a, b):
    parsed = run.parsed()
    if parsed is None:
      with run_lib.open_iterator(run) as iterator:
        parsed = iterator.step, iterator.position, iterator.history
    states.append(parsed)
  (step_a, _, history_a), (step_b, _, history_b) = states
  known = max(history_a.entries[0].step, history_b.entries[0].step)
  end = max(step_a, step_b, known) + 1
  starts = {entry.step for history in (history_a, history_b) for entry in history.entries}
  bounds = sorted({known, end, *(step for step in starts if known < step < end)})
  for first, last in zip(bounds, bounds[1:]):
    one, other = history_a.at(first), history_b.at(first)
    step = _first_difference(one, other, first, last)
    if step is not None:
      return Comparison(step, end - known, tuple(_between(one, other, step)))
  one, other = history_a.at(end), history_b.at(end)
  if one.schedule.stages != other.schedule.stages:
    return Comparison(end, end - known, tuple(_between(one, other, end)))
  return Comparison(None, end - known, ())


def _first_difference(
    one: timeline_lib.Entry, other: timeline_lib.Entry, first: int, last: int
) -> int | None:
  """Returns the first of some steps at which two entries give different rows, or None."""
  stages = _first_stage_difference(one, other)
  if stages is not None and stages < last:
    last = max(first, stages)
    found = _first_difference(
        dataclasses.replace(one, stages=()), dataclasses.replace(other, stages=()), first, last
    )
    return last if found is None else found
  if (one.identity, one.sequence_length, one.content) != (
      other.identity,
      other.sequence_length,
      other.content,
  ):
    return first
  masked = [skips_lib.positions_of(entry.skips, "mask") for entry in (one, other)]
  if one.schedule == other.schedule and masked[0] == masked[1]:
    return None
  for step in range(first, last, _BLOCK):
    count = min(_BLOCK, last - step)
    blocks = zip(*(_samples(entry.schedule, step, count) for entry in (one, other)))
    differ = np.logical_or.reduce([a != b for a, b in blocks])
    if masked[0] != masked[1]:
      differ |= [_masks_differ(one.schedule, step + i, masked) for i in range(count)]
    if differ.any():
      return step + int(np.argmax(differ))
  return None


def _first_stage_difference(one: timeline_lib.Entry, other: timeline_lib.Entry) -> int | None:
  """Returns the first step that two entries take from different stages; None if there is none."""
  for a, b in itertools.zip_longest(one.stages[1:], other.stages[1:]):
    if a is None or b is None or (a.position, a.settings) != (b.position, b.settings):
      steps = [
          entry.schedule.step_at(max(stage.position, entry.schedule.anchor_position))
          for entry, stage in ((one, a), (other, b))
          if stage is not None
      ]
      return min(steps)
  return None


def _samples(
    schedule: schedule_lib.BatchSchedule, step: int, count: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns the first and last position, and the size, of some steps."""
  starts, sizes = schedule.block(step, count)
  return schedule.skips.positions(starts), schedule.skips.positions(starts + sizes - 1), sizes


def _masks_differ(
    schedule: schedule_lib.BatchSchedule, step: int, masked: Sequence[skips_lib.Skips]
) -> bool:
  positions = schedule.positions(step)
  return bool((masked[0].contains(positions) != masked[1].contains(positions)).any())


def _between(one: timeline_lib.Entry, other: timeline_lib.Entry, step: int) -> list[str]:
  """Returns descriptions of the differences between two runs at a step."""
  values = [
      {
          "sequence_length": entry.sequence_length,
          "rows of the batch": entry.schedule.size(step),
          "position": entry.schedule.start(step),
          **entry.identity,
          **entry.content,
      }
      for entry in (one, other)
  ]
  lines = []
  for name in dict.fromkeys([*values[0], *values[1]]):
    a, b = (value.get(name) for value in values)
    if a != b:
      lines.append(f"{name}: {a} in the first, {b} in the second")
  batches = _batches(one.schedule), _batches(other.schedule)
  return lines or [f"{batches[0]} in the first, {batches[1]} in the second"]
