"""Checkpoints of a run: the model's state, and the position of the data.

    checkpoint_dir/
      99/                       saved after step 99: 100 steps are done, step 100 comes next
        state/                  parameters and optimiser, restorable onto any mesh
        data/                   the iterator's state as JSON: one file, whatever the process count

Both are written under a temporary name and renamed together, so a checkpoint has both or is not
there. What merely looks like a checkpoint (an empty or half-copied directory with a number for a
name) is not restored; it is moved out of the way, since its number will be needed.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from ml_collections import ConfigDict

from maxtext_olmo import atomic
from maxtext_olmo import errors
from maxtext_olmo.devices import collectives
from maxtext_olmo.loader import resume

_STATE, _DATA = "state", "data"
_TEMPORARY = ".orbax-checkpoint-tmp"
_ASIDE = ".uncommitted"


class Checkpoints:
  """Saves and restores; all processes call each method together."""

  def __init__(
      self,
      directory: str | os.PathLike[str],
      *,
      period: int = 1,
      max_to_keep: int = 0,
      asynchronous: bool = True,
      read_only: bool = False,
  ):
    """Looks for what is there.

    Args:
      read_only: for a reader next to a running trainer: nothing in the directory is touched.
    """
    self._directory = _absolute(directory)
    self._period = period
    _check_shared(self._directory)
    # Process 0 looks for all: views of a shared disk may differ for a while.
    self.latest: int | None = collectives.from_process_0(
        lambda: _find_latest(self._directory, tidy=not read_only), "looking for checkpoints"
    )
    self._saved = self.latest
    self._manager = ocp.CheckpointManager(
        self._directory,
        options=ocp.CheckpointManagerOptions(
            max_to_keep=max_to_keep or None,
            enable_async_checkpointing=asynchronous,
            create=not read_only,
        ),
        item_handlers={
            _STATE: ocp.StandardCheckpointHandler(),
            _DATA: ocp.JsonCheckpointHandler(),
        },
    )

  @classmethod
  def from_config(cls, config: ConfigDict) -> Checkpoints | None:
    """Those of a run, or None where it keeps none."""
    if not (config.enable_checkpointing and config.checkpoint_dir):
      return None
    return cls(
        config.checkpoint_dir,
        period=config.checkpoint_period,
        max_to_keep=config.max_checkpoints,
        asynchronous=config.async_checkpointing,
    )

  @property
  def directory(self) -> str:
    """Where they are, as an absolute path."""
    return str(self._directory)

  def has(self, step: int) -> bool:
    """Whether a committed checkpoint of this step is there."""
    return resume.is_committed(self._directory / str(step))

  def is_due(self, step: int) -> bool:
    """Whether the state after this step is one to save."""
    return (step + 1) % self._period == 0

  def save(self, step: int, state: Any, data_state: dict[str, Any]) -> None:
    """Saves the state after a step; returns once the arrays may be overwritten."""
    if step == self._saved:
      return
    with self._save_errors():
      self._manager.save(
          step,
          args=ocp.args.Composite(
              state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(data_state)
          ),
          force=True,
      )
    self._saved = step
    logging.info("saving checkpoint %d", step)

  def restore(self, step: int, abstract_state: Any) -> tuple[Any, dict[str, Any]]:
    """The state after a step, laid out as `abstract_state` says, and the data's state."""
    path = self._directory / str(step)
    for item in (_STATE, _DATA):
      if not (path / item).exists():
        raise errors.ResumeError(
            f"The checkpoint {path} has no item {item!r}, so this trainer did not save it. Choose"
            " another checkpoint_dir, or set enable_checkpointing=False to begin anew."
        )
    self._check_shapes(step, abstract_state)
    restored = self._manager.restore(
        step,
        args=ocp.args.Composite(
            state=ocp.args.StandardRestore(abstract_state), data=ocp.args.JsonRestore()
        ),
    )
    return restored[_STATE], restored[_DATA]

  def __enter__(self) -> Checkpoints:
    return self

  def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
    # After an error, other processes may be gone, and a save that needs them would never end.
    if error is None or jax.process_count() == 1:
      self.close()

  def close(self) -> None:
    """Waits until all that was saved is committed."""
    with self._save_errors():
      self._manager.wait_until_finished()
      self._manager.close()

  @contextlib.contextmanager
  def _save_errors(self) -> Iterator[None]:
    """Turns what Orbax raises while it saves, perhaps an earlier checkpoint, into a WriteError."""
    with atomic.write_errors(self._directory / "checkpoint"):
      try:
        yield
      except errors.MaxtextOlmoError:
        raise
      except Exception as error:
        if jax.process_count() == 1:  # Otherwise another process may still be writing.
          for path in self._directory.glob(f"*{_TEMPORARY}*"):
            path.rmtree(missing_ok=True)
        raise OSError(f"a checkpoint cannot be saved: {error}") from error

  def _check_shapes(self, step: int, abstract_state: Any) -> None:
    stored = _shapes(self._manager.item_metadata(step)[_STATE].tree["params"])
    wanted = _shapes(abstract_state["params"])
    lines = [
        f"  {name}: the checkpoint has {stored.get(name, 'none')}, the config makes"
        f" {wanted.get(name, 'none')}"
        for name in sorted(stored.keys() | wanted.keys())
        if stored.get(name) != wanted.get(name)
    ]
    if lines:
      raise errors.ResumeError(
          f"The model in {self._directory / str(step)} is not the one of this config:\n"
          + "\n".join(lines)
          + "\nSet the model's keys back, or choose another checkpoint_dir."
      )


def _shapes(params: Any) -> dict[str, tuple[int, ...]]:
  leaves = jax.tree_util.tree_leaves_with_path(params)
  return {".".join(key.key for key in path): tuple(leaf.shape) for path, leaf in leaves}


def _absolute(directory: str | os.PathLike[str]) -> epath.Path:
  text = os.fspath(directory)
  return epath.Path(text if "://" in text else os.path.abspath(text))


def _find_latest(directory: epath.Path, *, tidy: bool) -> int | None:
  if tidy and directory.exists():
    _tidy(directory)
  return resume.latest_committed_step(directory)


def _check_shared(directory: epath.Path) -> None:
  """Raises on all processes if they do not share a directory: the first save would wait forever."""
  if jax.process_count() == 1:
    return

  def mark() -> str:
    directory.mkdir(parents=True, exist_ok=True)
    name = f".shared-{uuid.uuid4().hex}"
    (directory / name).write_text("All processes of a run see this file; it is removed at once.")
    return name

  name = collectives.from_process_0(mark, "writing to checkpoint_dir")

  def look() -> None:
    if not (directory / name).exists():
      raise errors.ConfigError(
          f"checkpoint_dir={directory} of process {jax.process_index()} is not the directory that"
          " process 0 writes to. Give all processes one shared directory."
      )

  try:
    collectives.run_on_all_processes(look, "looking into checkpoint_dir")
  finally:
    if jax.process_index() == 0:
      (directory / name).unlink(missing_ok=True)


def _tidy(directory: epath.Path) -> None:
  """Removes what killed saves left, and moves aside what only looks like a checkpoint."""
  for path in list(directory.iterdir()):
    if _TEMPORARY in path.name:
      path.rmtree()
    elif path.name.isdigit() and not resume.is_committed(path):
      names = (f"{path.name}{_ASIDE}{suffix}" for suffix in ("", *range(1, 1000)))
      aside = next(directory / name for name in names if not (directory / name).exists())
      path.rename(aside)
      logging.warning("%s is no committed checkpoint; moved it to %s.", path, aside.name)
