"""A configuration key: its name, type, default, help and check, and how its value is read."""

from __future__ import annotations

import dataclasses
import enum
import numbers
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

# Says what is wrong with a value, as in "must be at least 0"; empty for a value that is right.
Check = Callable[[Any], str]

GRAIN, DOCUMENTS, SYNTHETIC = DATASET_TYPES = ("olmo_grain", "olmo_documents", "synthetic")

_WRONG_TYPE = (AttributeError, TypeError, ValueError, OverflowError)


def at_least(bound: float) -> Check:
  """Checks a lower bound."""
  return lambda value: "" if value >= bound else f"must be at least {bound}"


def more_than(bound: float) -> Check:
  """Checks an exclusive lower bound."""
  return lambda value: "" if value > bound else f"must be more than {bound}"


def one_of(*choices: str) -> Check:
  """Checks that a value is among some choices."""
  return lambda value: "" if value in choices else f"must be one of {', '.join(choices)}"


def some_of(*choices: str) -> Check:
  """Checks that every item of a list is among some choices."""
  return lambda value: "" if set(value) <= {*choices} else f"may list only {', '.join(choices)}"


class Kind(NamedTuple):
  """A type of value.

  Attributes:
    description: What it is called in an error, as in "should be a whole number".
    python_type: What a config with declared types, such as MaxText's, declares for it.
    read: Converts a value; raises TypeError, ValueError or the like for one of another type.
  """

  description: str
  python_type: type
  read: Callable[[Any], Any]


def read_number(value: Any) -> float:
  """Converts an int or float, NumPy's included, to a float."""
  if isinstance(value, bool) or not isinstance(value, numbers.Real):
    raise TypeError(f"{value!r} is not a number.")
  return float(value)


def read_whole_number(value: Any) -> int:
  """Converts an int, or a float without a fraction, NumPy's included, to an int."""
  if read_number(value) != int(value):
    raise ValueError(f"{value!r} is not a whole number.")
  return int(value)


def _read_boolean(value: Any) -> bool:
  if not isinstance(value, (bool, np.bool_)):
    raise TypeError(f"{value!r} is not a boolean.")
  return bool(value)


def _read_text(value: Any) -> str:
  text = os.fspath(value.value if isinstance(value, enum.Enum) else value)
  if not isinstance(text, str):
    raise TypeError(f"{value!r} is not text.")
  return text


def _read_list(value: Any) -> tuple[Any, ...]:
  if isinstance(value, str) or not isinstance(value, Sequence):
    raise TypeError(f"{value!r} is not a list.")
  return tuple(value)


BOOLEAN = Kind("true or false", bool, _read_boolean)
_KINDS = {
    bool: BOOLEAN,
    int: Kind("a whole number", int, read_whole_number),
    float: Kind("a number", float, read_number),
    str: Kind("text", str, _read_text),
    tuple: Kind("a list", list, _read_list),
}


@dataclasses.dataclass(frozen=True)
class Key:
  """A key.

  Attributes:
    name: Its name.
    default: Its value in a config that does not set it.
    help: What it does, in a sentence or two.
    check: Says what is wrong with a value of the right type.
    read_by: The dataset types of this package that read it; not used for a trainer's own keys.
    per_host: Whether the hosts of a run may have different values.
    kind: The type of its values; unless given, that of the default.
    default_by_type: For a key whose default is None, what that means for each dataset type.
  """

  name: str
  default: Any
  help: str
  check: Check | None = None
  _: dataclasses.KW_ONLY
  read_by: tuple[str, ...] = DATASET_TYPES
  per_host: bool = False
  kind: Kind = None  # type: ignore[assignment]  # Set below.
  default_by_type: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self) -> None:
    if self.kind is None:
      object.__setattr__(self, "kind", _KINDS[type(self.default)])

  @property
  def default_text(self) -> str:
    """The default as Markdown, for help and guides."""
    by_type = [f"`{value!r}` for {name}" for name, value in self.default_by_type.items()]
    return ", ".join(by_type) or f"`{self.default!r}`"

  def is_set(self, config: Any) -> bool:
    """Returns whether a config has another value than the default."""
    value = getattr(config, self.name, None)
    try:
      return value is not None and self.kind.read(value) != self.default
    except _WRONG_TYPE:
      return True


def read_values(config: Any, keys: Iterable[Key]) -> tuple[dict[str, Any], dict[str, str]]:
  """Reads keys of a config, with defaults for those it lacks or has as None.

  Returns:
    The values by name, and the problems by name. A value of the wrong type becomes the default, so
    that values can be compared with each other even if there are problems.
  """
  values: dict[str, Any] = {}
  problems: dict[str, str] = {}
  for key in keys:
    value = getattr(config, key.name, None)
    values[key.name] = key.default
    if value is None:
      continue
    try:
      values[key.name] = key.kind.read(value)
    except _WRONG_TYPE:
      problems[key.name] = f"{key.name}={value!r} should be {key.kind.description}."
      continue
    problem = key.check(values[key.name]) if key.check else ""
    if problem:
      problems[key.name] = f"{key.name}={values[key.name]!r} {problem}."
  return values, problems
