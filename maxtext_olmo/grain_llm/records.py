"""Records of tokens → rows of a language model: fit, pad, shift, segment.

No function here changes its input. A record has `inputs` (token ids). It may have `targets`
(otherwise the inputs are predicted) and, for each of the two, a segmentation that is 0 where
nothing counts. With EOD = 99, written E, the record 1 2 E 4 5 in a row of 7 becomes

                            shifted left (targets)    shifted right (inputs)
    inputs                  1 2 E 4 5 0 0             E 1 2 E 4 5 0
    targets                 2 E 4 5 0 0 0             1 2 E 4 5 0 0
    inputs_segmentation     1 1 2 2 2 0 0             1 1 1 2 2 0 0
    targets_segmentation    1 1 2 2 0 0 0             1 1 1 2 2 0 0
    inputs_position         0 1 0 1 2 0 0             0 1 2 0 1 0 0

Segment 0 is padding. An EOD among the inputs opens a segment: the next document is predicted from
it. Padding is identified by its segment, never by its id, so EOD and padding may be the same id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import grain
import numpy as np

from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError

SIDES = ("inputs", "targets")
_INT32 = np.iinfo(np.int32)

Record = dict[str, np.ndarray]


def record_of(element: Mapping[str, Any]) -> Record:
  """Returns the tokens and segmentations of an element as new int32 arrays; drops all else."""
  if not isinstance(element, Mapping) or "inputs" not in element:
    found = sorted(element) if isinstance(element, Mapping) else type(element).__name__
    raise CorpusError(
        f"A record needs token ids under 'inputs', found {found}. TokenFeatures('column') takes"
        " them from another column."
    )
  record = {"inputs": _int32("inputs", element["inputs"])}
  record["targets"] = (
      _int32("targets", element["targets"]) if "targets" in element else record["inputs"].copy()
  )
  for side in SIDES:
    name = f"{side}_segmentation"
    if name in element:
      record[name] = _int32(name, element[name])
  lengths = {name: len(values) for name, values in record.items()}
  if len(set(lengths.values())) > 1:
    raise CorpusError(f"The arrays of a record must have one length, found {lengths}.")
  return record


def fit(record: Record, length: int, long_documents: str) -> list[Record]:
  """Returns the record in pieces of at most `length` tokens.

  A longer record is cut (`truncate`), divided (`split`), or an error.
  """
  size = len(record["inputs"])
  if size <= length:
    return [record]
  if long_documents == "error":
    raise CorpusError(
        f"A document has {size} tokens, the row {length}. Choose what to do with long ones:"
        " long_documents='truncate' (olmo_long_documents in a config) drops the rest, 'split' gives"
        " it rows of its own."
    )
  pieces = []
  for start in range(0, size, length):
    pieces.append({name: values[start : start + length] for name, values in record.items()})
    if long_documents == "truncate":
      break
  return pieces


def padded(record: Record, length: int | None) -> Record:
  """Returns the six arrays of a row, padded with 0 to `length` (None: as long as the record)."""
  size = len(record["inputs"])
  row = {}
  for side in SIDES:
    segments = record.get(f"{side}_segmentation")
    row[side] = _pad(record[side], length)
    row[f"{side}_segmentation"] = _pad(
        np.ones(size, np.int32) if segments is None else (segments != 0).astype(np.int32), length
    )
    row[f"{side}_position"] = _pad(np.arange(size, dtype=np.int32), length)
  return row


def shifted(rows: Record, *, shift_target: bool, eod_token_id: int) -> Record:
  """Shifts rows (or one row) by one: targets to the left, or inputs to the right after an EOD."""
  rows = dict(rows)
  if shift_target:
    for name in ("targets", "targets_segmentation"):
      moved = np.zeros_like(rows[name])
      moved[..., :-1] = rows[name][..., 1:]
      rows[name] = moved
  else:
    # The segments of the inputs stay: an EOD belongs to the document that is predicted from it.
    moved = np.full_like(rows["inputs"], eod_token_id)
    moved[..., 1:] = rows["inputs"][..., :-1]
    rows["inputs"] = moved
  return rows


def segmented(rows: Record, eod_token_id: int) -> Record:
  """Numbers the documents of rows (or one row), which begin at the EODs among the inputs."""
  rows = dict(rows)
  inputs = rows["inputs"]
  if not inputs.size:
    return rows
  real = rows["inputs_segmentation"] != 0
  opens = (inputs == eod_token_id) & real
  documents = np.cumsum(opens, axis=-1, dtype=np.int32) + (1 - opens[..., :1].astype(np.int32))
  places = np.arange(inputs.shape[-1], dtype=np.int32)
  begun = np.maximum.accumulate(np.where(opens, places, 0), axis=-1)
  position = np.where(real, places - begun, 0).astype(np.int32)
  for side in SIDES:
    segments = rows[f"{side}_segmentation"]
    rows[f"{side}_segmentation"] = np.where(segments != 0, documents, 0).astype(np.int32)
    rows[f"{side}_position"] = position
  return rows


def stack(rows: Sequence[Record], size: int, length: int | None) -> Record:
  """Stacks rows into arrays of `size` rows, padded to `length` or to the longest row.

  Missing rows are padding.
  """
  names = [f"{side}{suffix}" for side in SIDES for suffix in ("", "_position", "_segmentation")]
  if rows:
    names = list(rows[0])
  batch = {}
  for name in names:
    arrays = [np.asarray(row[name]) for row in rows] or [np.zeros(length or 0, np.int32)]
    shape = tuple(max(sizes) for sizes in zip(*(array.shape for array in arrays)))
    if length is not None and len(shape) == 1:
      if shape[0] > length:
        raise CorpusError(
            f"A row has {shape[0]} tokens, expected {length}; leave apply_padding on, or cut it."
        )
      shape = (length,)
    batch[name] = np.zeros((size, *shape), arrays[0].dtype)
    for number, array in enumerate(arrays[: len(rows)]):
      here: tuple[int | slice, ...] = (number, *(slice(n) for n in array.shape))
      batch[name][here] = array
  return batch


class TokenFeatures(grain.transforms.Map):
  """Takes the `inputs` of a record from another column."""

  def __init__(self, column: str):
    self._column = column

  def map(self, element: Mapping[str, Any]) -> Record:
    if self._column not in element:
      raise CorpusError(f"The record has no {self._column!r}, only {sorted(element)}.")
    return {"inputs": _int32(self._column, element[self._column])}

  def __repr__(self) -> str:
    return f"TokenFeatures({self._column!r})"


class AddEndOfDocument(grain.transforms.Map):
  """Appends an EOD to a document that does not end with one.

  With `max_length`, a document of that length or more is cut to it and gets no EOD.
  """

  def __init__(self, eod_token_id: int, max_length: int | None = None):
    if max_length is not None and max_length < 1:
      raise ConfigError(f"max_length must be positive, got {max_length}.")
    self._eod = eod_token_id
    self._max_length = max_length

  def map(self, element: Mapping[str, Any]) -> Record:
    record = record_of(element)
    size = len(record["inputs"])
    if self._max_length is not None and size >= self._max_length:
      return {name: values[: self._max_length] for name, values in record.items()}
    if size and record["inputs"][-1] == self._eod:
      return record
    last = {name: (self._eod if name in SIDES else 1) for name in record}
    return {name: np.append(values, np.int32(last[name])) for name, values in record.items()}

  def __repr__(self) -> str:
    return f"AddEndOfDocument({self._eod}, max_length={self._max_length})"


def _int32(name: str, values: Any) -> np.ndarray:
  array = np.asarray(values)
  if array.size == 0:
    return np.zeros(0, np.int32)
  if array.ndim != 1 or array.dtype.kind not in "iub":
    raise CorpusError(
        f"{name!r} of a record must be a list of integers, found {array.dtype} of shape"
        f" {array.shape}."
    )
  if int(array.max()) > _INT32.max or int(array.min()) < _INT32.min:
    raise CorpusError(f"{name!r} of a record has the id {array.max()}, which does not fit int32.")
  return array.astype(np.int32)


def _pad(values: np.ndarray, length: int | None) -> np.ndarray:
  if length is None or len(values) >= length:
    return values
  row = np.zeros(length, np.int32)
  row[: len(values)] = values
  return row
