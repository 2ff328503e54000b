"""The losses that a trainer logged, and the steps at which they jump.

`read_losses` reads JSON lines, CSV, and the event files of TensorBoard, which MaxText writes. If a
step was logged several times, because the run went back to a checkpoint, the last value counts.

A spike is a step whose loss stands out from the steps before it: its robust z-score, the distance
from their median in units of their median absolute deviation, exceeds a threshold. Medians, because
a spike must not hide the next one. Steps that spike one after another, or nearly so, are one spike:

    loss    2.1  2.0  2.1  6.3  4.8  2.2  2.0
    spike                  ---------             steps 3 to 4, the highest at step 3
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from maxtext_olmo import errors
from maxtext_olmo.corpus.storage import LocalStorage
from maxtext_olmo.corpus.storage import Storage

WINDOW = 100
THRESHOLD = 6.0
# Steps that spike with at most this many calm steps in between belong together.
_CALM = 2
_LEAST_HISTORY = 8
_CHUNK = 1 << 14
_EVENTS = "tfevents"
_STEP_NAMES = ("step", "_step", "global_step", "iteration")  # In any case: W&B exports a `Step`.


@dataclasses.dataclass(frozen=True, eq=False)
class Losses:
  """The loss of each logged step.

  Attributes:
    steps: Ascending (int64).
    values: The loss after each (float64).
    name: What the log calls them.
    positions: The position that the log gives some of the steps.
  """

  steps: np.ndarray
  values: np.ndarray
  name: str
  positions: Mapping[int, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Spike:
  """Consecutive steps whose loss stands out.

  Attributes:
    first: The first step.
    last: The last step.
    peak: The step with the highest score.
    loss: The loss at the peak.
    usual: The median loss of the steps before.
    score: The robust z-score at the peak.
  """

  first: int
  last: int
  peak: int
  loss: float
  usual: float
  score: float


def read_losses(path: str, *, name: str = "", storage: Storage | None = None) -> Losses:
  """Reads the losses of a log.

  Args:
    path: A file of JSON lines, CSV or TensorBoard events, or a directory of event files.
    name: What the log calls the loss; by default `loss`, or the one name that ends with it.
    storage: Where the log is read from; local files unless given.

  Raises:
    ConfigError: The file holds no losses, or several and none was chosen.
  """
  storage = LocalStorage() if storage is None else storage
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
    records = csv.DictReader(io.StringIO(_text(path, storage)))
  else:
    records = _read_json_lines(path, storage)
  return _losses(path, records, name)


def _losses(path: str, records: Iterable[dict], name: str) -> Losses:
  found: dict[str, dict[int, float]] = {}
  positions: dict[int, int] = {}
  others: set[str] = set()
  for record in records:
    named = {key.lower(): value for key, value in record.items() if isinstance(key, str)}
    step = next((_number(named[key]) for key in _STEP_NAMES if key in named), None)
    if step is None or not math.isfinite(step) or step != int(step) or step < 0:
      continue
    position = _number(named.get("position"))
    if position is not None and math.isfinite(position):
      positions[int(step)] = int(position)
    for key, value in record.items():
      number = _number(value)
      if not isinstance(key, str) or number is None:
        continue
      if key == name or key.lower().endswith("loss"):
        found.setdefault(key, {})[int(step)] = number
      elif key.lower() not in _STEP_NAMES:
        others.add(key)
  name = name or _choose(path, found, others)
  if name not in found:
    has = ", ".join(sorted({*found, *others}))
    raise errors.ConfigError(
        f"{path} has no {name!r} with a step; it has {has or 'no numbers with a step'}."
    )
  steps = np.array(sorted(found[name]), np.int64)
  values = np.array([found[name][step] for step in steps.tolist()])
  return Losses(steps, values, name, positions)


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


def find_spikes(
    losses: Losses, *, window: int = WINDOW, threshold: float = THRESHOLD
) -> list[Spike]:
  """Returns the spikes of a run, the highest score first.

  Args:
    window: How many logged steps before a step are its usual losses.
    threshold: The least robust z-score of a spike; losses that are not finite always exceed it.
  """
  usual, scores = _scores(losses.values, window)
  places = np.flatnonzero(scores > threshold)
  spikes = []
  for group in np.split(places, np.flatnonzero(np.diff(places) > _CALM + 1) + 1):
    if len(group):
      peak = group[np.argmax(scores[group])]
      spikes.append(
          Spike(
              first=int(losses.steps[group[0]]),
              last=int(losses.steps[group[-1]]),
              peak=int(losses.steps[peak]),
              loss=float(losses.values[peak]),
              usual=float(usual[peak]),
              score=float(scores[peak]),
          )
      )
  return sorted(spikes, key=lambda spike: -spike.score)


def _scores(values: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the median of the values before each, and the robust z-score; 0 for the first few."""
  usual, scores = np.zeros(len(values)), np.zeros(len(values))
  padded = np.concatenate([np.full(window, np.nan), np.where(np.isfinite(values), values, np.nan)])
  before = np.lib.stride_tricks.sliding_window_view(padded, window)
  for start in range(min(_LEAST_HISTORY, len(values)), len(values), _CHUNK):
    here = slice(start, min(start + _CHUNK, len(values)))
    known = before[here]
    unknown = np.isnan(known)
    known = np.where(unknown.all(axis=1)[:, None], 0, known)
    middle = np.nanmedian if unknown.any() else np.median  # The former is several times slower.
    median = middle(known, axis=1)
    spread = 1.4826 * middle(np.abs(known - median[:, None]), axis=1)
    # Losses that were logged with few digits may not differ at all.
    spread = np.maximum(np.nan_to_num(spread), 1e-3 * np.abs(median) + 1e-12)
    score = (values[here] - median) / spread
    usual[here] = median
    scores[here] = np.where(np.isfinite(values[here]), score, math.inf)
  return usual, scores


def _text(path: str, storage: Storage) -> str:
  try:
    return storage.read(path).decode()
  except UnicodeDecodeError as error:
    raise errors.ConfigError(
        f"{path} is not text ({error}). Losses are read from JSON lines, CSV (.csv) and event files"
        f" of TensorBoard (*{_EVENTS}*)."
    ) from error


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
  if isinstance(value, (int, float, str)) and not isinstance(value, bool):
    try:
      return float(value)
    except ValueError:
      return None
  return None


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
          f"The event file {path} is damaged before byte {place} ({error})."
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
