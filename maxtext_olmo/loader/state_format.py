"""The format of saved states: parses and checks a state from this or any earlier release.

Every release reads the formats of all earlier releases (docs/guides/resume.md has the policy). A
state of format 1 has no history; it records only the settings in force when it was saved.
"""

from __future__ import annotations

from typing import Any

from maxtext_olmo import errors
from maxtext_olmo import schema
from maxtext_olmo.devices import grain_state
from maxtext_olmo.order import timeline as timeline_lib
from maxtext_olmo.rows import content as content_lib

FORMAT = 2
KIND = "stream"
_SCHEMA = {
    "step": schema.Count(),
    "position": schema.Count(),
    "history": [timeline_lib.SCHEMA],
}
_SCHEMA_OF_FORMAT_1 = {
    **{name: timeline_lib.SCHEMA[name] for name in ("step", "position", "sequence_length")},
    **{name: timeline_lib.SCHEMA[name] for name in ("identity", "content")},
    "history": schema.Maybe(timeline_lib.SCHEMA["extents"]),
}


def parse_state(state: Any) -> tuple[int, int, timeline_lib.Timeline]:
  """Returns the step, the position and the history of a state of any format."""
  state = grain_state.plain(state)
  version = state.get("format") if isinstance(state, dict) else None
  if type(version) is not int or version not in (1, FORMAT):
    raise errors.ResumeError(
        f"This is not a data state that this library saved: {schema.show(state)}. Expected a dict"
        f" with 'format' 1 or {FORMAT}. If there is no such state, set initial_step or"
        " olmo_initial_position."
    )
  if version == FORMAT and state.get("kind") != KIND:
    raise errors.ResumeError(
        f"The data state has kind {schema.show(state.get('kind'))}, but this iterator needs"
        f" {KIND!r}: the state was saved with a different dataset_type or olmo_packing. Set these"
        " keys back."
    )
  schema.check(state, _SCHEMA if version == FORMAT else _SCHEMA_OF_FORMAT_1)
  entries = state["history"] if version == FORMAT else [_entry_of_format_1(state)]
  history = timeline_lib.Timeline.from_json(entries)
  for number, entry in enumerate(history.entries):
    schema.check(entry.content, content_lib.RECORD_SCHEMA, f"history[{number}].content")
    _check_position(entry, entry.step, entry.position)
  _check_position(history.present, state["step"], state["position"])
  return state["step"], state["position"], history


def _check_position(entry: timeline_lib.Entry, step: int, position: int) -> None:
  """Raises ResumeError if the schedule of a history entry cannot put `step` at `position`."""
  if step < max(entry.step, entry.schedule.anchor_step):
    raise schema.damaged(f"step {step} is before step {entry.step}, where its last entry begins")
  expected = entry.schedule.position(step)
  # The last batch of a finite stream may contain padding, which does not advance the position.
  least = entry.schedule.position(step - 1) + 1 if step > entry.schedule.anchor_step else expected
  # If batches do not span epochs, the position may already have moved past the end of an epoch
  # whose last rows fill no batch.
  known = least <= position <= expected or position == entry.schedule.start(step)
  if not known or position * entry.sequence_length >= 1 << 62:
    raise schema.damaged(
        f"it is at step {step} and position {position}, but the schedule in its history puts that"
        f" step at position {expected}"
    )


def _entry_of_format_1(state: dict[str, Any]) -> dict[str, Any]:
  """Returns a history entry with the settings that a state of format 1 records."""
  here = [state["step"], state["position"]]
  return {
      **{name: state[name] for name in _SCHEMA_OF_FORMAT_1 if name != "history"},
      "schedule": {"stages": [[0, 1]], "by_position": False, "anchor": here, "epochs": None},
      "extents": state.get("history") or [],
  }
