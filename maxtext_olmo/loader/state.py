"""The state of a run: one position, and the identity of the stream it counts in.

    {"format": 1, "step": 200, "position": 102400, "anchor": [0, 0], "sequence_length": 8192,
     "identity": {"fingerprint": "…", "order": "feistel", "seed": 34521, "split": "none"},
     "content": {"ngram_filter": true, "document_eos_id": null}}

The position decides where a run goes on. The step is what the trainer counts; where the schedule in force puts that step
elsewhere, it is anchored anew at the position. The identity must agree; what happens where the corpus has changed is
`corpus_change`'s to say. The content may change, with a warning. A run whose corpus was extended has a `history` too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from absl import logging

from maxtext_olmo import errors
from maxtext_olmo.devices import grain_state
from maxtext_olmo.loader import corpus_change
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.order import stream as stream_lib
from maxtext_olmo.rows import steps

_FORMAT = 1


class Start(NamedTuple):
  """Where a run goes on."""

  step: int
  schedule: schedule_lib.BatchSchedule
  stream: stream_lib.Stream


_ADVICE = {
    "fingerprint": "the data is another than the run was begun with",
    "order": "set olmo_order, olmo_mixture, olmo_consumed_path and enable_data_shuffling back",
    "seed": "set data_shuffle_seed back",
    "split": "set olmo_eval_instances back",
}


def position_after(
    stream: stream_lib.Stream, schedule: schedule_lib.BatchSchedule, step: int
) -> int:
  """Places of the order that `step` steps have consumed; the padding of a last batch was none."""
  position = schedule.position(step)
  return position if stream.num_positions is None else min(position, stream.num_positions)


def make_state(
    stream: stream_lib.Stream,
    schedule: schedule_lib.BatchSchedule,
    content: steps.Content,
    step: int,
) -> dict[str, Any]:
  """The state after `step` steps, as a small JSON-able dict."""
  history = {"history": [list(extent) for extent in stream.history]} if stream.history else {}
  return {
      "format": _FORMAT,
      "step": step,
      "position": position_after(stream, schedule, step),
      "anchor": [schedule.anchor_step, schedule.anchor_position],
      "sequence_length": stream.sequence_length,
      "identity": stream.identity(),
      "content": content.record(),
      **history,
  }


def read_state(
    state: dict[str, Any],
    stream: stream_lib.Stream,
    schedule: schedule_lib.BatchSchedule,
    content: steps.Content,
    *,
    corpus: corpus_change.CorpusPolicy | None = None,
    whole_batches: bool = False,
) -> Start:
  """Where the run goes on; ResumeError where the state is of another stream.

  Args:
    state: As `make_state` gave it, perhaps in another run.
    stream: Of this run.
    schedule: Of this run.
    content: Of this run.
    corpus: What may have happened to the corpus; None where it must be the same.
    whole_batches: Go back to a whole number of batches since the beginning of the epoch, as OLMo-core does, which
      repeats data; otherwise the position holds exactly.
  """
  if not isinstance(state, dict) or state.get("format") != _FORMAT:
    raise errors.ResumeError(
        f"This is not a data state of format {_FORMAT} as this library saves it: {str(state)[:200]!r}."
        " Without one, set initial_step or olmo_initial_position."
    )
  state = grain_state.jsonable(state)  # Some frameworks hand NumPy integers back.
  _check_form(state)
  if corpus is not None:
    stream = corpus.stream_for(state, stream, lambda: _in_samples(state, stream))
  _check_identity(state["identity"], stream, corpus)
  was = state["content"]
  for name, value in content.record().items():
    if was.get(name) != value:
      logging.warning(
          "The checkpoint was saved with %s=%s, this run has %s: the same rows come in the same order, but what is in"
          " them differs from here on.",
          name,
          was.get(name),
          value,
      )
  position = _in_samples(state, stream)
  step = int(state["step"])
  if stream.order.drops_tails:
    schedule = schedule.within(stream.order.epochs)
  if whole_batches:
    position = _whole_batches(position, stream, schedule.size(step))
  return Start(step, _anchored(schedule, state, step, position, stream.sequence_length), stream)


def _check_form(state: dict[str, Any]) -> None:
  """A state that was cut or edited is refused as such."""
  wanted = {"step": int, "position": int, "sequence_length": int, "identity": dict, "content": dict}
  for name, kind in wanted.items():
    value = state.get(name)
    if not isinstance(value, kind) or (isinstance(value, int) and value < 0):
      raise errors.ResumeError(
          f"The data state is damaged: {name!r} is {value!r}. Restore it from another checkpoint, or set initial_step"
          " or olmo_initial_position."
      )


def _anchored(
    schedule: schedule_lib.BatchSchedule,
    state: dict[str, Any],
    step: int,
    position: int,
    sequence_length: int,
) -> schedule_lib.BatchSchedule:
  """The schedule with `step` at `position`, anchored where the state's was if that fits: its earlier steps stay known."""
  anchor = state.get("anchor")
  if anchor and state["sequence_length"] == sequence_length and 0 <= anchor[0] <= step:
    kept = schedule.anchored(int(anchor[0]), int(anchor[1]))
    if kept.position(step) == position:
      return kept
  return schedule.anchored(step, position)


def _whole_batches(position: int, stream: stream_lib.Stream, size: int) -> int:
  start = stream.order.epochs.start(stream.order.epochs.epoch(position))
  repeated = (position - start) % size
  if repeated:
    logging.warning(
        "olmo_order_resume=olmo_core: position %d is no whole number of batches of %d; %d samples are repeated, as"
        " OLMo-core repeats them.",
        position,
        size,
        repeated,
    )
  return position - repeated


def _check_identity(
    was: dict[str, Any], stream: stream_lib.Stream, corpus: corpus_change.CorpusPolicy | None
) -> None:
  now = stream.identity()
  ours = ["fingerprint"] if corpus is not None else []  # The policy has looked at it.
  if corpus is not None and corpus.allow == "any" and was.get("fingerprint") != now["fingerprint"]:
    ours.append("split")
  differing = [name for name in now if name not in ours and was.get(name) != now[name]]
  if not differing:
    return
  lines = [
      f"  {name}: the checkpoint has {was.get(name)!r}, this run has {now[name]!r}"
      f" ({_advice(name, was, stream)})"
      for name in differing
  ]
  raise errors.ResumeError(
      "The checkpoint's data state belongs to another stream, so that going on would repeat and skip data:\n"
      + "\n".join(lines)
      + "\nTo begin a new stream on purpose, use another checkpoint_dir, or do not restore the"
      " data state and set initial_step=0."
  )


def _advice(name: str, was: dict[str, Any], stream: stream_lib.Stream) -> str:
  windows = str(was.get("split", "")).split(" ")[0]
  if name == "split" and windows.isdigit():
    count = int(windows) * stream.split.chunk_size
    return f"set olmo_eval_instances={count}, which is as much at {stream.sequence_length} tokens"
  return _ADVICE.get(name, "they must agree")


def _in_samples(state: dict[str, Any], stream: stream_lib.Stream) -> int:
  """The position in samples of this stream's length; the fingerprint has shown that the tokens are the same."""
  position, length = int(state["position"]), int(state["sequence_length"])
  if length == stream.sequence_length:
    return position
  converted, rest = divmod(position * length, stream.sequence_length)
  if rest:
    raise errors.ResumeError(
        f"The checkpoint stands at sample {position} of {length} tokens, which is inside an instance of"
        f" {stream.sequence_length} tokens. Go on with max_target_length={length} until a step"
        f" whose position times {length} is a multiple of {stream.sequence_length}."
    )
  return converted
