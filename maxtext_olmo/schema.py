"""Checks a saved state against a schema. A mismatch raises a ResumeError that says where it is.

Count(1)          a whole number of at least 1 (and below 2**62)
str, bool, int    a value of that type
dict              an object that contains only JSON values
object            anything
Maybe(x)          x, or null, or missing
[x]               a list of x
(x, y)            a list of two items
{"name": x}       an object with this member; it may have more, written by other releases

check({"step": 5, "anchor": [0, -1]}, {"step": Count(), "anchor": (Count(), Count())})
    → The data state is damaged: 'anchor[1]' is -1, expected a whole number of at least 0. …
"""

from __future__ import annotations

import dataclasses
import reprlib
from typing import Any

from maxtext_olmo import errors

REMEDY = "Restore another checkpoint, or set initial_step or olmo_initial_position."
_JSON = (type(None), bool, int, float, str)


@dataclasses.dataclass(frozen=True)
class Count:
  """A whole number from `least` to 2**62 - 1, which leaves room for arithmetic in int64."""

  least: int = 0


@dataclasses.dataclass(frozen=True)
class Maybe:
  """A value that may be null or missing."""

  schema: Any


def damaged(what: str) -> errors.ResumeError:
  """Returns the error for a damaged state; `what` says what is wrong with it."""
  return errors.ResumeError(f"The data state is damaged: {what}. {REMEDY}")


def show(value: Any) -> str:
  """Returns a short text for any value, even for one whose `repr` fails."""
  try:
    return reprlib.repr(value)
  except (ValueError, RecursionError):  # For example, an integer of thousands of digits.
    return f"a {type(value).__name__}"


def check(value: Any, schema: Any, name: str = "") -> None:
  """Raises ResumeError unless a value has the form that a schema describes.

  Args:
    value: Value to check.
    schema: Schema that it must match.
    name: Location of the value for errors, such as "history[0].step".
  """
  expected = ""
  if isinstance(schema, Maybe):
    if value is not None:
      check(value, schema.schema, name)
  elif isinstance(schema, Count):
    if type(value) is not int or not schema.least <= value < 1 << 62:
      expected = f"a whole number of at least {schema.least}"
  elif schema is dict or isinstance(schema, dict):
    if not isinstance(value, dict):
      expected = "an object"
    elif isinstance(schema, dict):
      _check_members(value, schema, name)
    else:
      _check_json(value, name)
  elif isinstance(schema, (list, tuple)):
    length = len(schema) if isinstance(schema, tuple) else None
    if not isinstance(value, (list, tuple)) or length not in (None, len(value)):
      expected = "a list" if length is None else f"a list of {length} items"
    else:
      for i, item in enumerate(value):
        check(item, schema[i if length else 0], f"{name}[{i}]")
  elif schema is not object and type(value) is not schema:
    expected = {str: "text", bool: "true or false", int: "a whole number"}[schema]
  if expected:
    raise damaged(f"{name!r} is {show(value)}, expected {expected}")


def _check_members(value: dict[str, Any], schemas: dict[str, Any], name: str) -> None:
  for key, schema in schemas.items():
    at = f"{name}.{key}" if name else key
    if key not in value and not isinstance(schema, Maybe):
      raise damaged(f"{at!r} is missing")
    check(value.get(key), schema, at)


def _check_json(value: Any, name: str) -> None:
  if isinstance(value, dict):
    for key, item in value.items():
      _check_json(item, f"{name}.{key}")
  elif isinstance(value, (list, tuple)):
    for i, item in enumerate(value):
      _check_json(item, f"{name}[{i}]")
  elif not isinstance(value, _JSON):
    raise damaged(f"{name!r} is {show(value)}, expected JSON")
