"""The losses that a trainer logged.

`read_losses` reads JSON lines, CSV, and the event files of TensorBoard, which MaxText writes. If a
step was logged several times, because the run went back to a checkpoint, the last value counts.
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
_POSITION_NAMES = ("position", "data/position")  # The second is MaxText's.
_STEP_NAMES = ("step", "_step", "global_step", "iteration")  # Case-insensitive: W&B has `Step`.


@dataclasses.dataclass(frozen=True, eq=False)
class Losses:
  """The loss of each logged step.

  Attributes:
    steps: The logged steps, ascending (int64).
    values: The loss of each step (float64).
    name: The name of the loss in the log.
    positions: The positions of those steps for which the log has one.
  """

  steps: np.ndarray
  values: np.ndarray
  name: str
  positions: Mapping[int, int] = dataclasses.field(default_factory=dict)


def read_losses(path: str, *, name: str = "", storage: Storage | None = None) -> Losses:
  """Reads the losses of a log.

  Args:
    path: A file of JSON lines, CSV or TensorBoard events, or a directory of event files.
    name: The name of the loss in the log; by default `loss`, or the only name that ends with it.
    storage: Storage to read the log from; by default, local files.

  Raises:
    ConfigError: The file holds no losses, or several and none was chosen.
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
  found: dict[str, dict[int, float]] = {}
  positions: dict[int, int] = {}
  others: set[str] = set()
  forms: dict[tuple[Any, ...], _Form] = {}  # A log may have millions of records of one form.
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
        found.setdefault(key, {})[step] = number
    if form.position is not None:
      position = _whole_number(record[form.position])
      if position is not None:
        positions[step] = position
  name = name or _choose(path, found, others)
  if name not in found:
    has = ", ".join(sorted({*found, *others}))
    raise errors.ConfigError(
        f"{path} has no {name!r} with a step. Found: {has or 'no numbers with a step'}."
    )
  steps = np.array(sorted(found[name]), np.int64)
  values = np.array([found[name][step] for step in steps.tolist()])
  return Losses(steps, values, name, positions)


class _Form(NamedTuple):
  """The names of the step, loss and position in the records of a log."""

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
      f"{path}: expected records with a `step` and a `loss`; found {has}. If the loss has another"
      " name, give it with --loss-name."
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
  for number, line in enumerate(_text(path, storage).splitlines(), 1):
    if not line.strip():
      continue
    try:
      record = json.loads(line)
    except (ValueError, RecursionError) as error:
      raise errors.ConfigError(
          f"Line {number} of {path} is not JSON ({error}): {line[:80]!r}."
      ) from error
    if isinstance(record, dict):
      yield record


def _number(value: object) -> float | None:
  if type(value) is float:
    return value
  if isinstance(value, (int, float, str)) and not isinstance(value, bool):
    try:
      return float(value)
    except ValueError:
      return None
  return None


def _whole_number(value: object) -> int | None:
  number = _number(value)
  return int(number) if number is not None and number >= 0 and number.is_integer() else None


def _read_events(path: str, storage: Storage) -> Iterator[dict]:
  """Yields the scalars in an event file of TensorBoard.

  A record is its length (8 bytes), a checksum (4), an Event message, and a checksum. A file that is
  being written may end within a record.
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
  # simple_value field 2, tensor field 8, whose first float is in field 5 or the content in field 4.
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
