"""A configuration key: its name, type, default, help and check, and how its value is read.

`config_table` lists all keys with their bounds and choices. `config_checks` finds combinations of
values that cannot work together.
"""

from __future__ import annotations

import dataclasses
import enum
import numbers
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict
from ml_collections import config_dict

from maxtext_olmo.corpus import urls

# Returns "" for a valid value, otherwise what is wrong with it, such as "must be at least 0".
Check = Callable[[Any], str]

GRAIN, DOCUMENTS, PACKED = "olmo_grain", "olmo_documents", "olmo_packed"
PADDED, SYNTHETIC = "olmo_padded", "synthetic"
DATASET_TYPES = (GRAIN, DOCUMENTS, PACKED, PADDED, SYNTHETIC)

# The exceptions that `Kind.read` raises for a value of the wrong type.
WRONG_TYPE = (AttributeError, TypeError, ValueError, OverflowError)


# Upper bounds that no run needs to exceed. Sums of many such values still fit into 64 bits.
_MOST = 2**53
_MOST_TEXT = 4096
MOST_ROWS = 2**24
MOST_TOKENS = 2**32


def at_least(bound: float, most: float = _MOST) -> Check:
  """Returns a check that a value is from `bound` to `most`; only a mistake would exceed `most`."""

  def check(value: float) -> str:
    if value > most:
      return f"must be at most {most}"
    return "" if value >= bound else f"must be at least {bound}"

  return check


def more_than(bound: float) -> Check:
  """Returns a check that a value is greater than `bound`."""
  return lambda value: "" if value > bound else f"must be more than {bound}"


def one_of(*choices: str) -> Check:
  """Returns a check that a value is one of `choices`."""
  return lambda value: "" if value in choices else f"must be one of {', '.join(choices)}"


def some_of(*choices: str) -> Check:
  """Returns a check that every item of a list is one of `choices`."""
  expected = f"may list only {', '.join(choices)}"
  return lambda value: "" if all(item in choices for item in value) else expected


class Kind(NamedTuple):
  """A type of configuration value.

  Attributes:
    description: Name of the type in errors, such as "a number" in "should be a number".
    python_type: Type to declare in configs whose keys have declared types, such as MaxText's.
    read: Function that converts a value to this type, or raises one of `WRONG_TYPE`.
  """

  description: str
  python_type: type
  read: Callable[[Any], Any]


def read_number(value: Any) -> float:
  """Converts an int or float, including NumPy's, to a float."""
  if isinstance(value, bool) or not isinstance(value, numbers.Real):
    raise TypeError(f"{value!r} is not a number.")
  return float(value)


def read_whole_number(value: Any) -> int:
  """Converts an int or a float without a fraction, including NumPy's, to an int."""
  if read_number(value) != int(value) or abs(int(value)) >= 2**64:
    raise ValueError(f"{value!r} is not a whole number below 2**64.")
  return int(value)


def _read_boolean(value: Any) -> bool:
  if not isinstance(value, (bool, np.bool_)):
    raise TypeError(f"{value!r} is not a boolean.")
  return bool(value)


def _read_text(value: Any) -> str:
  text = os.fspath(value.value if isinstance(value, enum.Enum) else value)
  if not isinstance(text, str) or "\0" in text or len(text) > _MOST_TEXT:
    raise TypeError("The value is not text, contains a NUL, or is too long for a path.")
  text.encode()  # Raises for surrogates, which no file system accepts.
  return text


def _read_list(value: Any) -> tuple[Any, ...]:
  if isinstance(value, str) or not isinstance(value, Sequence):
    raise TypeError(f"{value!r} is not a list.")
  return tuple(value)


def show(value: Any) -> str:
  """Returns a value as text for an error message, without credentials and at most 200 characters.

  A longer text is cut, and its length is appended.
  """
  text = urls.redact(repr(value))
  return text if len(text) <= 200 else f"{text[:200]}… ({len(text)} characters)"


BOOLEAN = Kind("true or false", bool, _read_boolean)
TEXT = Kind(f"text of at most {_MOST_TEXT} characters, without NUL", str, _read_text)
TEXTS = Kind("a list of texts", list, lambda value: tuple(map(_read_text, _read_list(value))))
_KINDS = {
    bool: BOOLEAN,
    int: Kind("a whole number below 2**64", int, read_whole_number),
    float: Kind("a number", float, read_number),
    str: TEXT,
    tuple: Kind("a list", list, _read_list),
}


@dataclasses.dataclass(frozen=True)
class Key:
  """A configuration key.

  Attributes:
    name: Name of the key.
    default: Value in a config that does not set the key.
    help: Description of the key, in a sentence or two.
    check: Check of a value that already has the right type; None accepts every value.
    read_by: Dataset types of this package that read the key; not used for a trainer's own keys.
    per_host: Whether the hosts of a run may have different values.
    kind: Type of the value; by default, the type of `default`.
    default_by_type: If `default` is None, the default for each dataset type.
  """

  name: str
  default: Any
  help: str
  check: Check | None = None
  _: dataclasses.KW_ONLY
  read_by: tuple[str, ...] = DATASET_TYPES
  per_host: bool = False
  kind: Kind = None  # type: ignore[assignment]  # Set in `__post_init__`.
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
    """Returns whether a config sets a value other than the default."""
    value = getattr(config, self.name, None)
    try:
      return value is not None and self.kind.read(value) != self.default
    except WRONG_TYPE:
      return True


def read_values(config: Any, keys: Iterable[Key]) -> tuple[dict[str, Any], dict[str, str]]:
  """Reads keys of a config, with defaults for those that are missing or None.

  Returns:
    The values by name, and the problems by name. A value of the wrong type is replaced by the
    default, so that later checks can still compare all values with each other.
  """
  values: dict[str, Any] = {}
  problems: dict[str, str] = {}
  for key in keys:
    value = getattr(config, key.name, None)
    values[key.name] = key.default
    if value is None:
      continue
    try:
      values[key.name] = without_secrets(key.kind.read(value))
    except WRONG_TYPE:
      problems[key.name] = f"{key.name}={show(value)} should be {key.kind.description}."
      continue
    problem = key.check(values[key.name]) if key.check else ""
    if problem:
      problems[key.name] = f"{key.name}={show(values[key.name])} {problem}."
  return values, problems


def without_secrets(value: Any) -> Any:
  """Removes credentials from the URLs in a value; `urls` remembers them for later requests."""
  if isinstance(value, str):
    return urls.clean_text(value)
  if isinstance(value, Mapping):
    return {key: without_secrets(item) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    items = map(without_secrets, value)
    return list(items) if isinstance(value, list) else tuple(items)
  return value


def make_config(keys: Iterable[Key]) -> ConfigDict:
  """Returns a locked config with the given keys at their defaults."""
  return ConfigDict({key.name: _default(key) for key in keys}).lock()


def _default(key: Key) -> Any:
  # None has no type, and the command line can set only typed keys. A placeholder has a type.
  return config_dict.placeholder(key.kind.python_type) if key.default is None else key.default
