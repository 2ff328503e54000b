"""Writes config files: Python for the tiny trainer, YAML for MaxText, or JSON."""

from __future__ import annotations

import json
import os
import textwrap
from typing import Any

from maxtext_olmo import atomic
from maxtext_olmo import errors

STEP_NOTE = (
    "initial_step stays at its default of -1, so that a restart finds the checkpoints of the new"
    " run. If olmo_initial_position is set, the first step is the one at that position, and `steps`"
    " includes the steps before it."
)
_DIRECTORY_NOTE = (
    "Set checkpoint_dir: without it, no checkpoints are saved, and a restart begins at step 0."
)


def check(path: str) -> None:
  """Raises ConfigError if a file exists at `path`, or if its ending is not that of a config."""
  if os.path.exists(path):
    raise errors.ConfigError(f"{path} exists already; choose another name, or remove the file.")
  if os.path.splitext(path)[1] not in (".py", ".yml", ".yaml", ".json"):
    raise errors.ConfigError(f"{path}: a config is a .py, .yml, .yaml or .json file.")


def write(path: str, values: dict[str, Any], comment: str, title: str) -> None:
  """Writes a config file.

  Args:
    path: Path of the file, which must not exist; its ending decides the format.
    values: Keys and values.
    comment: Text for the reader; omitted from JSON, which has no comments.
    title: A sentence for the first line of a Python file.
  """
  check(path)
  ending = os.path.splitext(path)[1]
  lines = [part for line in comment.splitlines() for part in textwrap.wrap(line, 98) or [""]]
  if ending == ".json":
    text = json.dumps(values, indent=2) + "\n"
  elif ending == ".py":
    command = f"    maxtext-olmo train --config={path} --config.checkpoint_dir=DIRECTORY"
    docstring = "\n".join([title, "", command, "", _DIRECTORY_NOTE, "", *lines, ""])
    escaped = docstring.replace("\\", "\\\\").replace('"', '\\"')  # Paths may contain both.
    text = (
        f'"""{escaped}"""\n\nimport maxtext_olmo\n\n\ndef get_config():\n'
        "  config = maxtext_olmo.get_trainer_config()\n"
        + "".join(f"  config.{name} = {value!r}\n" for name, value in values.items())
        + "  return config\n"
    )
  else:
    keys = [f"{name}: {json.dumps(value)}" for name, value in values.items()]
    text = "\n".join([*(f"# {line}".rstrip() for line in lines), *keys]) + "\n"
  atomic.write_atomically(path, text)
