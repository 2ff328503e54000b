"""Reads the files of an OLMo-core checkpoint that describe its data, without torch.

    step1000/config.json           the run's config
    step1000/train/rank0.pt        the trainer's state, including the data loader's

A `.pt` file is a zip archive with a pickle. Only plain values are read from it; all other objects
are replaced by placeholders, so no code from the file runs.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections.abc import Mapping
from typing import Any

from maxtext_olmo import errors
from maxtext_olmo.corpus import paths as paths_lib
from maxtext_olmo.corpus import storage as storage_lib

Source = str | os.PathLike[str] | Mapping[str, Any]

_CONFIG_FILE = "config.json"
_STATE_FILE = "train/rank0.pt"
_CONFIG_EXPECTED = "Expected the config.json that OLMo-core writes to each checkpoint folder."
_STATE_EXPECTED = (
    "Expected a checkpoint folder of OLMo-core, its train/rank0.pt, or the loader's state_dict() as"
    " JSON."
)


def read_config(source: Source) -> tuple[Any, str, str]:
  """Returns the content of a run's config, its name for error messages, and its directory.

  >>> read_config({"dataset": {}})
  ({'dataset': {}}, 'the config', '')

  Args:
    source: Checkpoint folder, its config.json, or the content of that file.
  """
  if isinstance(source, Mapping):
    return dict(source), "the config", ""
  path = _in_folder(source, _CONFIG_FILE)
  content = _parse_json(path, _read(path, _CONFIG_EXPECTED), _CONFIG_EXPECTED)
  return content, path, os.path.dirname(os.path.abspath(path))


def read_state(source: Source) -> tuple[Any, str]:
  """Returns the state of a run's data loader, and its name for error messages.

  >>> read_state({"epoch": 1})
  ({'epoch': 1}, 'the state')

  Args:
    source: Checkpoint folder, its train/rank0.pt, a JSON file, or the content of that file.
  """
  if isinstance(source, Mapping):
    return dict(source), "the state"
  path = _in_folder(source, _STATE_FILE)
  data = _read(path, _STATE_EXPECTED)
  if zipfile.is_zipfile(io.BytesIO(data)):
    return _load_plain_values(path, data), path
  return _parse_json(path, data, _STATE_EXPECTED), path


def _in_folder(source: str | os.PathLike[str], name: str) -> str:
  path = os.fspath(source)
  if not paths_lib.is_url(path) and os.path.isdir(path):
    return os.path.join(path, *name.split("/"))
  return path


def _read(path: str, expected: str) -> bytes:
  data = storage_lib.open_storage().read(path)
  if not data.strip():
    raise errors.ConfigError(f"{path} is empty. {expected}")
  return data


def _parse_json(path: str, data: bytes, expected: str) -> Any:
  try:
    return json.loads(data)
  except (ValueError, RecursionError) as error:
    raise errors.ConfigError(f"{path} is not JSON: {error}. {expected}") from error


class _Placeholder:
  """Stands in for an object that is not a plain value, such as a tensor."""

  def __new__(cls, *unused_args: Any, **unused_kwargs: Any) -> _Placeholder:
    return super().__new__(cls)

  def __init__(self, *unused_args: Any, **unused_kwargs: Any):
    pass

  def __setstate__(self, unused_state: Any) -> None:
    pass

  def __setitem__(self, unused_key: Any, unused_value: Any) -> None:
    pass

  def append(self, unused_value: Any) -> None:
    """Accepts an element, like a list."""

  def extend(self, unused_values: Any) -> None:
    """Accepts elements, like a list."""


class _PlainUnpickler(pickle.Unpickler):
  """Unpickles plain values; never imports a class or calls a function."""

  def find_class(self, unused_module: str, unused_name: str) -> Any:
    return _Placeholder

  def persistent_load(self, unused_id: Any) -> Any:
    return _Placeholder()


def _load_plain_values(path: str, data: bytes) -> Any:
  try:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
      name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
      return _PlainUnpickler(io.BytesIO(archive.read(name))).load()
  except Exception as error:  # A damaged pickle can raise nearly anything.
    raise errors.ConfigError(
        f"{path} was not written by torch.save, or is damaged: {type(error).__name__}: {error}."
        f" {_STATE_EXPECTED}"
    ) from error
