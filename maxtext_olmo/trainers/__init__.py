"""Trainers: the embedded one (`tiny`), and the adapter for MaxText (`maxtext`)."""

import importlib
from typing import Any

# The exit code of a run that SIGTERM has stopped, or of a command that may succeed later: start it
# again. EX_TEMPFAIL of sysexits.h.
RESTART_CODE = 75


def __getattr__(name: str) -> Any:
  """Keeps `from maxtext_olmo.trainers import config` in users' config files working."""
  if name == "config":
    return importlib.import_module("maxtext_olmo.trainers.tiny.config")
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
