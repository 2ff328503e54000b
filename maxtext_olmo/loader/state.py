"""The state of a run: its position, and a history that says what the position counts.

    {"format": 2, "kind": "stream", "step": 200, "position": 102400,
     "history": [{"step": 0, "position": 0, "sequence_length": 8192, "schedule": {…},
                  "identity": {…}, "content": {…}, …}]}

The position decides where a run resumes. The step is what the trainer counts; if the schedule in
force puts that step elsewhere, the schedule is anchored again, at the position. The identity of the
last entry must match the run's; if the corpus has changed, `corpus_change` decides. The content may
change, with a warning. Every change adds an entry to the history.

Later releases read states of all earlier formats (docs/guides/resume.md has the policy). Format 1
has no history: it records only what was in force when it was saved.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from absl import logging

from maxtext_olmo import errors
from maxtext_olmo.devices import grain_state
from maxtext_olmo.loader import corpus_change
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.order import timeline as timeline_lib

FORMAT = 2
KIND = "stream"
_DAMAGED = "Restore another checkpoint, or set initial_step or olmo_initial_position."


class Start(NamedTuple):
  """The point where a run resumes, and the history up to it."""

  step: int
  schedule: schedule_lib.BatchSchedule
  stream: Any
  history: timeline_lib.Timeline | None = None


_ADVICE = {
    "fingerprint": "the data is not the data that the run started with",
    "order": "set olmo_order, olmo_mixture, olmo_consumed_path and enable_data_shuffling back",
    "seed": "set data_shuffle_seed back",
    "split": "set olmo_eval_instances back",
}


def position_after(stream: Any, schedule: schedule_lib.BatchSchedule, step: int) -> int:
  """Returns the position after `step` steps; the padding of a last batch does not count."""
  position = schedule.position(step)
  end = stream.num_positions
  return position if end is None else min(position, end)


def begin_history(start: Start, content: dict[str, Any]) -> timeline_lib.Timeline:
  """Returns the history of a run up to its start, and what is in force from there on."""
  schedule = start.schedule
  step, position = schedule.anchor_step, schedule.anchor_position
  if start.history is not None:
    step, position = start.step, position_after(start.stream, schedule, start.step)
  entry = timeline_lib.Entry(
      step=step,
      position=position,
      sequence_length=start.stream.sequence_length,
      schedule=schedule,
      identity=start.stream.identity(),
      content=content,
      extents=tuple(start.stream.history),
  )
  if start.history is None:
    return timeline_lib.Timeline((entry,))
  if start.history.present.same_as(entry):
    return start.history
  return start.history.changed(entry)


def make_state(
    history: timeline_lib.Timeline, stream: Any, schedule: schedule_lib.BatchSchedule, step: int
) -> dict[str, Any]:
  """Returns the state after `step` steps, as a small JSON-able dict."""
  return {
      "format": FORMAT,
      "kind": KIND,
      "step": step,
      "position": position_after(stream, schedule, step),
      "history": history.to_json(),
  }


def check_same_stream(entry: timeline_lib.Entry, stream: Any, step: int) -> None:
  """Raises OrderError unless a stream says which rows came while an entry was in force.

  The stream of a corpus that was extended says so for each extent that the corpus has had.
  """
  was, now = dict(entry.identity), stream.identity()
  if was.get("fingerprint") in [fingerprint for _, _, fingerprint in stream.history]:
    was["fingerprint"] = now["fingerprint"]
  was["sequence_length"], now["sequence_length"] = entry.sequence_length, stream.sequence_length
  lines = [
      f"  {name}: {was[name]!r} then, {now[name]!r} now"
      for name in now
      if name in was and was[name] != now[name]
  ]
  if lines:
    raise errors.OrderError(
        f"Step {step} was taken from another stream, which this config does not describe:\n"
        + "\n".join(lines)
        + "\nUse the config that was in force then."
    )


def read_state(
    state: dict[str, Any],
    stream: Any,
    schedule: schedule_lib.BatchSchedule,
    content: dict[str, Any],
    *,
    corpus: corpus_change.CorpusPolicy | None = None,
    whole_batches: bool = False,
) -> Start:
  """Returns where the run resumes; raises ResumeError if the state belongs to another stream.

  Args:
    state: A result of `make_state`, perhaps from another run or an earlier release.
    content: How this run processes tokens, as a state records it.
    corpus: Policy for a corpus that changed since the checkpoint; None requires an identical
      corpus.
    whole_batches: Round the position down to a whole number of batches of the epoch, as OLMo-core
      does, which repeats data; otherwise the position is kept.
  """
  step, position, history = _parse(state)
  entry = history.present

  def position_here() -> int:
    return _in_samples(position, entry.sequence_length, stream.sequence_length)

  if corpus is not None:
    stream = corpus.stream_for(entry, stream, position_here)
  _check_identity(entry.identity, stream, corpus)
  for name, value in content.items():
    saved = entry.content.get(name, value)  # Older states lack what was recorded later.
    if saved != value:
      logging.warning(
          "The checkpoint was saved with %s=%s, this run has %s: the same rows come in the same"
          " order, but their content differs from here on.",
          name,
          saved,
          value,
      )
  here = position_here()
  if stream.drops_tails:
    schedule = schedule.within(stream.epochs)
  if whole_batches:
    here = _whole_batches(here, stream, schedule.size(step))
  return Start(step, _anchored(schedule, entry, step, here, stream), stream, history)


def parse_state(state: dict[str, Any]) -> tuple[int, int, timeline_lib.Timeline]:
  """Returns the step, the position and the history of a state, without a stream to compare."""
  return _parse(state)


def _parse(state: dict[str, Any]) -> tuple[int, int, timeline_lib.Timeline]:
  """Returns the step, the position and the history of a state of any format."""
  state = grain_state.jsonable(state)  # Some frameworks restore integers as NumPy's.
  if not isinstance(state, dict) or state.get("format") not in (1, FORMAT):
    raise errors.ResumeError(
        f"This is not a data state that this library saved: {str(state)[:200]!r}. Expected a dict"
        f" with 'format' 1 or {FORMAT}. Without one, set initial_step or olmo_initial_position."
    )
  if state["format"] == FORMAT and state.get("kind") != KIND:
    raise errors.ResumeError(
        f"The data state is of kind {state.get('kind')!r}, this iterator needs {KIND!r}: it was"
        " saved by another dataset type or packing. Set dataset_type and olmo_packing back."
    )
  for name in ("step", "position"):
    value = state.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 62:
      raise errors.ResumeError(f"The data state is damaged: {name!r} is {value!r}. {_DAMAGED}")
  if state["format"] == 1:
    return state["step"], state["position"], _history_of_format_1(state)
  if not isinstance(state.get("history"), list):
    raise errors.ResumeError(f"The data state is damaged: it has no 'history'. {_DAMAGED}")
  return state["step"], state["position"], timeline_lib.Timeline.from_json(state["history"])


def _history_of_format_1(state: dict[str, Any]) -> timeline_lib.Timeline:
  """Returns the history in a state of format 1, which knows nothing of the steps before it."""
  here = [state["step"], state["position"]]
  values = {
      "step": state["step"],
      "position": state["position"],
      "sequence_length": state.get("sequence_length"),
      "schedule": {"stages": [[0, 1]], "by_position": False, "anchor": here, "epochs": None},
      "identity": state.get("identity"),
      "content": state.get("content"),
      "extents": state.get("history", []),
  }
  return timeline_lib.Timeline.from_json([values])


def _anchored(
    schedule: schedule_lib.BatchSchedule,
    entry: timeline_lib.Entry,
    step: int,
    position: int,
    stream: Any,
) -> schedule_lib.BatchSchedule:
  """Returns the schedule with `step` at `position`, anchored where the entry's was if that fits."""
  was = entry.schedule
  if entry.sequence_length == stream.sequence_length and was.anchor_step <= step:
    kept = schedule.anchored(was.anchor_step, was.anchor_position)
    if position_after(stream, kept, step) == position:
      return kept
  return schedule.anchored(step, position)


