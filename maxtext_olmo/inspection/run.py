"""A run to ask about: its checkpoint's data state, its config, and an iterator that explains it.

A run is named by a checkpoint, by the directory of its checkpoints (or one above it, as MaxText has
it), or by a config file:

    checkpoints/99            the state of that checkpoint
    checkpoints               the state of the latest committed one
    output/run_name           the same, in output/run_name/checkpoints
    config.json               no state unless its checkpoint_dir has one: a run that has not begun

Everything is read only: nothing is written next to the run.
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
from maxtext_olmo.loader import state as state_lib
from maxtext_olmo.order import timeline as timeline_lib

_BELOW = ("checkpoints", "checkpoint")


@dataclasses.dataclass(frozen=True)
class Run:
  """A run, as far as it has left traces.

  Attributes:
    path: What it was named by.
    config: Its data config, by key; None if it is not known.
    checkpoint_dir: Where its checkpoints are; empty if it has none.
    label: The checkpoint that is asked about; None if there is none.
    state: The data state in it.
    steps: The steps of the whole run; None if they are not known.
  """

  path: str
  config: dict[str, Any] | None
  checkpoint_dir: str = ""
  label: int | None = None
  state: dict[str, Any] | None = None
  steps: int | None = None

  def parsed(self) -> tuple[int, int, timeline_lib.Timeline] | None:
    """Returns the step, the position and the history of the state; None if there is no state."""
    return None if self.state is None else state_lib.parse_state(self.state)


def find_run(
    path: str, *, config: Mapping[str, Any] | None = None, label: int | None = None
) -> Run:
  """Returns the run that a path names.

  Args:
    path: A checkpoint, a directory with checkpoints, or the directory above.
    config: The run's data config; by default, the one kept next to its checkpoints.
    label: Which checkpoint; by default the one that the path names, or the latest.
  """
  directory = epath.Path(path if "://" in path else os.path.abspath(path))
  if not directory.exists():
    raise errors.ConfigError(f"{path} does not exist: name a checkpoint, a directory or a config.")
  if directory.name.isdigit() and resume.is_committed(directory):
    directory, label = directory.parent, int(directory.name) if label is None else label
  else:
    above = [directory, *(directory / name for name in _BELOW)]
    directory = next(
        (d for d in above if resume.latest_committed_step(d) is not None),
        next((d for d in above if run_config.load(str(d)) is not None), directory),
    )
  if config is None:
    config = run_config.load(str(directory))
  latest = resume.latest_committed_step(directory)
  if label is None:
    label = latest
  if label is None and config is None:
    raise errors.ConfigError(
        f"{path} has no committed checkpoint and no olmo_run/config.json, so it is not the"
        " directory of a run. Name the directory that has the checkpoints, or a config file."
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
  """Opens the run's train iterator at its state, on one CPU device; the run is left alone.

  Raises:
    ConfigError: The config is not known, or its rows cannot be addressed by position.
    ResumeError: The state belongs to another stream than the config.
  """
  if run.config is None:
    raise errors.ConfigError(
        f"The config of {run.path} is not known: its directory has no olmo_run/config.json,"
        " because an earlier release wrote it. Name a config file with --config."
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
          " step cannot be found without replaying the run. olmo_packing='planned' can."
      )
    if run.state is not None:
      train.set_state(run.state)
    elif run.label is not None:
      # Where the config begins the data does not matter for a run that has gone further.
      train.go_to(max(_steps_done(epath.Path(run.checkpoint_dir), run.label), train.step))
    yield train


def _steps_done(directory: epath.Path, label: int) -> int:
  """Returns the steps that a checkpoint's model has done."""
  # Tunix, which fine-tunes for MaxText, counts from 1, and names its items differently.
  return label if (directory / str(label) / "model_params").exists() else label + 1
