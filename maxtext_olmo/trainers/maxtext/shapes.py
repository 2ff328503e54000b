"""Checks the functions of MaxText that this package uses.

MaxText has no plug-in interface, and many people run it from git. So its version does not decide
whether it works: each function that is replaced or called is looked up by name, and must have the
parameters that this package passes or reads. A function that does not fit is named in an error
before anything is changed.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from maxtext_olmo import errors

# The versions that `make test-maxtext` tests. Other versions are accepted with a warning, if their
# functions have the expected parameters.
TRIED = ("0.2.4", "0.2.5")


class Function(NamedTuple):
  """A function or class of MaxText, and the parameters that this package relies on."""

  module: str
  name: str
  parameters: tuple[str, ...]

  def find(self) -> Callable[..., Any]:
    """Returns the function; raises ConfigError if it is missing or lacks one of the parameters."""
    try:
      function = getattr(importlib.import_module(self.module), self.name, None)
    except ModuleNotFoundError as error:
      if not self.module.startswith(str(error.name)):
        raise errors.ConfigError(
            f"MaxText {installed_version()} needs the package {error.name}, which is not installed."
            " docs/guides/maxtext.md has the commands that install MaxText with what it needs."
        ) from error
      function = None
    if not callable(function):
      raise wrong_shape(f"it has no function {self}, which this package needs")
    found = tuple(inspect.signature(function).parameters)
    missing = [name for name in self.parameters if name not in found]
    if missing:
      raise wrong_shape(
          f"{self} takes ({', '.join(found)}), without {', '.join(missing)}, which this package"
          " needs"
      )
    return function

  def __str__(self) -> str:
    return f"{self.module}.{self.name}"


def installed_version() -> str:
  """Returns the installed version of MaxText; raises ConfigError if there is none."""
  try:
    return importlib.metadata.version("maxtext")
  except importlib.metadata.PackageNotFoundError as error:
    raise errors.ConfigError(
        f"MaxText is not installed in {sys.prefix}. It needs Python 3.12; docs/guides/maxtext.md"
        " has the commands that install it."
    ) from error


def wrong_shape(what: str) -> errors.ConfigError:
  """Returns the error for a MaxText that differs from what this package relies on."""
  return errors.ConfigError(
      f"MaxText {installed_version()} does not fit this package: {what}. Tested versions are"
      f" {', '.join(TRIED)}: pip install maxtext=={TRIED[-1]}, or change"
      " maxtext_olmo/trainers/maxtext to fit this version."
  )


def check_keys(config: Any, names: Iterable[str]) -> None:
  """Raises ConfigError if a config of MaxText lacks a key that this package reads."""
  missing = [name for name in names if not hasattr(config, name)]
  if missing:
    raise wrong_shape(
        f"its config has no {', '.join(missing)}. If these are keys of this package, MaxText read"
        " its config before maxtext_olmo.trainers.maxtext.install() ran, or with a function other"
        " than maxtext.configs.pyconfig._initialize_pydantic"
    )
