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
from maxtext_olmo.batches import steps
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.order import stream as stream_lib
from maxtext_olmo.pipelines import corpus_change

_FORMAT = 1


class Start(NamedTuple):
  """Where a run goes on."""

  step: int
  schedule: schedule_lib.BatchSchedule
  stream: stream_lib.Stream


_ADVICE = {
    "fingerprint": "the data is another than the run was begun with",
    "order": "set olmo_order back",
    "seed": "set data_shuffle_seed back",
    "split": "set olmo_eval_instances back",
}


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
      "position": schedule.position(step),
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
  return Start(step, schedule.anchored(step, position), stream)


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
      f" ({_ADVICE.get(name, 'they must agree')})"
      for name in differing
  ]
  raise errors.ResumeError(
      "The checkpoint's data state belongs to another stream, so that going on would repeat and skip data:\n"
      + "\n".join(lines)
      + "\nTo begin a new stream on purpose, do not restore the data state, and set initial_step=0."
  )


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
