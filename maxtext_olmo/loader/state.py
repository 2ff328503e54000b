"""The state of a run: its position, and the history of the settings that led there.

    {"format": 2, "kind": "stream", "step": 200, "position": 102400,
     "history": [{"step": 0, "position": 0, "sequence_length": 8192, "schedule": {…},
                  "identity": {…}, "content": {…}, …}]}

A run resumes at the saved position; the step is only the trainer's count. If the current schedule
puts that step at a different position, the schedule gets a new anchor: this step at the saved
position. The identity in the last history entry must match the run's; if the corpus has changed,
`corpus_change` decides. The content may change, with a warning. Every change adds an entry to the
history.
"""

from __future__ import annotations

import itertools
import re
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

from absl import logging

from maxtext_olmo import errors
from maxtext_olmo import schema
from maxtext_olmo.loader import corpus_change
from maxtext_olmo.loader import stages as stages_lib
from maxtext_olmo.loader import state_format
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.order import skips as skips_lib
from maxtext_olmo.order import staged_stream
from maxtext_olmo.order import timeline as timeline_lib
from maxtext_olmo.rows import content as content_lib


class Start(NamedTuple):
  """The point where a run resumes, and the history up to it."""

  step: int
  schedule: schedule_lib.BatchSchedule
  stream: Any
  history: timeline_lib.Timeline | None = None
  skips: tuple[skips_lib.Skip, ...] = ()
  stages: stages_lib.Stages = ()


_ADVICE = {
    "fingerprint": "the data is not the data that the run started with",
    "order": "set olmo_order, olmo_mixture, olmo_consumed_path and enable_data_shuffling back",
    "seed": "set data_shuffle_seed back",
    "split": "set olmo_eval_instances back",
}


def position_after(stream: Any, schedule: schedule_lib.BatchSchedule, step: int) -> int:
  """Returns the position after `step` steps; padding in the last batch does not count."""
  position = schedule.position(step)
  end = stream.num_positions
  return position if end is None else min(position, end)


def begin_history(start: Start, content: dict[str, Any]) -> timeline_lib.Timeline:
  """Returns the history of a run up to its start, with an entry for the settings from there on."""
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
      skips=start.skips,
      stages=start.stages,
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
      "format": state_format.FORMAT,
      "kind": state_format.KIND,
      "step": step,
      "position": position_after(stream, schedule, step),
      "history": history.to_json(),
  }


