"""Checkpoints of a run: the model's state, and the position of the data.

    checkpoint_dir/
      .lease                    names the run that is writing here (see `lease`)
      99/                       saved after step 99: 100 steps are done, step 100 comes next
        state/                  parameters and optimiser, restorable onto any mesh
        data/                   the iterator's state as JSON: one file, whatever the process count

Both items are written under a temporary name and renamed together, so a checkpoint either has both
or does not exist. A directory that only looks like a checkpoint (empty or half-copied, with a
number for a name) is not restored. It is moved aside, because a later save needs its number.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp
import tensorstore
from absl import logging
from etils import epath
from ml_collections import ConfigDict

from maxtext_olmo import errors
from maxtext_olmo.devices import collectives
from maxtext_olmo.loader import resume
from maxtext_olmo.trainers import lease as lease_lib

_STATE, _DATA = "state", "data"
_DATA_FILE = "metadata"  # The file name of Orbax's JSON handler.
_TEMPORARY = ".orbax-checkpoint-tmp"
_ASIDE = ".uncommitted"
_REMOVALS = 20


class Checkpoints:
  """Saves and restores the checkpoints of a run; all processes call each method together."""

  def __init__(
      self,
      directory: str | os.PathLike[str],
      *,
      period: int = 1,
      max_to_keep: int = 0,
      asynchronous: bool = True,
      read_only: bool = False,
      lease: lease_lib.Lease | None = None,
  ):
    """Finds the checkpoints in a directory.

    Args:
      read_only: Whether to leave the directory unchanged, for readers alongside a running trainer.
      lease: The lease of the directory, checked before each save and released at the end of the
        `with` block.
    """
    self._directory = _absolute(directory)
    self._period = period
    self._lease = lease
    if not read_only:
      _check_shared(self._directory)
    # Only process 0 looks, because processes may briefly see different states of a shared disk.
    self.latest: int | None = collectives.from_process_0(
        lambda: _find_latest(self._directory, tidy=not read_only), "looking for checkpoints"
    )
    self._saved = self.latest
    self._failure: BaseException | None = None  # Error of a save in the background.
    self._manager = ocp.CheckpointManager(
        self._directory,
        options=ocp.CheckpointManagerOptions(
            max_to_keep=max_to_keep or None,
            enable_async_checkpointing=asynchronous,
            async_options=ocp.AsyncOptions(barrier_sync_fn=self._meet),
            create=not read_only,
        ),
        item_handlers={
            _STATE: ocp.StandardCheckpointHandler(),
            _DATA: ocp.JsonCheckpointHandler(),
        },
    )

  @classmethod
  def from_config(cls, config: ConfigDict) -> Checkpoints | None:
    """Returns the checkpoints of a run and takes their lease; None if the run saves none.

    Raises:
      ConfigError: Another run is writing to this directory, or it cannot be written to.
    """
    if not (config.enable_checkpointing and config.checkpoint_dir):
      return None
    lease = lease_lib.Lease(config.checkpoint_dir)
    try:
      return cls(
          config.checkpoint_dir,
          period=config.checkpoint_period,
          max_to_keep=config.max_checkpoints,
          asynchronous=config.async_checkpointing,
          lease=lease,
      )
    except BaseException:
      lease.release()
      raise

  @property
  def directory(self) -> str:
    """The directory of the checkpoints, as an absolute path."""
    return str(self._directory)

  def has(self, step: int) -> bool:
    """Returns whether there is a committed checkpoint of a step."""
    return resume.is_committed(self._directory / str(step))

  def is_due(self, step: int) -> bool:
    """Returns whether the state after a step should be saved."""
    return (step + 1) % self._period == 0

  def save(self, step: int, state: Any, data_state: dict[str, Any]) -> None:
    """Saves the state after a step; returns once the arrays may be overwritten.

    Raises:
      ConfigError: Another run has taken over the directory, or it cannot be written to.
    """
    if step == self._saved:
      return
    if self._lease is not None:
      self._lease.check()
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

  def check(self) -> None:
    """Raises WriteError if a save in the background has failed; otherwise costs nothing.

    The next save would also raise it, but may be hours away.
    """
    if self._failure is not None:
      with self._save_errors():
        raise self._failure

  def restore(self, step: int, abstract_state: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the state after a step, laid out as in `abstract_state`, and the data state."""
    path = self._directory / str(step)
    for item in (_STATE, _DATA):
      if not (path / item).exists():
        raise errors.ResumeError(
            f"The checkpoint {path} has no item {item!r}: it was lost, or another trainer saved the"
            " checkpoint. Move it away to resume from the previous one, or choose another"
            " checkpoint_dir."
        )
    data = collectives.from_process_0(
        lambda: resume.read_json(path / _DATA / _DATA_FILE), "reading the data state"
    )
    try:
      self._check_shapes(step, abstract_state)
      args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract_state))
      return self._manager.restore(step, args=args)[_STATE], data
    except errors.ResumeError:
      raise
    except Exception as error:  # Orbax and TensorStore raise many types, even bare `Exception`.
      raise errors.ResumeError(self._describe_damage(step, error)) from error

  def __enter__(self) -> Checkpoints:
    return self

  def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
    # After an error, other processes may have ended, and a save that needs them would never finish.
    try:
      if error is None or jax.process_count() == 1:
        self.close()
    finally:
      if self._lease is not None:
        self._lease.release()

  def close(self) -> None:
    """Waits until all saves are committed."""
    with self._save_errors():
      self._manager.wait_until_finished()
      self._manager.close()

  def _meet(self, *, key: str, timeout_ms: int) -> None:
    """Waits in the background until all processes are at the same point of a save.

    If a save has failed, Orbax still calls this before it raises the error. The other processes
    then wait elsewhere, so both sides would wait for each other for 20 minutes.
    """
    error = sys.exc_info()[1]
    if error is not None:
      self._failure = error
      raise error
    ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)

  @contextlib.contextmanager
  def _save_errors(self) -> Iterator[None]:
    """Converts storage errors during a save to WriteError."""
    try:
      yield
    except errors.MaxtextOlmoError:
      raise
    except Exception as error:
      said = str(error).splitlines()[-1] if str(error) else type(error).__name__
      # TensorStore raises ValueErrors that contain the operating system's error code.
      if not isinstance(error, OSError) and "os_error_code" not in said:
        raise
      free = ""
      if jax.process_index() == 0 and "://" not in self.directory:
        with contextlib.suppress(OSError):
          if jax.process_count() == 1:  # Otherwise another process may still be writing.
            _remove_unfinished(self._directory)
          free = f" ({shutil.disk_usage(self.directory).free:,} bytes are free)"
      raise errors.WriteError(
          f"A checkpoint could not be written to checkpoint_dir={self.directory!r}{free}: {said}."
          " Free some space, or lower max_checkpoints, and start again; earlier checkpoints are"
          " intact."
      ) from error

  def _describe_damage(self, step: int, error: Exception) -> str:
    damage = find_damage(self._directory / str(step) / _STATE)
    earlier = sorted((s for s in resume.committed_steps(self._directory) if s < step), reverse=True)
    whole = (s for s in earlier if not find_damage(self._directory / str(s) / _STATE))
    found = next(whole, None)
    advice = "no earlier checkpoint is intact" if earlier else "there is no earlier checkpoint"
    if found is not None:
      advice = f"checkpoint {found} is intact, and is used once the later ones are moved away"
    return (
        f"The model in {self._directory / str(step)} cannot be restored:"
        f" {damage or f'{type(error).__name__}: {str(error)[:500]}'}. Copy the checkpoint again if"
        f" you have another copy; {advice}."
    )

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
          f"The model in {self._directory / str(step)} does not match this config:\n"
          + "\n".join(lines)
          + "\nSet the model's keys back, or choose another checkpoint_dir."
      )


