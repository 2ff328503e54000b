"""Finds the changes during a run: batch sizes, skips, stages, and changes made at restarts."""

from __future__ import annotations

import dataclasses
import itertools
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from maxtext_olmo import english
from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.order import timeline as timeline_lib
from maxtext_olmo.rows import content as content_lib


@dataclasses.dataclass(frozen=True, eq=False)
class Stretch:
  """A range of steps of a run with the same stream and schedule.

  Attributes:
    first: The first step.
    end: The step after the last.
    schedule: Maps steps to positions.
    stream: Maps positions to rows.
    index: The corpus.
  """

  first: int
  end: int
  schedule: schedule_lib.BatchSchedule
  stream: Any
  index: index_lib.OlmoNpyIndex


class Change(NamedTuple):
  """A change during a run: its first step and its description."""

  step: int
  text: str


def find_changes(
    stretches: Sequence[Stretch],
    timeline: timeline_lib.Timeline | None = None,
    names: Mapping[str, str] = types.MappingProxyType({}),
) -> tuple[Change, ...]:
  """Returns the changes during a run, in the order of steps.

  Args:
    stretches: The stretches of the run.
    timeline: The history, which records what changed at restarts.
    names: Maps the digest of an exclusion list to its file, for lists whose files are known.
  """
  found: list[Change] = []
  for stretch in stretches:
    found += schedule_changes(stretch.schedule, stretch.first, stretch.end)
    found += _stage_changes(stretch)
  for was, now in zip(timeline.entries, timeline.entries[1:]) if timeline else ():
    found += (Change(now.step, text) for text in _differences(was, now, names))
  return tuple(sorted(dict.fromkeys(found)))


def _stage_changes(stretch: Stretch) -> Iterable[Change]:
  """Yields a change for each stage that begins in a stretch."""
  schedule = stretch.schedule
  for before, stage in itertools.pairwise(getattr(stretch.stream, "stages", ())):
    if stage.position >= schedule.anchor_position:
      step = schedule.step_at(stage.position)
      if stretch.first <= step < stretch.end:
        yield Change(step, f"stage: {stage.settings.describe(before.settings)}")


def schedule_changes(
    schedule: schedule_lib.BatchSchedule, first: int, end: int
) -> Iterable[Change]:
  """Yields the batch size changes after the first step, and the skips."""
  size = schedule.size(first)
  for boundary, _ in schedule.stages:
    step = boundary
    if schedule.by_position:
      if boundary < schedule.anchor_position:
        continue
      step = schedule.step_at(boundary)
      # A batch size applies from the first step that starts at or after the boundary.
      step += schedule.start(step) < boundary
    if first < step < end and schedule.size(step) != size:
      yield Change(step, f"batch size {size:,} → {schedule.size(step):,}")
      size = schedule.size(step)
  for skipped, after in schedule.skips.ranges:
    if skipped >= schedule.anchor_position and first <= schedule.step_at(skipped) < end:
      yield Change(schedule.step_at(skipped), f"skips {english.count(after - skipped, 'sample')}")


def _differences(
    was: timeline_lib.Entry, now: timeline_lib.Entry, names: Mapping[str, str]
) -> Iterable[str]:
  """Yields descriptions of the differences between two entries of a history."""
  before, after = was.schedule.size(max(was.step, now.step - 1)), now.schedule.size(now.step)
  if before != after:
    yield f"batch size {before:,} → {after:,}"
  if was.sequence_length != now.sequence_length:
    yield f"sequence length {was.sequence_length:,} → {now.sequence_length:,}"
  for name in sorted({*was.identity, *now.identity}):
    if was.identity.get(name) != now.identity.get(name):
      name = "corpus" if name == "fingerprint" else name
      mixed = name == "order" and "mixture" in f"{was.identity.get(name)}{now.identity.get(name)}"
      yield f"a different {'mixture' if mixed else name}"
  if was.stages[1:] != now.stages[1:]:
    yield "olmo_stages changed"
  yield from content_lib.describe_changes(was.content, now.content, names)
