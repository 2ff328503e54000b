"""Trainers: the embedded one (`tiny`), and MaxText's (`maxtext`)."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
  """Keeps `from maxtext_olmo.trainers import config` working, which users' config files have."""
  if name == "config":
    return importlib.import_module("maxtext_olmo.trainers.tiny.config")
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
