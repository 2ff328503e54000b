"""The iterator as an item of an Orbax checkpoint: one small file for any number of processes.

    manager.save(step, args=ocp.args.Composite(
        state=ocp.args.StandardSave(model), data=maxtext_olmo.IteratorSave(train)))
    manager.restore(step, args=ocp.args.Composite(
        state=ocp.args.StandardRestore(abstract), data=maxtext_olmo.IteratorRestore(train)))

The state is the same on all processes, so process 0 writes it and all processes read it. States
that Grain's handler wrote, one file per process, are read too, and so is a JSON item of Orbax.
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
from maxtext_olmo.devices import grain_state

_FILE = "olmo_state.json"
# Ours, that of Orbax's JSON handler, and those of Grain's handler, which all hold the same state.
_KNOWN = re.compile(r"olmo_state\.json|metadata|process_\d+(-of-\d+)?\.json")


def find_state(directory: epath.Path) -> dict[str, Any] | None:
  """Returns the data state among the files of a checkpoint's item, or None if there is none.

  Raises:
    ResumeError: A file that should hold a state is not JSON.
  """
  if not directory.exists():
    return None
  for path in sorted(directory.iterdir(), key=lambda path: path.name):
    if not _KNOWN.fullmatch(path.name):
      continue
    try:
      state = json.loads(path.read_text())
    except ValueError as error:
      raise errors.ResumeError(
          f"The data state {path} is not JSON ({error}). Remove this checkpoint to resume from the"
          " one before it."
      ) from error
    if _is_state(state):
      return state
  return None


def _is_state(value: Any) -> bool:
  """Returns whether a JSON value is a state of an iterator of this library, of any version."""
  if not isinstance(value, dict):
    return False
  return "identity" in value or {"format", "kind"} <= set(value) or grain_state.is_state(value)


class IteratorCheckpointHandler(ocp.CheckpointHandler):
  """Saves and restores an iterator of this library; it has no state itself."""

  def save(self, directory: epath.Path, args: IteratorSave) -> None:
    """Writes the state, on process 0."""
    # On all processes: some iterators gather what each process has.
    state = args.item.get_state()
    if jax.process_index() == 0:
      (directory / _FILE).write_text(json.dumps(grain_state.jsonable(state)))

  def restore(self, directory: epath.Path, args: IteratorRestore) -> Any:
    """Moves the iterator to where the state was taken, and returns it."""
    state = find_state(directory)
    if state is None:
      raise errors.ResumeError(
          f"{directory} holds no data state of this library: expected {_FILE}, or the files of"
          " Grain's handler. Without one, set initial_step or olmo_initial_position."
      )
    if jax.process_count() > 1 and grain_state.is_of_one_process(state):
      raise errors.ResumeError(
          f"{directory} holds the state of one process's data, saved by an earlier release, and"
          f" this run has {jax.process_count()}. If it holds for all of them, read the file and"
          " pass it to set_state on each process."
      )
    args.item.set_state(state)
    start_prefetch = getattr(args.item, "start_prefetch", None)
    if start_prefetch is not None:
      start_prefetch()
    return args.item

  def metadata(self, directory: epath.Path) -> Any:
    """Returns the state itself."""
    return find_state(directory)

  def finalize(self, directory: epath.Path) -> None:
    """Does nothing: a save is complete when `save` returns."""

  def close(self) -> None:
    """Does nothing: no file is kept open."""


@ocp.args.register_with_handler(IteratorCheckpointHandler, for_save=True)
@dataclasses.dataclass
class IteratorSave(ocp.args.CheckpointArgs):
  """Saves the state of an iterator of this library."""

  item: Any


@ocp.args.register_with_handler(IteratorCheckpointHandler, for_restore=True)
@dataclasses.dataclass
class IteratorRestore(ocp.args.CheckpointArgs):
  """Restores an iterator of this library in place."""

  item: Any
