"""Reads JSON objects field by field, so that every field is either used or reported.

reader = Reader()
section = reader.section("data_loader", values)
seed = section.take("seed", int)
section.end()                                  # Reports the fields that were not taken.
reader.raise_problems("config.json cannot be imported")
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from maxtext_olmo import errors


class Reader:
  """Reads typed fields from JSON objects; collects all problems, so that one error reports them."""

  def __init__(self) -> None:
    self.problems: list[str] = []
    self.no_effect: list[str] = []

  def section(self, where: str, values: Any, no_effect: Collection[str] = ()) -> Section:
    """Returns a section that reads the fields of an object.

    Args:
      where: Name of the object, for messages.
      values: The object.
      no_effect: Fields that may be present but do not affect the data.
    """
    if not isinstance(values, dict):
      self.problems.append(f"{where} is missing or not an object.")
      values = {}
    return Section(self, where, dict(values), no_effect)

  def raise_problems(self, what: str) -> None:
    """Raises ConfigError with all problems, if there are any."""
    if self.problems:
      listed = "\n".join(f"  - {problem}" for problem in self.problems)
      raise errors.ConfigError(f"{what}:\n{listed}")


class Section:
  """An object of the config: fields are taken one by one, and none may be left at the end."""

  def __init__(
      self, reader: Reader, where: str, values: dict[str, Any], no_effect: Collection[str]
  ):
    self._reader = reader
    self._where = where
    self._values = values
    self._no_effect = no_effect
    self.name = str(values.pop("_CLASS_", "")).rpartition(".")[2]

  def take(self, field: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
    """Removes a field and returns its value, or the default if it is missing or null.

    A missing field without a default is a problem, and so is a value of the wrong type.
    """
    kinds = kind if isinstance(kind, tuple) else (kind,)
    value = self._values.pop(field, None)
    if value is None:
      if default is ...:
        self.refuse(f"{self._where}.{field} is missing.")
    elif not isinstance(value, kinds) or (isinstance(value, bool) and kind is not bool):
      self.refuse(f"{self._where}.{field} cannot be {value!r}.")
    else:
      return value
    return kinds[0]() if default is ... else default

  def take_texts(self, field: str) -> tuple[str, ...] | None:
    """Removes a field and returns its list of strings; None if it is missing."""
    values = self.take(field, (list, tuple), None)
    if values is not None and not all(isinstance(value, str) for value in values):
      self.refuse(f"{self._where}.{field} is not a list of texts.")
      values = ()
    return None if values is None else tuple(values)

  def refuse(self, problem: str) -> None:
    """Adds a problem for `Reader.raise_problems` to report."""
    self._reader.problems.append(problem)

  def end(self) -> None:
    """Records the remaining fields that have no effect, and adds a problem for each other one."""
    for field, value in self._values.items():
      if field in self._no_effect:
        if value is not None:
          self._reader.no_effect.append(f"{self._where}.{field}")
      else:
        self.refuse(
            f"{self._where}.{field}={value!r} is not known, and it might change the data. If it"
            " does not, remove it from the config."
        )
