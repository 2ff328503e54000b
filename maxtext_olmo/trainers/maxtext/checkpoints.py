"""Finds the position of the data for the step that a MaxText trainer restored.

MaxText's checkpoints hold the model and its step. The position follows from that step and the
history file of the run (`loader/history_file.py`), which process 0 writes into `checkpoint_dir` at
each start, before the first batch. Nothing is added to the checkpoints. The first rule that applies
determines where the data resumes:

  1. `initial_step` and `olmo_initial_position` apply if both are set and the model has done exactly
     `initial_step` steps. If nothing was restored from this run's own directory, `initial_step`
     alone is enough.
  2. The data state in the checkpoint applies, if there is one; only earlier releases saved it, as
     the item `iter`.
  3. The history file in the directory of the checkpoint applies, if it covers the steps before the
     restored step.
  4. `initial_step`, `olmo_initial_position` or both apply, if set. Both together are an anchor: the
     position of a later step is counted from there.
  5. Otherwise, the position follows from the step and the batch schedule of this run. This is the
     case for checkpoints that MaxText's own loader left.

The data counts the same steps as the model, so the position of each later checkpoint follows from
its step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from absl import logging
from etils import epath

from maxtext_olmo import errors
from maxtext_olmo.devices import collectives
from maxtext_olmo.loader import history_file
from maxtext_olmo.loader import iterator as iterator_lib
from maxtext_olmo.loader import resume
from maxtext_olmo.loader import run_config


def place(
    iterator: iterator_lib.BatchIterator, config: Any, *, step: int, label: int | None
) -> None:
  """Moves the data to the step at which a model resumes, and writes the history of the run.

  Args:
    iterator: The training data, as `create_data_iterator` returned it for this config.
    config: MaxText's config.
    step: The number of steps that the model has done.
    label: The checkpoint in `checkpoint_dir` that was restored; None if there was none.

  Raises:
    ResumeError: The position cannot be found, or belongs to a different stream.
    WriteError: The history cannot be written, so later checkpoints could not be resumed.
  """
  # Only process 0 looks, because processes may briefly see different states of a shared disk.
  found = collectives.from_process_0(
      lambda: _find_state(config, step, label), "looking for the position of the data"
  )
  if found is not None:
    with resume.naming(found["where"]):
      iterator.set_state(found["state"])
    if iterator.step != step:  # Earlier releases counted the steps of the data separately.
      iterator.go_to(step, iterator.position)
    reason = found["source"]
  else:
    reason = _follow_config(iterator, config, step, restored=step > 0 or label is not None)
  if config.enable_checkpointing and config.checkpoint_dir:
    collectives.from_process_0(
        lambda: history_file.write(config.checkpoint_dir, iterator.history, iterator.step),
        "writing the history of the run",
    )
  logging.info(
      "olmo_grain: %s; the data resumes with step %d, position %d.",
      reason,
      iterator.step,
      iterator.position,
  )


def latest_label(manager: Any) -> int | None:
  """Returns the label of the checkpoint that MaxText restores; None if there is none.

  Orbax's earlier manager, and its emergency and multi-tier managers, have a method `latest_step`;
  its training `Checkpointer` has a property `latest`.
  """
  if manager is None:
    return None
  if hasattr(manager, "latest_step"):
    return manager.latest_step()
  if hasattr(manager, "latest"):
    return None if manager.latest is None else manager.latest.step
  raise errors.ConfigError(
      f"The checkpoint manager of MaxText, {type(manager).__qualname__}, has neither latest_step()"
      " nor latest, so it is unknown which checkpoint is restored. Install the versions of MaxText"
      " and orbax-checkpoint that docs/guides/maxtext.md lists."
  )


def model_step(state: Any) -> int | None:
  """Returns the number of steps that a train state has done; None if it has only parameters."""
  for path in (("optimizer", "step"), ("step",)):
    value = state
    for name in path:
      try:
        value = value[name]
      except (KeyError, TypeError, IndexError):
        value = getattr(value, name, None)
      if value is None:
        break
    if value is not None:
      value = value.get_value() if hasattr(value, "get_value") else value
      return int(np.asarray(value))
  return None


def _find_state(config: Any, step: int, label: int | None) -> dict[str, Any] | None:
  """Returns the data state after `step` steps, with its location and a log message.

  Returns None if the config determines where the data resumes.
  """
  given, position = config.initial_step, config.olmo_initial_position
  checkpoint = _restored_checkpoint(config, label)
  if checkpoint is None or _begins_new_data(config, step, label):
    return None
  directory = checkpoint.parent
  if resume.is_step(checkpoint):
    state = resume.saved_state(str(directory), int(checkpoint.name))
    if state is not None:
      source = "the position comes from the data state in the checkpoint"
      return {"state": state, "where": str(checkpoint), "source": source}
  path = directory / history_file.NAME
  by_keys = given >= 0 or position >= 0
  if not by_keys and run_config.exists(directory) and not path.exists():
    raise errors.ResumeError(
        f"The history of the run, {path}, is missing, and without it the position of step {step} is"
        " unknown. Restore the file from a copy. If the batch size never changed, set"
        f" initial_step={step} and olmo_initial_position to {step} times the rows of a batch."
    )
  state = history_file.state_at(directory, step)
  # If the history begins at this step, no checkpoint has been saved since then, so the config keys
  # still apply.
  if state is None or (by_keys and state["history"][0]["step"] >= step):
    return None
  return {
      "state": state,
      "where": str(path),
      "source": f"the position comes from {history_file.NAME}",
  }


def _restored_checkpoint(config: Any, label: int | None) -> epath.Path | None:
  """Returns the directory of the checkpoint that the model was restored from, if any."""
  if label is not None:
    return epath.Path(config.checkpoint_dir) / str(label)
  if not config.load_full_state_path:
    return None
  path = epath.Path(config.load_full_state_path)
  return path if resume.is_step(path) else path.parent  # The path may be an item of a checkpoint.


def _begins_new_data(config: Any, step: int, label: int | None) -> bool:
  given, position = config.initial_step, config.olmo_initial_position
  return given >= 0 and (label is None or (position >= 0 and step == given))


def _follow_config(
    iterator: iterator_lib.BatchIterator, config: Any, step: int, *, restored: bool
) -> str:
  """Moves the data to a step, using only the config; returns a log message."""
  given, position = config.initial_step, config.olmo_initial_position
  if given < 0:
    iterator.go_to(step, position if position >= 0 else None, keep_history=False)
    if position >= 0:
      return f"the position comes from olmo_initial_position={position}"
    return "the checkpoint has no data state and no history" if restored else "a new run"
  if position >= 0 and step >= given:
    iterator.go_to(step)
  else:
    iterator.go_to(step, iterator.position, keep_history=False)
  if position >= 0:
    return f"the position comes from initial_step={given} and olmo_initial_position={position}"
  if restored and given != step:
    logging.warning(
        "The restored model has done %d steps, but the data resumes at step %d, because"
        " initial_step is set.",
        step,
        given,
    )
  return f"the position comes from initial_step={given}"
