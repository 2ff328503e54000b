"""The timeline of a run: its settings at each step, so that any past step can be located.

A run may change its batch size, corpus, mixture or filter. Each change takes effect at a step and a
position, and the timeline keeps one entry per change:

    step 0, position 0              batches of 512, corpus A, filter on
    step 2000, position 1024000     batches of 1024, corpus A, filter on
    step 5000, position 4096000     batches of 1024, corpus A and B, filter on

An entry has all settings that are in force from its step on. Going back to an earlier checkpoint
drops the entries after its step, because the checkpoint's state does not have them. A state of
format 1 has only the entry that was in force when it was saved.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from maxtext_olmo import errors
from maxtext_olmo import schema
from maxtext_olmo.order import epochs as epochs_lib
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.order import skips as skips_lib
from maxtext_olmo.order import stages as stages_lib

_COUNT = schema.Count()
# The JSON schema of an entry.
SCHEMA: dict[str, Any] = {
    "step": _COUNT,
    "position": _COUNT,
    "sequence_length": schema.Count(1),
    "schedule": {
        "stages": [(_COUNT, schema.Count(1))],
        "by_position": bool,
        "anchor": (_COUNT, _COUNT),
        "epochs": schema.Maybe([(_COUNT, schema.Count(1))]),
        "cut_epochs": schema.Maybe([_COUNT]),
    },
    "identity": dict,
    "content": dict,
    "extents": [(_COUNT, schema.Count(1), str)],
    "skips": schema.Maybe([(str, _COUNT, schema.Count(1), str)]),
    "stages": schema.Maybe([stages_lib.SCHEMA]),
}


@dataclasses.dataclass(frozen=True)
class Entry:
  """The settings of a run from a step on.

  Attributes:
    step: First step.
    position: Position of that step, in samples of this entry's sequence length.
    sequence_length: Number of tokens per sample.
    schedule: Batch schedule, which maps steps to positions.
    identity: Values that decide which row is at which position.
    content: Values that decide how the tokens of a row are processed.
    extents: `(first epoch, files, fingerprint)` of each extent of a corpus that has grown.
    skips: Skips of the run, before and after this step; the schedule leaves out those to drop.
    stages: Stages of the run, before and after this step. Empty for a run without stages; its
      identity then describes it completely.
  """

  step: int
  position: int
  sequence_length: int
  schedule: schedule_lib.BatchSchedule
  identity: dict[str, Any]
  content: dict[str, Any]
  extents: tuple[tuple[int, int, str], ...] = ()
  skips: tuple[skips_lib.Skip, ...] = ()
  stages: tuple[stages_lib.Stage, ...] = ()

  def same_as(self, other: Entry) -> bool:
    """Returns whether two entries are equal except for their step and position."""
    return dataclasses.replace(self, step=other.step, position=other.position) == other

  def to_json(self) -> dict[str, Any]:
    """Returns the entry as a JSON-able dict."""
    schedule = self.schedule
    return {
        "step": self.step,
        "position": self.position,
        "sequence_length": self.sequence_length,
        "schedule": {
            "stages": [list(stage) for stage in schedule.stages],
            "by_position": schedule.by_position,
            "anchor": [schedule.anchor_step, schedule.anchor_position],
            "epochs": schedule.epochs and [list(length) for length in schedule.epochs.lengths],
            **({"cut_epochs": list(cut)} if (cut := _cut(schedule.epochs)) else {}),
        },
        "identity": dict(self.identity),
        "content": dict(self.content),
        "extents": [list(extent) for extent in self.extents],
        **({"skips": [list(skip) for skip in self.skips]} if self.skips else {}),
        **({"stages": [stage.to_json() for stage in self.stages]} if self.stages else {}),
    }

  @classmethod
  def from_json(cls, values: dict[str, Any]) -> Entry:
    """Returns the entry from a dict that `to_json` made and that matches `SCHEMA`."""
    schedule = values["schedule"]
    epochs = schedule.get("epochs")
    skips = tuple(skips_lib.Skip(*skip) for skip in values.get("skips") or ())
    if any(skip.mode not in skips_lib.MODES for skip in skips):
      raise schema.damaged(f"its history has a skip with a mode other than {skips_lib.MODES}")
    stages = tuple(stages_lib.Stage.from_json(stage) for stage in values.get("stages") or ())
    firsts = [stage.position for stage in stages]
    if stages and (firsts[0] != 0 or any(a >= b for a, b in zip(firsts, firsts[1:]))):
      raise schema.damaged(f"its stages begin at the positions {firsts}, which must ascend from 0")
    if stages and stages[0].settings.fingerprint != values["identity"].get("fingerprint"):
      raise schema.damaged("the corpus of its first stage is not the corpus of the run")
    if stages and stages[0].settings.leave_out_seen:
      raise schema.damaged("its first stage leaves out what was seen before it")
    cut = tuple(schedule.get("cut_epochs") or ())
    try:
      return cls(
          step=values["step"],
          position=values["position"],
          sequence_length=values["sequence_length"],
          schedule=schedule_lib.BatchSchedule(
              _tuples(schedule["stages"]),
              anchor_step=schedule["anchor"][0],
              anchor_position=schedule["anchor"][1],
              by_position=schedule["by_position"],
              epochs=None if epochs is None else epochs_lib.Epochs(_tuples(epochs), cut),
              skips=skips_lib.positions_of(skips, "drop"),
          ),
          identity=dict(values["identity"]),
          content=dict(values["content"]),
          extents=_tuples(values["extents"]),
          skips=skips,
          stages=stages,
      )
    except (errors.ConfigError, errors.OrderError) as error:
      raise schema.damaged(f"its history has an impossible schedule ({error})") from error


@dataclasses.dataclass(frozen=True)
class Timeline:
  """The entries of a run, by step.

  Attributes:
    entries: One or more entries; the last is in force.
  """

  entries: tuple[Entry, ...]

  @property
  def present(self) -> Entry:
    """The entry in force."""
    return self.entries[-1]

  def at(self, step: int) -> Entry:
    """Returns the entry in force at a step; raises OrderError if the step precedes all entries."""
    if step < 0:
      raise errors.OrderError(f"Steps count from 0, got {step}.")
    for entry in reversed(self.entries):
      if entry.step <= step:
        return entry
    first = self.entries[0]
    raise errors.OrderError(
        f"Step {step} lies before step {first.step}, where the recorded history of this run begins:"
        " its state was saved by an older version, which recorded only the current settings."
    )

  def steps_at(self, position: int) -> list[int]:
    """Returns the steps, past or future, that take the sample at a position.

    There is no such step if no batch takes the sample, because it is in the dropped tail of an
    epoch, or if the position precedes the recorded history. There are several steps if a resume
    repeated samples, as resuming in OLMo-core does.
    """
    found = []
    for entry, later in itertools.zip_longest(self.entries, self.entries[1:]):
      schedule = entry.schedule
      if position < max(entry.position, schedule.anchor_position):
        continue
      step = schedule.step_at(position)
      taken = position in schedule.positions(step)
      if taken and entry.step <= step and (later is None or step < later.step):
        found.append(step)
    return found

  def until(self, step: int) -> Timeline | None:
    """Returns the timeline up to a step; None if the timeline begins after that step."""
    kept = tuple(entry for entry in self.entries if entry.step <= step)
    return Timeline(kept) if kept else None

  def changed(self, entry: Entry) -> Timeline:
    """Returns the timeline with a new entry, which replaces entries at or after its step."""
    kept = tuple(old for old in self.entries if old.step < entry.step)
    if kept and kept[-1].same_as(entry):
      return Timeline(kept)
    return Timeline((*kept, entry))

  def to_json(self) -> list[dict[str, Any]]:
    """Returns the entries as JSON-able dicts."""
    return [entry.to_json() for entry in self.entries]

  @classmethod
  def from_json(cls, values: list[dict[str, Any]]) -> Timeline:
    """Returns the timeline from the result of `to_json`; raises ResumeError if it is damaged."""
    schema.check(values, [SCHEMA], "history")
    for i, value in enumerate(values):
      schema.check(value["identity"], {"fingerprint": str}, f"history[{i}].identity")
    entries = tuple(Entry.from_json(value) for value in values)
    steps = [entry.step for entry in entries]
    if not entries or any(a >= b for a, b in zip(steps, steps[1:])):
      raise schema.damaged(
          f"the entries of its history begin at the steps {steps}, expected ascending steps"
      )
    return cls(entries)


def _cut(epochs: epochs_lib.Epochs | None) -> tuple[int, ...]:
  return () if epochs is None else epochs.cut


def _tuples(values: Any) -> tuple[Any, ...]:
  return tuple(tuple(value) for value in values)
