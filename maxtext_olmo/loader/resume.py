"""Where a run resumes: at a step, at a position, or after the latest committed checkpoint.

A checkpoint labelled N was saved after step N, so N + 1 steps are done and step N + 1 comes next.
Only committed checkpoints count: Orbax writes under a temporary name and renames, so a killed save
leaves nothing that looks like one, but an empty or partial directory with a number for a name may
have come from elsewhere, and is ignored.
"""

from __future__ import annotations

import json
import os
from typing import Any

from absl import logging
from etils import epath

from maxtext_olmo import config as config_lib
from maxtext_olmo.devices import collectives
from maxtext_olmo.loader import checkpoint_item
from maxtext_olmo.loader import corpus_change
from maxtext_olmo.loader import state as state_lib
from maxtext_olmo.order import schedule as schedule_lib

# The items under which a trainer keeps the iterator: this package's, then MaxText's.
_DATA_ITEMS = ("data", "iter")


def latest_committed_step(checkpoint_dir: str | os.PathLike[str]) -> int | None:
  """The largest step with a committed checkpoint, or None."""
  directory = epath.Path(checkpoint_dir)
  if not directory.exists():
    return None
  found = [p for p in directory.iterdir() if p.name.isdigit() and is_committed(p)]
  return max((int(path.name) for path in found), default=None)


def is_committed(path: epath.Path) -> bool:
  """Whether a save ran to its end here; Orbax notes that in one of two ways, by kind of storage."""
  if (path / "commit_success.txt").exists():
    return True
  try:
    metadata = json.loads((path / "_CHECKPOINT_METADATA").read_text())
  except (OSError, ValueError):
    return False
  # Where a save writes in place, the file is there from its beginning, without the time of its end.
  return isinstance(metadata, dict) and bool(metadata.get("commit_timestamp_nsecs"))


def saved_state(checkpoint_dir: str, step: int) -> dict[str, Any] | None:
  """The data state inside a checkpoint, or None where it has none that this library saved."""
  for item in _DATA_ITEMS:
    state = checkpoint_item.find_state(epath.Path(checkpoint_dir) / str(step) / item)
    if state is not None:
      return state
  return None


def find_start(
    options: config_lib.Options,
    stream: Any,
    schedule: schedule_lib.BatchSchedule,
    content: dict[str, Any],
    *,
    corpus: corpus_change.CorpusPolicy | None = None,
) -> state_lib.Start:
  """Where the run goes on; process 0 decides for all."""
  decision = collectives.from_process_0(
      lambda: _decide(options), "looking for the step to resume at"
  )
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


def _decide(options: config_lib.Options) -> dict[str, Any]:
  decision: dict[str, Any] = {"step": max(0, options.initial_step), "state": None}
  if options.initial_step >= 0 or not (options.enable_checkpointing and options.checkpoint_dir):
    return decision
  label = latest_committed_step(options.checkpoint_dir)
  if label is None:
    return decision
  state = saved_state(options.checkpoint_dir, label)
  if state is None:
    logging.info(
        "Checkpoint %d holds no data state of this library; %d steps are done.", label, label + 1
    )
  return {**decision, "step": label + 1, "state": state}
