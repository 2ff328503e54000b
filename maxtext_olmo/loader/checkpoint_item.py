"""The iterator as an item of an Orbax checkpoint: one small file, whatever the number of processes.

    manager.save(step, args=ocp.args.Composite(
        state=ocp.args.StandardSave(model), data=maxtext_olmo.IteratorSave(train)))
    manager.restore(step, args=ocp.args.Composite(
        state=ocp.args.StandardRestore(abstract), data=maxtext_olmo.IteratorRestore(train)))

The state is the same on all processes, so process 0 writes it and any number of processes reads it. What Grain's handler
has written, a file per process, is read too, at any number of processes, and so is a plain JSON item of Orbax.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from maxtext_olmo import errors

_FILE = "olmo_state.json"
# Ours, that of Orbax's JSON handler, those of Grain's; of the last, any will do.
_KNOWN = re.compile(r"olmo_state\.json|metadata|process_\d+(-of-\d+)?\.json")


def find_state(directory: epath.Path) -> dict[str, Any] | None:
  """The data state among the files of a checkpoint's item, whoever wrote it; None where it has none of this library."""
  if not directory.exists():
    return None
  for path in sorted(directory.iterdir(), key=lambda path: path.name):
    if not _KNOWN.fullmatch(path.name):
      continue
    try:
      state = json.loads(path.read_text())
    except ValueError as error:
      raise errors.ResumeError(
          f"The data state {path} is not JSON ({error}); remove this checkpoint to go on from the one before."
      ) from error
    if isinstance(state, dict) and ("identity" in state or "history" in state):
      return state
  return None


class IteratorCheckpointHandler(ocp.CheckpointHandler):
  """Saves and restores an iterator of this library; it holds nothing itself."""

  def save(self, directory: epath.Path, args: IteratorSave) -> None:
    """Writes the state, on process 0."""
    if jax.process_index() == 0:
      (directory / _FILE).write_text(json.dumps(args.item.get_state()))

  def restore(self, directory: epath.Path, args: IteratorRestore) -> Any:
    """Moves the iterator to where the state was taken, and returns it."""
    state = find_state(directory)
    if state is None:
      raise errors.ResumeError(
          f"{directory} holds no data state of this library: expected {_FILE}, or the files of Grain's handler."
          " Without one, set initial_step or olmo_initial_position."
      )
    args.item.set_state(state)
    args.item.start_prefetch()
    return args.item

  def metadata(self, directory: epath.Path) -> Any:
    """The state itself, which is all there is to know."""
    return find_state(directory)

  def finalize(self, directory: epath.Path) -> None:
    """Nothing is left to do after a save."""

  def close(self) -> None:
    """Nothing is open."""


@ocp.args.register_with_handler(IteratorCheckpointHandler, for_save=True)
@dataclasses.dataclass
class IteratorSave(ocp.args.CheckpointArgs):
  """Saves the state of an iterator of `create_data_iterator`."""

  item: Any


@ocp.args.register_with_handler(IteratorCheckpointHandler, for_restore=True)
@dataclasses.dataclass
class IteratorRestore(ocp.args.CheckpointArgs):
  """Restores an iterator of `create_data_iterator` in place."""

  item: Any
