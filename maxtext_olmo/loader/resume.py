"""Saves the iterator in an Orbax checkpoint, and finds where a run resumes.

    manager.save(step, args=ocp.args.Composite(
        state=ocp.args.StandardSave(model), data=maxtext_olmo.IteratorSave(train)))
    manager.restore(step, args=ocp.args.Composite(
        state=ocp.args.StandardRestore(abstract), data=maxtext_olmo.IteratorRestore(train)))

The state is the same on all processes, so process 0 writes one small file and all processes read
it. States that were saved with Grain's handler (one file per process) or with Orbax's JSON handler
can be restored too.

A run resumes at a step, at a position, or after the latest committed checkpoint. A checkpoint
labelled N was saved after step N, so N + 1 steps are done and step N + 1 comes next. Only committed
checkpoints count: Orbax writes under a temporary name and renames at the end, so a save that was
killed leaves nothing that looks like a checkpoint. A directory whose name is a number may also come
from another program; if it is empty or incomplete, it is ignored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging
from etils import epath

from maxtext_olmo import atomic
from maxtext_olmo import config as config_lib
from maxtext_olmo import errors
from maxtext_olmo import schema
from maxtext_olmo.devices import collectives
from maxtext_olmo.devices import grain_state
from maxtext_olmo.loader import history_file
from maxtext_olmo.loader import restart
from maxtext_olmo.loader import run_files
from maxtext_olmo.loader import state as state_lib
from maxtext_olmo.order import schedule as schedule_lib

_FILE = "olmo_state.json"
# The names of the files in which this package, Orbax's JSON handler and Grain's handler save a
# state. If there are several files, they hold the same state.
_KNOWN = re.compile(r"olmo_state\.json|metadata|process_\d+(-of-\d+)?\.json")
# The checkpoint items that may hold the iterator: this package's name, then MaxText's.
_DATA_ITEMS = ("data", "iter")
_LARGEST_FILE = 64 << 20

_REMEDY = (
    "Move this checkpoint away to resume from the previous one, or set initial_step (and"
    " olmo_initial_position if the batch size has changed)."
)


def find_state(directory: epath.Path) -> dict[str, Any]:
  """Returns the data state in the directory of a checkpoint item.

  Raises:
    ResumeError: No file holds a state, or a file that should hold one cannot be read.
  """
  try:
    files = sorted(path.name for path in directory.iterdir())
  except OSError as error:
    raise errors.ResumeError(f"{directory} cannot be read ({error}). {_REMEDY}") from error
  found = []
  for name in filter(_KNOWN.fullmatch, files):
    state = read_json(directory / name)
    if _is_state(state):
      return dict(state)
    found.append(f"{name} with {schema.show(state)}")
  raise errors.ResumeError(
      f"{directory} holds no data state of this library: expected {_FILE}, or a state in the files"
      f" of Orbax's JSON handler or Grain's; found {', '.join(found or files) or 'no file'}."
      f" {_REMEDY}"
  )


def read_json(path: epath.Path) -> Any:
  """Returns the JSON value in a file of a checkpoint; raises ResumeError if there is none."""
  try:
    return json.loads(run_files.read(path, _LARGEST_FILE).decode())
  except OSError as error:
    raise errors.ResumeError(
        f"The data state {path} cannot be read ({error}). {_REMEDY}"
    ) from error
  except (ValueError, RecursionError) as error:
    raise errors.ResumeError(f"The data state {path} is not JSON ({error}). {_REMEDY}") from error


def _is_state(value: Any) -> bool:
  """Returns whether a JSON value is an iterator state that any version of this library saved."""
  if not isinstance(value, dict):
    return False
  return "identity" in value or {"format", "kind"} <= set(value) or grain_state.is_state(value)


@contextlib.contextmanager
def naming(where: Any) -> Iterator[None]:
  """Prefixes the message of a ResumeError with the location of the state that caused it."""
  try:
    yield
  except errors.ResumeError as error:
    raise errors.ResumeError(f"{where}: {error}") from error


class IteratorCheckpointHandler(ocp.CheckpointHandler):
  """Saves and restores an iterator of this library; the handler itself is stateless."""

  def save(self, directory: epath.Path, args: IteratorSave) -> None:
    """Writes the state, on process 0."""
    # All processes call `get_state`, because some iterators gather the states of all processes.
    state = args.item.get_state()
    if jax.process_index() == 0:
      with atomic.write_errors(directory / _FILE):
        (directory / _FILE).write_text(json.dumps(grain_state.jsonable(state)))

  def restore(self, directory: epath.Path, args: IteratorRestore) -> Any:
    """Resumes the iterator from the saved state, and returns the iterator."""
    state = find_state(directory)
    if jax.process_count() > 1 and grain_state.is_of_one_process(state):
      raise errors.ResumeError(
          f"{directory} holds the data state of one process, saved by an earlier release, but this"
          f" run has {jax.process_count()} processes. If the state is valid for all of them, read"
          " the file and pass its content to set_state on each process."
      )
    with naming(directory):
      args.item.set_state(state)
    start_prefetch = getattr(args.item, "start_prefetch", None)
    if start_prefetch is not None:
      start_prefetch()
    return args.item

  def metadata(self, directory: epath.Path) -> Any:
    """Returns the saved state."""
    return find_state(directory)

  def finalize(self, directory: epath.Path) -> None:
    """Does nothing: a save is complete when `save` returns."""

  def close(self) -> None:
    """Does nothing: no file is kept open."""


@ocp.args.register_with_handler(IteratorCheckpointHandler, for_save=True)
@dataclasses.dataclass
class IteratorSave(ocp.args.CheckpointArgs):
  """Orbax arguments that save the state of an iterator of this library.

  The example of `IteratorRestore` saves an iterator with a model, and restores both. `IteratorSave`
  is used like Orbax's own arguments:

  >>> import orbax.checkpoint as ocp
  >>> issubclass(IteratorSave, ocp.args.CheckpointArgs)
  True

  Attributes:
    item: The iterator.
  """

  item: Any


@ocp.args.register_with_handler(IteratorCheckpointHandler, for_restore=True)
@dataclasses.dataclass
class IteratorRestore(ocp.args.CheckpointArgs):
  """Orbax arguments that restore an iterator of this library in place.

  >>> import tempfile
  >>> import jax
  >>> import numpy as np
  >>> import orbax.checkpoint as ocp
  >>> import maxtext_olmo
  >>> config = maxtext_olmo.get_config()
  >>> config.update(dataset_type="synthetic", max_target_length=16)
  >>> mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
  >>> train, _ = maxtext_olmo.create_data_iterator(config, mesh)
  >>> model, batch = {"weights": np.zeros(4)}, next(train)
  >>> with tempfile.TemporaryDirectory() as folder, ocp.CheckpointManager(folder) as manager:
  ...   saved = manager.save(0, args=ocp.args.Composite(
  ...       state=ocp.args.StandardSave(model), data=maxtext_olmo.IteratorSave(train)))
  ...   manager.wait_until_finished()
  ...   train.reset()
  ...   restored = manager.restore(0, args=ocp.args.Composite(
  ...       state=ocp.args.StandardRestore(model), data=maxtext_olmo.IteratorRestore(train)))
  >>> train.step
  1
  >>> train.close()

  Attributes:
    item: The iterator, which then resumes from the saved state.
  """

  item: Any


def latest_committed_step(checkpoint_dir: str | os.PathLike[str]) -> int | None:
  """Returns the largest step with a committed checkpoint, or None.

  Raises:
    ResumeError: It is unknown whether a later checkpoint is complete.
  """
  steps = sorted(_steps_in(checkpoint_dir), key=lambda path: int(path.name), reverse=True)
  return next((int(path.name) for path in steps if is_committed(path)), None)


def committed_steps(checkpoint_dir: str | os.PathLike[str]) -> list[int]:
  """Returns the steps that are known to have a committed checkpoint."""
  found = []
  for path in _steps_in(checkpoint_dir):
    with contextlib.suppress(errors.ResumeError):
      if is_committed(path):
        found.append(int(path.name))
  return found


def _steps_in(checkpoint_dir: str | os.PathLike[str]) -> list[epath.Path]:
  directory = epath.Path(checkpoint_dir)
  try:
    return [path for path in directory.iterdir() if is_step(path)] if directory.exists() else []
  except (OSError, ValueError) as error:
    raise errors.ConfigError(
        f"checkpoint_dir={directory} cannot be read ({error}). Choose a directory that you can"
        " read."
    ) from error


def is_step(path: epath.Path) -> bool:
  """Returns whether a path is named like a checkpoint; Orbax may pad step numbers with zeros."""
  return bool(path.name.isascii() and path.name.isdigit())


def is_committed(path: epath.Path) -> bool:
  """Returns whether a save is complete; how Orbax marks this depends on the storage.

  Raises:
    ResumeError: This is unknown, because the metadata cannot be read.
  """
  # If Orbax writes in place, it creates the metadata first and adds the commit time at the end.
  return (path / "commit_success.txt").exists() or bool(
      _metadata(path).get("commit_timestamp_nsecs")
  )


def _metadata(path: epath.Path) -> dict[str, Any]:
  """Returns Orbax's metadata of a checkpoint; empty if it is missing or incomplete.

  Raises:
    ResumeError: It is there, but cannot be read. If this counted as missing, a transient error of a
      store would let a run resume from an older checkpoint.
  """
  file = path / "_CHECKPOINT_METADATA"
  try:
    # The listing decides: in some stores, a file that cannot be accessed does not seem to exist.
    if file.name not in [found.name for found in path.iterdir()]:
      return {}
    metadata = json.loads(run_files.read(file, _LARGEST_FILE).decode())
  except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
    return {}
  except OSError as error:
    raise errors.ResumeError(
        f"{file} cannot be read ({error}), so it is unknown whether this checkpoint is complete. If"
        " the error is transient, start the run again. Otherwise, move this checkpoint away to"
        " resume from the previous one."
    ) from error
  return metadata if isinstance(metadata, dict) else {}


def saved_state(checkpoint_dir: str, step: int) -> dict[str, Any] | None:
  """Returns the data state in a checkpoint, or None if the checkpoint was saved without one.

  Raises:
    ResumeError: The checkpoint was saved with a data state, which is lost or damaged.
  """
  for path in _steps_in(checkpoint_dir):
    if int(path.name) == step:
      saved = [item for item in _DATA_ITEMS if (path / item).exists()]
      if not saved:
        handlers = _metadata(path).get("item_handlers")
        saved = [item for item in _DATA_ITEMS if isinstance(handlers, dict) and item in handlers]
      if saved:
        return find_state(path / saved[0])
  return None


def find_start(
    options: config_lib.Options,
    stream: Any,
    schedule: schedule_lib.BatchSchedule,
    content: dict[str, Any],
    policy: restart.RestartPolicy,
) -> state_lib.Start:
  """Returns where the run resumes; process 0 decides for all processes."""
  decision = _decide_on_process_0(options)
  if decision["state"] is not None:

    def read() -> state_lib.Start:
      with naming(decision["where"]):
        return policy.from_state(decision["state"], stream, schedule, content)

    # This can fail on a single process, such as one that sees a different copy of the old index.
    return collectives.run_on_all_processes(read, "reading the data state")
  step, position = decision["step"], options.olmo_initial_position
  # Without a state, the config alone determines the position of each step from step 0 on.
  if position >= 0:
    if options.initial_step < 0 and step == 0:
      step = schedule.step_at(position)
    schedule = schedule.anchored(step, position)
  start = state_lib.Start(step, schedule, stream)
  entered = policy.stages.beginning if policy.stages is not None else ()
  return state_lib.steered(start, policy.skips, policy.stages, entered, max(0, position))


def restore_latest(options: config_lib.Options, iterator: Any) -> None:
  """Resumes an iterator whose rows have no positions from the state in the latest checkpoint."""
  decision = _decide_on_process_0(options)
  if decision["state"] is not None:
    with naming(decision["where"]):
      iterator.set_state(decision["state"])
  elif decision["step"]:
    raise errors.ResumeError(
        f"The latest checkpoint in {options.checkpoint_dir}, after {decision['step']} steps, has no"
        f" data state of this library, and olmo_packing={options.olmo_packing!r} cannot resume by"
        " step. Save the iterator with IteratorSave, use olmo_packing='planned', or set"
        " initial_step=0 to restart the data from its beginning."
    )


def _decide_on_process_0(options: config_lib.Options) -> dict[str, Any]:
  return collectives.from_process_0(lambda: _decide(options), "looking for the step to resume at")


def _decide(options: config_lib.Options) -> dict[str, Any]:
  decision: dict[str, Any] = {"step": max(0, options.initial_step), "state": None}
  if options.initial_step >= 0 or not (options.enable_checkpointing and options.checkpoint_dir):
    return decision
  label = latest_committed_step(options.checkpoint_dir)
  if label is None:
    return decision
  state = saved_state(options.checkpoint_dir, label)
  where = f"Checkpoint {label} in {options.checkpoint_dir}"
  if state is None:
    known = "where the schedule puts that step"
    if options.olmo_initial_position >= 0:
      known = f"at olmo_initial_position={options.olmo_initial_position}"
    elif (state := history_file.state_at(options.checkpoint_dir, label + 1)) is not None:
      known = f"at position {state['position']}, as the history of the run records"
      where += f" and {history_file.NAME}"
    logging.info(
        "Checkpoint %d was saved without a data state; %d steps are done. The data resumes %s.",
        label,
        label + 1,
        known,
    )
  return {"step": label + 1, "state": state, "where": where}