def _whole_batches(position: int, stream: Any, size: int) -> int:
  start = stream.epochs.start(stream.epochs.epoch(position))
  repeated = (position - start) % size
  if repeated:
    logging.warning(
        "olmo_order_resume=olmo_core: position %d is not a whole number of batches of %d in its"
        " epoch; %d samples are repeated, as in OLMo-core.",
        position,
        size,
        repeated,
    )
  return position - repeated


def _check_identity(
    was: dict[str, Any], stream: Any, corpus: corpus_change.CorpusPolicy | None
) -> None:
  now = stream.identity()
  checked = ["fingerprint"] if corpus is not None else []  # The policy has checked it.
  if corpus is not None and corpus.allow == "any" and was.get("fingerprint") != now["fingerprint"]:
    checked.append("split")
  if "documents" not in was:  # Saved before states named the documents.
    checked.append("documents")
  differing = [name for name in now if name not in checked and was.get(name) != now[name]]
  if not differing:
    return
  lines = [
      f"  {name}: the checkpoint has {was.get(name)!r}, this run has {now[name]!r}"
      f" ({_advice(name, was, stream)})"
      for name in differing
  ]
  raise errors.ResumeError(
      "The checkpoint's data state belongs to another stream, so resuming would repeat and skip"
      " data:\n"
      + "\n".join(lines)
      + "\nTo begin a new stream on purpose, use another checkpoint_dir, or do not restore the"
      " data state and set initial_step=0."
  )


def _advice(name: str, was: dict[str, Any], stream: Any) -> str:
  windows = str(was.get("split", "")).split(" ")[0]
  split = getattr(stream, "split", None)
  if name == "split" and windows.isdigit() and split is not None:
    count = int(windows) * split.chunk_size
    return f"set olmo_eval_instances={count}, the same amount at {stream.sequence_length} tokens"
  return _ADVICE.get(name, "they must be the same")


def _in_samples(position: int, length: int, now: int) -> int:
  """Converts a position to samples of another length; equal fingerprints mean equal tokens."""
  if length == now:
    return position
  converted, rest = divmod(position * length, now)
  if rest:
    raise errors.ResumeError(
        f"The checkpoint is at sample {position} of {length} tokens, which is inside an instance of"
        f" {now} tokens. Continue with max_target_length={length} until a step whose position times"
        f" {length} is a multiple of {now}."
    )
  return converted
