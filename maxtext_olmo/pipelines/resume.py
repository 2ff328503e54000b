"""Where a run goes on: from a step, a position, or the latest committed checkpoint.

A checkpoint labelled N was saved after step N, so N + 1 steps are done and step N + 1 comes next. Only committed
checkpoints count: Orbax writes under a temporary name and renames, so a killed save leaves nothing that looks like one,
but an empty or partial directory with a number for a name may stem from elsewhere, and it is passed over.
"""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
from absl import logging
from etils import epath
from jax.experimental import multihost_utils

from maxtext_olmo import errors
from maxtext_olmo.batches import steps
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.order import stream as stream_lib
from maxtext_olmo.pipelines import corpus_change
from maxtext_olmo.pipelines import options as options_lib
from maxtext_olmo.pipelines import orbax_state
from maxtext_olmo.pipelines import state as state_lib

# The items under which a trainer keeps the iterator: this package's, then MaxText's.
_DATA_ITEMS = ("data", "iter")
_COMMITTED = ("_CHECKPOINT_METADATA", "commit_success.txt")


def latest_committed_step(checkpoint_dir: str) -> int | None:
  """The largest step with a committed checkpoint, or None."""
  directory = epath.Path(checkpoint_dir)
  if not directory.exists():
    return None
  found = [
      int(path.name)
      for path in directory.iterdir()
      if path.name.isdigit() and any((path / name).exists() for name in _COMMITTED)
  ]
  return max(found, default=None)


def saved_state(checkpoint_dir: str, step: int) -> dict[str, Any] | None:
  """The data state inside a checkpoint, or None where it has none that this library saved."""
  for item in _DATA_ITEMS:
    state = orbax_state.find_state(epath.Path(checkpoint_dir) / str(step) / item)
    if state is not None:
      return state
  return None


def find_start(
    options: options_lib.Options,
    stream: stream_lib.Stream,
    schedule: schedule_lib.BatchSchedule,
    content: steps.Content,
    *,
    corpus: corpus_change.CorpusPolicy | None = None,
) -> state_lib.Start:
  """Where the run goes on; process 0 decides for all."""
  decision = _from_process_0(_decide(options) if jax.process_index() == 0 else None)
  if decision["error"]:
    raise errors.ResumeError(decision["error"])
  if decision["state"] is not None:
    return state_lib.read_state(
        decision["state"],
        stream,
        schedule,
        content,
        corpus=corpus,
        whole_batches=options.resumes_whole_batches,
    )
  step, position = decision["step"], options.olmo_initial_position
  if position < 0:
    return state_lib.Start(step, schedule, stream)
  if options.initial_step < 0 and step == 0:
    step = schedule.step_at(position)
  return state_lib.Start(step, schedule.anchored(step, position), stream)


def check_agreement(what: dict[str, Any]) -> None:
  """Raises on every process where they do not all have the same values, before any data flows."""
  if jax.process_count() == 1:
    return
  texts = _gather(json.dumps(what, sort_keys=True))
  for process, text in enumerate(texts):
    if text != texts[0]:
      mine, theirs = json.loads(texts[0]), json.loads(text)
      differing = {k: (mine[k], theirs.get(k)) for k in mine if mine[k] != theirs.get(k)}
      raise errors.ConfigError(
          f"Processes 0 and {process} would read different streams: {differing} (process 0 first). Give all processes"
          " the same index and config."
      )


def _decide(options: options_lib.Options) -> dict[str, Any]:
  decision: dict[str, Any] = {"step": max(0, options.initial_step), "state": None, "error": ""}
  if options.initial_step >= 0 or not (options.enable_checkpointing and options.checkpoint_dir):
    return decision
  label = latest_committed_step(options.checkpoint_dir)
  if label is None:
    return decision
  try:
    state = saved_state(options.checkpoint_dir, label)
  except errors.ResumeError as error:
    return {**decision, "error": str(error)}
  if state is None:
    logging.info(
        "Checkpoint %d holds no data state of this library; %d steps are done.", label, label + 1
    )
  return {**decision, "step": label + 1, "state": state}


def _from_process_0(value: Any) -> Any:
  if jax.process_count() == 1:
    return value
  data = np.frombuffer(json.dumps(value).encode(), np.uint8)
  size = int(multihost_utils.broadcast_one_to_all(np.int32(data.size)))
  padded = np.zeros(size, np.uint8)
  if jax.process_index() == 0:
    padded[:] = data
  return json.loads(np.asarray(multihost_utils.broadcast_one_to_all(padded)).tobytes())


def _gather(text: str) -> list[str]:
  data = np.frombuffer(text.encode(), np.uint8)
  sizes = np.asarray(multihost_utils.process_allgather(np.int32(data.size))).reshape(-1)
  padded = np.zeros(int(sizes.max()), np.uint8)
  padded[: data.size] = data
  rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(sizes), -1)
  return [row[:size].tobytes().decode() for row, size in zip(rows, sizes)]