def check_same_stream(entry: timeline_lib.Entry, stream: Any, step: int) -> None:
  """Raises OrderError unless a stream is the one that was in force during a history entry.

  For an extended corpus, the fingerprint of any of its extents is accepted.
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
  if not lines:
    lines = [f"  {line}" for line in stage_differences(entry, stream, step)]
  if lines:
    raise errors.OrderError(
        f"Step {step} belongs to another stream, which this config does not describe:\n"
        + "\n".join(lines)
        + "\nUse the config that was in force then."
    )


def stage_differences(entry: timeline_lib.Entry, stream: Any, step: int) -> list[str]:
  """Returns descriptions of how the stages of an entry and a stream differ, up to a step."""
  last = int(entry.schedule.positions(step)[-1])
  was, now = (
      [stage for stage in stages[1:] if stage.position <= last]
      for stages in (entry.stages, getattr(stream, "stages", ()))
  )
  for one, other in itertools.zip_longest(was, now):
    if one is None or other is None:
      known = "none then" if one is None else "none now"
      return [f"{(one or other).name}: {known}"]
    if one.settings != other.settings:
      return [f"{one.name}: {line}" for line in one.settings.differences(other.settings)]
    if one.position != other.position:
      return [f"{one.name}: from position {one.position} then, from {other.position} now"]
  return []


def read_state(
    state: dict[str, Any],
    stream: Any,
    schedule: schedule_lib.BatchSchedule,
    content: dict[str, Any],
    *,
    corpus: corpus_change.CorpusPolicy | None = None,
    whole_batches: bool = False,
    skips: skips_lib.Requests = skips_lib.Requests(),
    stages: stages_lib.StagePolicy | None = None,
    exclusions: Mapping[str, str] = types.MappingProxyType({}),
) -> Start:
  """Returns where the run resumes; raises ResumeError if the state belongs to another stream.

  Args:
    state: A result of `make_state`, perhaps from another run or an earlier release.
    content: This run's settings for processing tokens, in the form that a state records.
    corpus: Policy for a corpus that changed since the checkpoint; None requires an identical
      corpus.
    whole_batches: Whether to round the position down to a whole number of batches of the epoch, as
      OLMo-core does. This repeats data.
    skips: The ranges of data that the config asks to skip.
    stages: Policy for stages; None for a dataset type without stages.
    exclusions: Description of the tokens that `olmo_exclude` leaves out of the loss, keyed by their
      digest; empty if there are none.
  """
  step, position, history = state_format.parse_state(state)
  entry = history.present
  if stages is None and len(entry.stages) > 1:
    raise schema.damaged("it has stages, which this dataset type does not support")
  if stages is not None:
    stream = stages.first_stream(entry, step, stream)

  def position_here() -> int:
    return _in_samples(position, entry.sequence_length, stream.sequence_length)

  if corpus is not None:
    _check_length(entry, stream, corpus)
    stream = corpus.stream_for(entry, stream, position_here)
  _check_identity(entry.identity, stream, corpus)
  if corpus is None:
    _check_length(entry, stream, corpus)
  # A setting that an older state lacks does not count as a change.
  for change in content_lib.describe_changes({**content, **entry.content}, content, exclusions):
    logging.warning(
        "From step %d on, %s (the checkpoint → this run). The rows and their order stay the same.",
        step,
        change,
    )
  here = position_here()
  entered: stages_lib.Stages = ()
  if stages is not None and (stages.requests or entry.stages or stages.base.mixture):
    entered = _entered(stages, history, step, here, stream)
    stream = stages.stream(entered)
  if position < entry.schedule.position(step):
    _check_at_end(entry, here, stream)
  schedule = schedule.within(getattr(stream, "batch_epochs", None))
  if whole_batches:
    here = _whole_batches(here, stream, schedule.size(step))
  recorded = _converted(entry, stream.sequence_length)
  schedule = schedule.skipping(skips_lib.positions_of(recorded, "drop"))
  anchored = _anchored(schedule, entry, step, here, stream)
  start = Start(step, anchored, stream, history, recorded)
  return steered(start, skips, stages if entered else None, entered, here)


def _entered(
    stages: stages_lib.StagePolicy,
    history: timeline_lib.Timeline,
    step: int,
    position: int,
    stream: Any,
) -> stages_lib.Stages:
  if stream.history:
    raise errors.ResumeError(
        "The corpus of this run was extended, so the run cannot have stages, which need a corpus"
        " that never changes. Remove olmo_stages, or begin a new run."
    )

  def convert(first: int) -> int:
    return _in_samples(first, history.present.sequence_length, stream.sequence_length)

  return stages.entered(history, step, position, convert)


def steered(
    start: Start,
    skips: skips_lib.Requests,
    stages: stages_lib.StagePolicy | None,
    entered: stages_lib.Stages,
    position: int,
) -> Start:
  """Returns a start with the skips and the later stages that the config asks for.

  Args:
    start: The point where the run begins or resumes, with the stages that it has entered.
    skips: The ranges to skip.
    stages: Policy for stages; None if there are none.
    entered: The stages that the run has entered.
    position: The position where the run begins or resumes.
  """
  if stages is None:
    return with_skips(start, skips, position)
  planned = with_skips(_with_stages(start, stages, entered), skips, position)
  # Skips move all later steps to other positions, so the stages that begin at these steps move too.
  schedule = planned.schedule.within(start.schedule.epochs)
  return _with_stages(planned._replace(schedule=schedule), stages, entered)


def _with_stages(start: Start, policy: stages_lib.StagePolicy, entered: stages_lib.Stages) -> Start:
  if not policy.requests and len(entered) == 1:
    return start._replace(stages=policy.recorded(entered))
  # In a run without a state, a stage may begin at any step.
  first = start.schedule.anchor_step if start.history is None else start.step
  stages, stream, schedule = policy.ahead(entered, start.schedule, first)
  return start._replace(stream=stream, schedule=schedule, stages=policy.recorded(stages))


def with_skips(start: Start, requests: skips_lib.Requests, position: int) -> Start:
  """Returns a start with the config's skips; raises ResumeError for a skip before `position`."""
  schedule = start.schedule

  def to_positions(first: int, end: int) -> tuple[int, int]:
    return schedule.start(first), schedule.position(end)

  skips = requests.resolve(start.skips, position, to_positions)
  schedule = schedule.skipping(skips_lib.positions_of(skips, "drop"))
  return start._replace(schedule=schedule, skips=skips)


