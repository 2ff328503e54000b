"""The data state in MaxText's checkpoints, and where the data resumes if a checkpoint has none.

MaxText keeps an iterator's state for its own `grain` pipeline alone. Here a checkpoint of an
`olmo_grain` run gets the same item, `iter`, with one file that any number of processes can read.
When a run is restored,

  1. `initial_step` and `olmo_initial_position` are used, if both are set and the restored model has
     done exactly that many steps: the run begins new data here; or
  2. the state in the restored checkpoint (or next to that of `load_full_state_path`), or
  3. `initial_step`, if set; together with `olmo_initial_position` it is an anchor, or
  4. the step of the restored model, as the number of steps done; its position follows from the
     history in the run's directory or, without one, from the batch schedule.

The last case is for checkpoints of the emergency and multi-tier managers and of MaxText's own
loader, which hold no state.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jax
import numpy as np
from absl import logging
from etils import epath

from maxtext_olmo import atomic
from maxtext_olmo import errors
from maxtext_olmo.devices import collectives
from maxtext_olmo.loader import history_file
from maxtext_olmo.loader import iterator as iterator_lib
from maxtext_olmo.loader import resume
from maxtext_olmo.trainers import failure

_FILE = "process_0.json"


class DataState:
  """An Orbax checkpointable: an iterator's state, the same on all processes, in one file."""

  def __init__(self, iterator: iterator_lib.BatchIterator):
    self._iterator = iterator

  async def save(self, directory: Any) -> Any:
    """Takes the state now and returns the coroutine that writes it, perhaps during training."""
    text = json.dumps(self._iterator.get_state(), indent=1)

    async def write() -> None:
      path = await directory.await_creation()
      if jax.process_index() == 0:
        try:
          with atomic.write_errors(path / _FILE):
            await asyncio.to_thread((path / _FILE).write_text, text)
        except errors.WriteError as error:
          # Orbax raises it only after a barrier in which processes wait 20 minutes for each other.
          logging.error("%s", error)
          failure.end(f"WriteError: {error}", 2)
          raise

    return write()

  async def load(self, directory: Any) -> Any:
    """The coroutine that sets the iterator to the state that was saved."""

    async def read() -> None:
      self._iterator.set_state(await asyncio.to_thread(resume.read_json, directory / _FILE))

    return read()


class AsGrain:
  """A config whose `dataset_type` is `grain`, which MaxText checks before it saves a data state."""

  dataset_type = "grain"

  def __init__(self, config: Any):
    self._config = config

  def __getattr__(self, name: str) -> Any:
    return getattr(self._config, name)


def place_after_restore(
    iterator: iterator_lib.BatchIterator,
    *,
    directory: Any,
    label: int | None,
    full_state_path: str,
    restored: Any,
    config: Any,
) -> None:
  """Sets the iterator to the step at which the restored model resumes.

  Args:
    iterator: Of the training data.
    directory: Where the checkpoints of this run are, or None.
    label: The checkpoint of it that was restored, or None.
    full_state_path: MaxText's `load_full_state_path`, which counts where no label was restored.
    restored: What MaxText restored.
    config: Of the run.
  """
  if restored is None:
    return
  step, given, position = model_step(restored), config.initial_step, config.olmo_initial_position
  checkpoint = None
  if label is not None:
    checkpoint = None if directory is None else epath.Path(directory) / str(label)
  elif full_state_path:
    checkpoint = epath.Path(full_state_path).parent  # The path names the model's item.
  reason = "the checkpoint was saved without a data state"
  by_config = given >= 0 and (label is None or (position >= 0 and step == given))
  if by_config:
    reason = f"initial_step={given} and olmo_initial_position={position}, not a data state, decide"

  def find() -> tuple[dict[str, Any] | None, str, str]:
    """Returns the state, where it is, and what to say about it."""
    if checkpoint is not None and not by_config and resume.is_step(checkpoint):
      state = resume.saved_state(str(checkpoint.parent), int(checkpoint.name))
      if state is not None:
        return state, str(checkpoint), "data state restored"
    if step is None or given >= 0 or position >= 0:
      return None, "", ""
    where = epath.Path(config.checkpoint_dir) if checkpoint is None else checkpoint.parent
    return history_file.state_at(where, step), str(where), f"{reason}, but the run has its history"

  # Process 0 looks for all: views of a shared disk may differ for a while.
  state, where, source = collectives.from_process_0(find, "looking for the data state")
  if state is not None:
    with resume.naming(where):
      iterator.set_state(state)
    logging.info("olmo_grain: %s, step %d, position %d.", source, iterator.step, iterator.position)
    return
  if step is None:
    return
  if given < 0:
    iterator.go_to(step, position if position >= 0 else None)
  elif position >= 0 and step >= given:
    iterator.go_to(step)
  elif given != step:
    logging.warning(
        "The restored model has done %d steps, but the data resumes at initial_step=%d. To count"
        " from there after later restarts too, set olmo_initial_position as well.",
        step,
        given,
    )
  logging.info(
      "olmo_grain: %s; the data resumes with step %d, position %d.",
      reason,
      iterator.step,
      iterator.position,
  )


def model_step(restored: Any) -> int | None:
  """The steps that a restored train state has done, or None where it has only parameters."""
  state = restored["items"] if isinstance(restored, dict) and "items" in restored else restored
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