def find_damage(item: epath.Path) -> str:
  """Returns which file of a saved model is missing, truncated or unreadable; empty if none is.

  Compares the sizes of local files, and reads the metadata of the arrays but not the arrays.
  """
  described_by = [item / "_METADATA", *sorted(item.glob("array_metadatas/*"))]
  try:
    for path in (*described_by, item / "_sharding"):
      if path in described_by or path.exists():
        json.loads(path.read_text())
  except (OSError, ValueError) as error:
    return f"{path}: {error}"
  if "://" in str(item):
    return ""
  try:
    store = tensorstore.KvStore.open(f"file://{item}/").result()
    nodes = [tensorstore.ocdbt.dump(store).result()["versions"][-1]["root"]["location"]]
    while nodes:
      node = nodes.pop()
      if damage := _find_missing(item, node):
        return damage
      for entry in tensorstore.ocdbt.dump(store, node).result()["entries"]:
        if "location" in entry:
          nodes.append(entry["location"])
        elif damage := _find_missing(item, entry.get("indirect_value", "")):
          return damage
  except (ValueError, LookupError) as error:
    return f"{item / 'manifest.ocdbt'}: {error}"
  return ""


def _find_missing(item: epath.Path, reference: str) -> str:
  """Returns what is wrong with the file that `kind:directory:file:offset:length` refers to."""
  if not reference:
    return ""
  _, directory, name, offset, length = reference.split(":")
  path, expected = item / directory / name, int(offset) + int(length)
  try:
    size = path.stat().length
  except OSError as error:
    return f"{path}: {error}"
  return f"{path} has {size} bytes, expected {expected} or more" if size < expected else ""


