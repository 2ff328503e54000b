"""The data state in MaxText's checkpoints, and where the data resumes if a checkpoint has none.

MaxText keeps an iterator's state for its own `grain` pipeline alone. Here a checkpoint of an
`olmo_grain` run gets the same item, `iter`, with one file that any number of processes can read.
When a run is restored,

  1. the state in the restored checkpoint (or next to that of `load_full_state_path`) is used, or
  2. `initial_step`, if set; together with `olmo_initial_position` it is an anchor, or
  3. the step of the restored model, as the number of steps done.

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
from maxtext_olmo.loader import iterator as iterator_lib
from maxtext_olmo.loader import resume

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
        with atomic.write_errors(path / _FILE):
          await asyncio.to_thread((path / _FILE).write_text, text)

    return write()

  async def load(self, directory: Any) -> Any:
    """The coroutine that sets the iterator to the state that was saved."""

    async def read() -> None:
      self._iterator.set_state(json.loads(await asyncio.to_thread((directory / _FILE).read_text)))

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
  state = None
  if label is not None:
    state = resume.saved_state(str(directory), label) if directory is not None else None
  elif full_state_path and config.initial_step < 0:
    # The path names the model's item; its checkpoint is the directory above.
    checkpoint = epath.Path(full_state_path).parent
    if checkpoint.name.isdigit():
      state = resume.saved_state(str(checkpoint.parent), int(checkpoint.name))
  if state is not None:
    iterator.set_state(state)
    logging.info(
        "olmo_grain: data state restored, step %d, position %d.", iterator.step, iterator.position
    )
    return
  step = model_step(restored)
  if step is None:
    return
  given, position = config.initial_step, config.olmo_initial_position
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
      "olmo_grain: the checkpoint holds no data state; the data resumes with step %d, position %d.",
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