def _converted(entry: timeline_lib.Entry, length: int) -> tuple[skips_lib.Skip, ...]:
  """Converts the skips of an entry to samples of `length` tokens, widened to whole samples."""
  was = entry.sequence_length
  return tuple(
      skip._replace(first=skip.first * was // length, end=-(-skip.end * was // length))
      for skip in entry.skips
  )


def _check_at_end(entry: timeline_lib.Entry, position: int, stream: Any) -> None:
  """Raises ResumeError unless a position that is not on a step boundary is the end of an epoch."""
  _, own, first = staged_stream.stage_at(stream, position)
  epochs = own.epochs
  if epochs is None or entry.identity["fingerprint"] != stream.identity()["fingerprint"]:
    return
  if epochs.start(epochs.epoch(position - first)) != position - first:
    raise schema.damaged(f"position {position} is neither between two steps nor between two epochs")


def _anchored(
    schedule: schedule_lib.BatchSchedule,
    entry: timeline_lib.Entry,
    step: int,
    position: int,
    stream: Any,
) -> schedule_lib.BatchSchedule:
  """Returns the schedule with `step` at `position`; keeps the entry's anchor if possible."""
  was = entry.schedule
  if entry.sequence_length == stream.sequence_length and was.anchor_step <= step:
    kept = schedule.anchored(was.anchor_step, was.anchor_position)
    if position_after(stream, kept, step) == position:
      return kept
  return schedule.anchored(step, position)


def _whole_batches(position: int, stream: Any, size: int) -> int:
  _, own, first = staged_stream.stage_at(stream, position)
  start = own.epochs.start(own.epochs.epoch(position - first))
  repeated: int = (position - first - start) % size
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
  if "documents" not in was:  # The state is from a release without this field.
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
  if name == "split" and re.fullmatch("[0-9]{1,18}", windows) and split is not None:
    count = int(windows) * split.chunk_size
    return f"set olmo_eval_instances={count}, the same data in {stream.sequence_length}-token rows"
  return _ADVICE.get(name, "the two must be equal")


def _check_length(
    entry: timeline_lib.Entry, stream: Any, corpus: corpus_change.CorpusPolicy | None
) -> None:
  """Raises ResumeError if this corpus cannot have rows of the state's sequence length."""
  was, now = entry.sequence_length, stream.sequence_length
  if was == now or entry.identity["fingerprint"] != stream.identity()["fingerprint"]:
    return  # The corpus is a different one, so the corpus policy decides.
  if corpus is not None:
    longest = corpus.index.max_target_sequence_length
  else:
    split = getattr(stream, "split", None)
    longest = now * split.chunk_size if split is not None and split.chunk_size > 1 else None
  if longest is None or longest % was:
    raise schema.damaged(
        f"it counts rows of {was} tokens, but the row length of a corpus with its fingerprint is"
        f" {now if longest is None else f'a divisor of {longest}'}"
    )


def _in_samples(position: int, length: int, now: int) -> int:
  """Converts a position from samples of `length` tokens to samples of `now` tokens."""
  if length == now:
    return position
  converted, rest = divmod(position * length, now)
  if rest:
    raise errors.ResumeError(
        f"The checkpoint is at position {position} in samples of {length} tokens, inside an"
        f" instance of {now} tokens. Continue with max_target_length={length} until a step whose"
        f" position times {length} is a multiple of {now}."
    )
  return converted