def _shapes(params: Any) -> dict[str, tuple[int, ...]]:
  leaves = jax.tree_util.tree_leaves_with_path(params)
  return {".".join(key.key for key in path): tuple(leaf.shape) for path, leaf in leaves}


def _absolute(directory: str | os.PathLike[str]) -> epath.Path:
  text = os.fspath(directory)
  return epath.Path(text if "://" in text else os.path.abspath(text))


def _find_latest(directory: epath.Path, *, tidy: bool) -> int | None:
  if tidy:
    if directory.exists():
      _tidy(directory)
    return resume.latest_committed_step(directory)
  # Readers may want an earlier checkpoint, whatever has happened to the latest one.
  return max(resume.committed_steps(directory), default=None)


def _check_shared(directory: epath.Path) -> None:
  """Raises on all processes if process 0 cannot write to the directory or others cannot see it.

  Without this check, the first save would fail or wait forever.
  """

  def mark() -> str:
    name = f".shared-{uuid.uuid4().hex}"
    try:
      directory.mkdir(parents=True, exist_ok=True)
      (directory / name).write_text("Tests that all processes see this file; removed immediately.")
    except (OSError, ValueError) as error:
      raise errors.ConfigError(
          f"checkpoint_dir={directory} cannot be written ({error}). Choose a directory that the run"
          " may write to, or set enable_checkpointing=False."
      ) from error
    return name

  name = collectives.from_process_0(mark, "writing to checkpoint_dir")

  def look() -> None:
    if not (directory / name).exists():
      raise errors.ConfigError(
          f"checkpoint_dir={directory} of process {jax.process_index()} is not the directory that"
          " process 0 writes to. Give all processes the same shared directory."
      )

  try:
    collectives.run_on_all_processes(look, "looking into checkpoint_dir")
  finally:
    if jax.process_index() == 0:
      (directory / name).unlink(missing_ok=True)


def _remove_unfinished(directory: epath.Path) -> None:
  """Removes the remains of failed saves."""
  for _ in range(_REMOVALS):
    found = [path for path in directory.iterdir() if _TEMPORARY in path.name]
    if not found:
      break
    for path in found:
      with contextlib.suppress(OSError):
        path.rmtree()
    time.sleep(0.05)  # Threads of a save that has just failed may still create files.


def _tidy(directory: epath.Path) -> None:
  """Removes the remains of killed saves, and moves aside what only looks like a checkpoint."""
  _remove_unfinished(directory)
  for path in list(directory.iterdir()):
    if not resume.is_step(path):
      continue
    try:
      committed = resume.is_committed(path)
    except errors.ResumeError:  # `latest_committed_step` raises it again if it matters.
      continue
    if not committed:
      names = (f"{path.name}{_ASIDE}{suffix}" for suffix in ("", *range(1, 1000)))
      aside = next(directory / name for name in names if not (directory / name).exists())
      path.rename(aside)
      logging.warning("%s is not a committed checkpoint; moved it to %s.", path, aside.name)
