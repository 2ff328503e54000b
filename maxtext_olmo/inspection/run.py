"""A run to inspect: its config, the data state of a checkpoint, and an iterator at that state.

A run is named by a path: a checkpoint, the directory of its checkpoints, the parent of that
directory (as in MaxText), or a config file:

    checkpoints/99            the state of that checkpoint
    checkpoints               the state of the latest committed checkpoint
    output/run_name           the same, in output/run_name/checkpoints
    config.json               the state in its checkpoint_dir, or else the start of the run

Inspection is read-only: nothing is written next to the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import types
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from maxtext_olmo import errors
from maxtext_olmo.loader import history_file
from maxtext_olmo.loader import iterator as iterator_lib
from maxtext_olmo.loader import registry
from maxtext_olmo.loader import resume
from maxtext_olmo.loader import run_config
from maxtext_olmo.loader import state_format
from maxtext_olmo.order import timeline as timeline_lib

_BELOW = ("checkpoints", "checkpoint")


@dataclasses.dataclass(frozen=True)
class Run:
  """A run, as far as its files describe it.

  Attributes:
    path: The path that named the run.
    config: The data config as a dict; None if unknown.
    checkpoint_dir: Directory of the checkpoints; empty if there is none.
    label: The label (step) of the checkpoint to inspect; None if there is no checkpoint.
    state: The data state of that checkpoint; None if there is none.
    steps: The number of steps of the whole run; None if unknown.
  """

  path: str
  config: dict[str, Any] | None
  checkpoint_dir: str = ""
  label: int | None = None
  state: dict[str, Any] | None = None
  steps: int | None = None

  def parsed(self) -> tuple[int, int, timeline_lib.Timeline] | None:
    """Returns the step, the position and the history of the state; None if there is no state."""
    return None if self.state is None else state_format.parse_state(self.state)


def find_run(
    path: str, *, config: Mapping[str, Any] | None = None, label: int | None = None
) -> Run:
  """Returns the run that a path names.

  Args:
    path: A checkpoint, a directory with checkpoints, or the parent of such a directory.
    config: The run's data config; by default, the one kept next to its checkpoints.
    label: The label of the checkpoint; by default, the one that the path names, or the latest.
  """
  directory = epath.Path(path if "://" in path else os.path.abspath(path))
  if not directory.exists():
    raise errors.ConfigError(
        f"{path} does not exist. Give a checkpoint, a directory with checkpoints, or a config file."
    )
  if directory.name.isdigit() and resume.is_committed(directory):
    directory, label = directory.parent, int(directory.name) if label is None else label
  else:
    above = [directory, *(directory / name for name in _BELOW)]
    directory = next(
        (d for d in above if resume.committed_steps(d)),
        next((d for d in above if run_config.load(str(d)) is not None), directory),
    )
  if config is None:
    config = run_config.load(str(directory))
  if label is None:
    label = resume.latest_committed_step(directory)
  if label is None and config is None:
    raise errors.ConfigError(
        f"{path} has no committed checkpoint and no olmo_run/config.json, so it is not the"
        " directory of a run. Give the directory that has the checkpoints, or a config file."
    )
  state = None
  if label is not None:
    if not any(resume.is_committed(directory / name) for name in (str(label), f"{label:08d}")):
      raise errors.ConfigError(f"{directory} has no committed checkpoint {label}.")
    state = resume.saved_state(str(directory), label)
    if state is None:
      state = history_file.state_at(str(directory), _steps_done(directory, label))
  return Run(path, None if config is None else dict(config), str(directory), label, state)


def run_of_config(
    path: str, config: Mapping[str, Any], label: int | None = None, steps: int | None = None
) -> Run:
  """Returns the run of a config, with the state of its latest checkpoint if it has one."""
  directory = str(config.get("checkpoint_dir") or "")
  if directory and (label is not None or resume.latest_committed_step(directory) is not None):
    found = find_run(directory, config=config, label=label)
    return dataclasses.replace(found, path=path, steps=steps)
  return Run(path, dict(config), steps=steps)


@contextlib.contextmanager
def open_iterator(run: Run) -> Iterator[iterator_lib.BatchIterator]:
  """Opens the run's train iterator at its state, on one CPU device; the run itself is not touched.

  Raises:
    ConfigError: The config is unknown, or its rows cannot be addressed by position.
    ResumeError: The state and the config belong to different streams.
  """
  if run.config is None:
    raise errors.ConfigError(
        f"The config of {run.path} is unknown: its directory has no olmo_run/config.json, perhaps"
        " because the run used an earlier release. Give a config file with --config."
    )
  values: dict[str, Any] = {
      **run.config,
      "enable_checkpointing": False,
      "checkpoint_dir": "",
      "eval_interval": -1,
      "data_sharding": (),
      "grain_worker_count": 0,
  }
  if run.state is not None:
    values |= {"initial_step": 0, "olmo_initial_position": -1}
  mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:1]), ("data",))
  train, _ = registry.create_data_iterator(types.SimpleNamespace(**values), mesh)
  with contextlib.closing(train):  # type: ignore[type-var]
    if not isinstance(train, iterator_lib.BatchIterator):
      raise errors.ConfigError(
          f"dataset_type={values.get('dataset_type')!r} with this packing streams its rows, so a"
          " step cannot be found without replaying the run. Only rows that are addressed by"
          " position can be inspected, such as those of olmo_packing='planned'."
      )
    if run.state is not None:
      train.set_state(run.state)
    elif run.label is not None:
      # Without a data state, the run is at the step of the checkpoint or, if that comes later, at
      # the step where the config starts the run.
      train.go_to(max(_steps_done(epath.Path(run.checkpoint_dir), run.label), train.step))
    yield train


def _steps_done(directory: epath.Path, label: int) -> int:
  """Returns the number of steps that had been done when a checkpoint was saved."""
  # Tunix, which MaxText uses for fine-tuning, labels checkpoints with the number of steps done. Its
  # checkpoints have an item `model_params`.
  return label if (directory / str(label) / "model_params").exists() else label + 1


def exclusion_names(run: Run, iterator: iterator_lib.BatchIterator) -> dict[str, str]:
  """Returns the path in olmo_exclude, keyed by the digest of the exclusions; empty if unknown."""
  digest = iterator.history.present.content.get("exclude")
  path = (run.config or {}).get("olmo_exclude")
  return {str(digest): str(path)} if digest and path else {}
