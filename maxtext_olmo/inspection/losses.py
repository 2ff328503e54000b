"""Reads the losses that a trainer logged.

`read_losses` reads JSON lines, CSV, and TensorBoard event files, which MaxText writes. If a run
went back to a checkpoint and logged a step again, the last value counts.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from maxtext_olmo import errors
from maxtext_olmo.corpus.storage import Storage
from maxtext_olmo.corpus.storage import open_storage

_EVENTS = "tfevents"
_LINES_AT_ONCE = 1000
_POSITION_NAMES = ("position", "data/position")  # The second is MaxText's.
_STEP_NAMES = ("step", "_step", "global_step", "iteration")  # Case-insensitive: W&B has `Step`.


@dataclasses.dataclass(frozen=True, eq=False)
class Losses:
  """The loss of each logged step.

  Attributes:
    steps: The logged steps, ascending (int64).
    values: The loss of each step (float64).
    name: The name of the loss in the log.
    positions: The position of each step, for steps whose position was logged.
  """

  steps: np.ndarray
  values: np.ndarray
  name: str
  positions: Mapping[int, int] = dataclasses.field(default_factory=dict)


def read_losses(path: str, *, name: str = "", storage: Storage | None = None) -> Losses:
  """Reads the losses of a log.

  Args:
    path: A file of JSON lines, CSV or TensorBoard events, or a directory of event files.
    name: The name of the loss in the log; by default `loss`, or the only name ending in `loss`.
    storage: Storage to read the log from; by default, local files.

  Raises:
    ConfigError: The file has no losses, or it has several and `name` does not select one.
    MissingFileError: The file does not exist.
  """
  storage = open_storage() if storage is None else storage
  if os.path.isdir(path):
    files = sorted(
        os.path.join(folder, file)
        for folder, _, found in os.walk(path)
        for file in found
        if _EVENTS in file
    )
    if not files:
      raise errors.ConfigError(f"{path} is a directory without event files of TensorBoard.")
    records: Iterable[dict] = (r for file in files for r in _read_events(file, storage))
  elif _EVENTS in os.path.basename(path):
    records = _read_events(path, storage)
  elif path.endswith(".csv"):
    records = _read_csv(path, storage)
  else:
    records = _read_json_lines(path, storage)
  try:
    return _losses(path, records, name)
  except errors.MissingFileError as error:
    raise errors.MissingFileError(f"The log of losses {path} does not exist.") from error


def _losses(path: str, records: Iterable[dict], name: str) -> Losses:
  found: dict[str, tuple[list[int], list[float]]] = {}  # The steps and values of each loss.
  positions: dict[int, int] = {}
  others: set[str] = set()
  forms: dict[tuple[Any, ...], _Form] = {}  # A cache, keyed by the names of a record's fields.
  for record in records:
    names = tuple(record)
    form = forms.get(names)
    if form is None:
      form = forms[names] = _Form.of(names, name)
      others.update(form.others)
    step = None if form.step is None else _whole_number(record[form.step])
    if step is None:
      continue
    for key in form.losses:
      number = _number(record[key])
      if number is not None:
        if key not in found:
          found[key] = [], []
        found[key][0].append(step)
        found[key][1].append(number)
    if form.position is not None:
      position = _whole_number(record[form.position])
      if position is not None:
        positions[step] = position
  name = name or _choose(path, found, others)
  if name not in found:
    has = ", ".join(sorted({*found, *others}))
    raise errors.ConfigError(
        f"{path} has no record with both a step and {name!r}. Found:"
        f" {has or 'no numbers with a step'}."
    )
  # Reversed, because the last value of a step counts, and `unique` returns the first place.
  steps, places = np.unique(np.array(found[name][0], np.int64)[::-1], return_index=True)
  return Losses(steps, np.array(found[name][1])[::-1][places], name, positions)


class _Form(NamedTuple):
  """The names of the fields that hold the step, the position, the losses and other values."""

  step: str | None
  position: str | None
  losses: tuple[str, ...]
  others: tuple[str, ...]

  @classmethod
  def of(cls, names: Iterable[Any], loss: str) -> _Form:
    names = [name for name in names if isinstance(name, str)]
    lower = {name.lower(): name for name in names}
    step = next((lower[name] for name in _STEP_NAMES if name in lower), None)
    losses = tuple(name for name in names if name == loss or name.lower().endswith("loss"))
    others = tuple(name for name in names if name not in (*losses, step))
    position = next((lower[name] for name in _POSITION_NAMES if name in lower), None)
    return cls(step, position, losses, others if step is not None else ())


def _choose(path: str, found: Iterable[str], others: Iterable[str]) -> str:
  """Returns the name of the training loss."""
  names = [key for key in found if "eval" not in key.lower()]
  for usual in ("loss", "learning/loss"):
    if usual in names:
      return usual
  if len(names) == 1:
    return names[0]
  if names:
    raise errors.ConfigError(
        f"{path} has several losses: {', '.join(sorted(names))}. Choose one with --loss-name."
    )
  has = ", ".join(sorted({*found, *others})) or "no number with a step"
  raise errors.ConfigError(
      f"{path}: expected records with a `step` and a `loss`; found {has}. If the loss has a"
      " different name, give it with --loss-name."
  )


def _text(path: str, storage: Storage) -> str:
  try:
    return storage.read(path).decode()
  except UnicodeDecodeError as error:
    raise errors.ConfigError(
        f"{path} is not text ({error}). Losses are read from JSON lines, CSV (.csv) and event files"
        f" of TensorBoard (*{_EVENTS}*)."
    ) from error


def _read_csv(path: str, storage: Storage) -> Iterator[dict]:
  yield from csv.DictReader(io.StringIO(_text(path, storage)))


def _read_json_lines(path: str, storage: Storage) -> Iterator[dict]:
  lines = _text(path, storage).splitlines()
  for first in range(0, len(lines), _LINES_AT_ONCE):
    yield from _parse_json_lines(path, lines[first : first + _LINES_AT_ONCE], first + 1)


def _parse_json_lines(path: str, lines: list[str], first: int) -> Iterator[dict]:
  """Yields the records in some lines; `first` is the number of the first line."""
  try:
    records = json.loads(f"[{','.join(lines)}]")  # Several times faster than line by line.
  except (ValueError, RecursionError):
    records = []
  if len(records) != len(lines):  # Some lines are blank or are not JSON.
    records = []
    for number, line in enumerate(lines, first):
      if not line.strip():
        continue
      try:
        records.append(json.loads(line))
      except (ValueError, RecursionError) as error:
        raise errors.ConfigError(
            f"Line {number} of {path} is not JSON ({error}): {line[:80]!r}."
        ) from error
  for record in records:
    if isinstance(record, dict):
      yield record


def _number(value: object) -> float | None:
  if type(value) is float:
    return value
  if isinstance(value, (int, float, str)) and not isinstance(value, bool):
    try:
      return float(value)
    except (ValueError, OverflowError):
      return None
  return None


def _whole_number(value: object) -> int | None:
  number = value if type(value) is int else _number(value)
  if number is None or not 0 <= number < 1 << 63:
    return None
  whole = int(number)
  return whole if whole == number else None


def _read_events(path: str, storage: Storage) -> Iterator[dict]:
  """Yields the scalars in an event file of TensorBoard.

  A record consists of its length (8 bytes), a checksum (4 bytes), an Event message, and another
  checksum. If the file is still being written, it may end within a record.
  """
  data = storage.read(path)
  place = 0
  while place + 12 <= len(data):
    (size,) = struct.unpack_from("<Q", data, place)
    if place + 16 + size > len(data):
      return
    event = data[place + 12 : place + 12 + size]
    place += 16 + size
    try:
      yield from _scalars(event)
    except (IndexError, ValueError, struct.error, OverflowError) as error:
      raise errors.ConfigError(
          f"The event file {path} is damaged before byte {place} ({error}). Remove or replace it."
      ) from error


def _scalars(event: bytes) -> Iterator[dict]:
  # Event: step is field 2, summary is field 5. Summary: values are field 1. Value: tag is field 1,
  # simple_value is field 2, tensor is field 8. Tensor: floats are field 5, raw bytes are field 4.
  fields = list(_fields(event))
  step = next((value for number, value in fields if number == 2 and isinstance(value, int)), 0)
  for number, summary in fields:
    if number != 5 or not isinstance(summary, bytes):
      continue
    for inner, value in _fields(summary):
      if inner == 1 and isinstance(value, bytes):
        parts = dict(_fields(value))
        scalar = parts.get(2)
        if scalar is None and isinstance(parts.get(8), bytes):
          tensor = dict(_fields(parts[8]))  # type: ignore[arg-type]
          scalar = tensor.get(5, tensor.get(4))
        tag = parts.get(1)
        if isinstance(tag, bytes) and isinstance(scalar, bytes) and len(scalar) == 4:
          yield {"step": step, tag.decode(errors="replace"): struct.unpack("<f", scalar)[0]}


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
  """Yields the number and the value of each field of a protocol buffer message."""
  place = 0
  while place < len(message):
    key, place = _varint(message, place)
    kind = key & 7
    if kind == 0:
      value, place = _varint(message, place)
      yield key >> 3, value
      continue
    if kind == 2:
      size, place = _varint(message, place)
    elif kind in (1, 5):
      size = 8 if kind == 1 else 4
    else:
      raise ValueError(f"a field of kind {kind}")
    if place + size > len(message):
      raise ValueError(f"a field of {size} bytes at byte {place} of {len(message)}")
    yield key >> 3, message[place : place + size]
    place += size


def _varint(message: bytes, place: int) -> tuple[int, int]:
  value = shift = 0
  while True:
    byte = message[place]
    value |= (byte & 127) << shift
    place, shift = place + 1, shift + 7
    if byte < 128:
      return value, place
