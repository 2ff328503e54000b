"""Compares the streams of two runs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from maxtext_olmo.inspection import run as run_lib
from maxtext_olmo.inspection import summary
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.order import skips as skips_lib
from maxtext_olmo.order import timeline as timeline_lib

_BLOCK = 1 << 20
_NAMES = {"exclude": "exclusions (olmo_exclude)"}


@dataclasses.dataclass(frozen=True)
class Comparison:
  """A comparison of the streams of two runs.

  Attributes:
    same_until: The first step at which the runs differ; None if they never differ.
    compared: The number of steps that were compared.
    differences: Descriptions of the differences at the step `same_until`.
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
      return [f"The same stream: all {self.compared:,} steps so far, and all later ones."]
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
  planned = [_last_change(history.present) for history in (history_a, history_b)]
  end = max(step_a, step_b, known, *planned) + 1
  starts = {entry.step for history in (history_a, history_b) for entry in history.entries}
  bounds = sorted({known, end, *(step for step in starts if known < step < end)})
  for first, last in zip(bounds, bounds[1:]):
    one, other = history_a.at(first), history_b.at(first)
    step = _first_difference(one, other, first, last)
    if step is not None:
      lines = _between(one, other, step)
      if one.identity.get("order") != other.identity.get("order"):
        lines += _different(
            {"olmo_mixture": (run.config or {}).get("olmo_mixture")} for run in (a, b)
        )
      return Comparison(step, end - known, tuple(lines))
  return Comparison(None, end - known, ())


def _last_change(entry: timeline_lib.Entry) -> int:
  """Returns the last step at which an entry changes anything: batch size, stage or skip."""
  schedule = entry.schedule
  positions = [stage.position for stage in entry.stages] + [skip.end for skip in entry.skips]
  sizes = [first for first, _ in schedule.stages]
  if schedule.by_position:
    positions += sizes
  steps = [schedule.step_at(max(position, schedule.anchor_position)) for position in positions]
  return max([entry.step, *steps, *(() if schedule.by_position else sizes)])


def _first_difference(
    one: timeline_lib.Entry, other: timeline_lib.Entry, first: int, last: int
) -> int | None:
  """Returns the first step in a range whose rows or masks differ between two entries, or None."""
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
    samples = [_samples(entry.schedule, step, count) for entry in (one, other)]
    differ = np.logical_or.reduce([a != b for a, b in zip(*samples)])
    for i in _masked_steps(samples[0], masked) if masked[0] != masked[1] else ():
      differ[i] |= _masks_differ(one.schedule, step + i, masked)
    if differ.any():
      return step + int(np.argmax(differ))
  return None


def _first_stage_difference(one: timeline_lib.Entry, other: timeline_lib.Entry) -> int | None:
  """Returns the first step for which two entries have different stages; None if there is none."""
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
  """Returns the first position, the last position and the size of each of `count` steps."""
  starts, sizes = schedule.block(step, count)
  return schedule.skips.positions(starts), schedule.skips.positions(starts + sizes - 1), sizes


def _masked_steps(
    samples: tuple[np.ndarray, np.ndarray, np.ndarray], masked: Sequence[skips_lib.Skips]
) -> list[int]:
  """Returns the steps that may have masked rows, as indices of the arrays of `_samples`."""
  firsts, lasts, _ = samples
  found = np.zeros(len(firsts), np.bool_)
  for first, end in (*masked[0].ranges, *masked[1].ranges):
    found |= (firsts < end) & (lasts >= first)
  return np.flatnonzero(found).tolist()


def _masks_differ(
    schedule: schedule_lib.BatchSchedule, step: int, masked: Sequence[skips_lib.Skips]
) -> bool:
  positions = schedule.positions(step)
  return bool((masked[0].contains(positions) != masked[1].contains(positions)).any())


def _between(one: timeline_lib.Entry, other: timeline_lib.Entry, step: int) -> list[str]:
  """Returns descriptions of the differences between two runs at a step."""
  entries = one, other
  lines = _different(
      {"sequence_length": entry.sequence_length, **entry.identity, **entry.content}
      for entry in entries
  )
  for describe, name in ((summary.describe_stages, "stages"), (summary.describe_skips, "skips")):
    told = [describe(getattr(entry, name)) for entry in entries]
    lines += [f"only in the first: {text}" for text in told[0] if text not in told[1]]
    lines += [f"only in the second: {text}" for text in told[1] if text not in told[0]]
  sizes = [{"rows of the batch": entry.schedule.size(step)} for entry in entries]
  batches = [{"schedule": summary.describe_batches(entry.schedule)} for entry in entries]
  lines += _different(sizes) or _different(batches)
  positions = [entry.schedule.positions(step)[[0, -1]].tolist() for entry in entries]
  lines += _different({"position": first} for first, _ in positions)
  return lines or _different({"last position": last} for _, last in positions)


def _different(values: Iterable[dict[str, Any]]) -> list[str]:
  """Returns a line for each name whose value differs between two runs."""
  one, other = values
  lines = []
  for name in dict.fromkeys([*one, *other]):
    a, b = ("none" if value.get(name) is None else value[name] for value in (one, other))
    if a != b:
      lines.append(f"{_NAMES.get(name, name)}: {a} in the first, {b} in the second")
  return lines
