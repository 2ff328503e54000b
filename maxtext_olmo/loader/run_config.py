"""The data config of a run, kept next to its checkpoints, so that the run can be inspected later.

    checkpoint_dir/olmo_run/config.json      the keys that differ from their defaults

Process 0 writes this file whenever the run starts, after the history file. `maxtext-olmo inspect`
reads it. Its presence also shows that a run in this directory took its data from this package.
"""

from __future__ import annotations

import json
import os
from typing import Any

import jax
from etils import epath

from maxtext_olmo import config as config_lib
from maxtext_olmo import errors
from maxtext_olmo.loader import run_files

_FILE = ("olmo_run", "config.json")


def keep(options: config_lib.Options) -> None:
  """Writes the run's config, on process 0; does nothing if the run keeps no checkpoints."""
  if jax.process_index() != 0 or not (options.enable_checkpointing and options.checkpoint_dir):
    return
  defaults = {**config_lib.defaults(), **_derived(options)}
  values = {
      name: _absolute(name, getattr(options, name))
      for name, default in defaults.items()
      # The sharding is not needed to inspect a run, and may be a type that JSON cannot store.
      if getattr(options, name) != default and name != "data_sharding"
  }
  path = epath.Path(options.checkpoint_dir).joinpath(*_FILE)
  text = json.dumps(values, indent=1)
  if _text(path) != text:
    run_files.write(path, text)


def _text(path: epath.Path) -> str:
  """Returns the text of a file, or an empty string if it cannot be read."""
  try:
    return run_files.read(path).decode()
  except (OSError, UnicodeDecodeError):
    return ""


def exists(checkpoint_dir: str | os.PathLike[str]) -> bool:
  """Returns whether `checkpoint_dir` holds the config of a run."""
  return epath.Path(checkpoint_dir).joinpath(*_FILE).exists()


def load(checkpoint_dir: str) -> dict[str, Any] | None:
  """Returns the config of the run in `checkpoint_dir`; None if there is none."""
  path = epath.Path(checkpoint_dir).joinpath(*_FILE)
  if not exists(checkpoint_dir):
    return None
  try:
    values = json.loads(run_files.read(path).decode())
    if not isinstance(values, dict):
      raise ValueError(f"expected a dict, found {type(values).__name__}")
  except (OSError, ValueError, RecursionError) as error:
    raise errors.ConfigError(
        f"The config of the run, {path}, cannot be read: {error}. Give a config file with --config"
        " instead."
    ) from error
  known = config_lib.defaults()  # A later release may have written keys that this one lacks.
  return {name: value for name, value in values.items() if name in known}


def _derived(options: config_lib.Options) -> dict[str, int]:
  """Returns the defaults of those batch sizes that default to the value of another key."""
  return {
      "global_batch_size_to_train_on": options.global_batch_size_to_load,
      "global_batch_size_to_load_eval": options.global_batch_size_to_load,
      "global_batch_size_to_eval_on": options.global_batch_size_to_load_eval,
  }


def _absolute(name: str, value: Any) -> Any:
  if name == "olmo_stages":
    return [{key: _absolute(key, item) for key, item in stage.items()} for stage in value]
  if not isinstance(value, str):
    return value
  is_path = name.endswith(("_path", "_dir", "_exclude")) and value and "://" not in value
  return os.path.abspath(value) if is_path else value
