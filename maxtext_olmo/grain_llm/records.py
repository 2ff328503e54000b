"""Turns records of tokens into rows for a language model: fit, pad or pack, shift, segment.

No function here changes its input. A record has `inputs` (token ids). It may have `targets`
(otherwise the inputs are predicted) and, for each of the two, a segmentation that is 0 for masked
tokens. With EOD = 99, written E, the record 1 2 E 4 5 in a row of 7 becomes

                            shifted left (targets)    shifted right (inputs)
    inputs                  1 2 E 4 5 0 0             E 1 2 E 4 5 0
    targets                 2 E 4 5 0 0 0             1 2 E 4 5 0 0
    inputs_segmentation     1 1 2 2 2 0 0             1 1 1 2 2 0 0
    targets_segmentation    1 1 2 2 0 0 0             1 1 1 2 2 0 0
    inputs_position         0 1 0 1 2 0 0             0 1 2 0 1 0 0

Segment 0 is padding. An EOD in the inputs begins a segment, because the next document is predicted
from it. Padding is identified by its segment, never by its id, so EOD and padding may have the same
id.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from maxtext_olmo import grain_compat
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.rows import segments as segments_lib
from maxtext_olmo.rows.batch import NAMES
from maxtext_olmo.rows.batch import SIDES as SIDES

_INT32 = np.iinfo(np.int32)

Record = dict[str, np.ndarray]


def record_of(element: Mapping[str, Any]) -> Record:
  """Returns the tokens and segmentations of an element as new int32 arrays; drops all else."""
  if not isinstance(element, Mapping) or "inputs" not in element:
    found = sorted(element) if isinstance(element, Mapping) else type(element).__name__
    raise CorpusError(
        f"A record needs token ids under 'inputs', found {found}. TokenFeatures('column') takes"
        " them from a different column."
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
    raise CorpusError(f"The arrays of a record must have equal lengths, found {lengths}.")
  return record


def fit(record: Record, length: int, long_documents: str) -> list[Record]:
  """Returns the record in pieces of at most `length` tokens.

  A longer record is cut (`truncate`), divided (`split`), or raises CorpusError (`error`).
  """
  size = len(record["inputs"])
  if size <= length:
    return [record]
  if long_documents == "error":
    raise CorpusError(
        f"A document has {size} tokens, but a row holds {length}. Set long_documents"
        " (olmo_long_documents in a config): 'truncate' drops the rest, 'split' divides the"
        " document."
    )
  pieces = []
  for start in range(0, size, length):
    pieces.append({name: values[start : start + length] for name, values in record.items()})
    if long_documents == "truncate":
      break
  return pieces


def padded(record: Record, length: int | None) -> Record:
  """Returns the six arrays of a row, padded with 0 to `length`; None does not pad."""
  size = len(record["inputs"])
  row = {}
  for side in SIDES:
    segments = record.get(f"{side}_segmentation", np.ones(size, np.int32))
    row[side] = record[side]
    row[f"{side}_segmentation"] = (segments != 0).astype(np.int32)
    row[f"{side}_position"] = np.arange(size, dtype=np.int32)
  return {name: values[0] for name, values in stack([row], 1, length).items()}


def shifted(rows: Record, direction: str | None, eod_token_id: int) -> Record:
  """Shifts rows (or one row) by one.

  Args:
    rows: The six arrays.
    direction: `left` shifts the targets; `right` shifts the inputs and puts an EOD before them;
      None shifts neither.
    eod_token_id: EOD token.
  """
  rows = dict(rows)
  if direction == "left":
    for name in ("targets", "targets_segmentation"):
      moved = np.zeros_like(rows[name])
      moved[..., :-1] = rows[name][..., 1:]
      rows[name] = moved
  elif direction == "right":
    # The segments of the inputs stay: an EOD belongs to the document that is predicted from it.
    moved = np.full_like(rows["inputs"], eod_token_id)
    moved[..., 1:] = rows["inputs"][..., :-1]
    rows["inputs"] = moved
  return rows


def segmented(row: Record, eod_token_id: int) -> Record:
  """Numbers the documents of a row, which begin at the EODs among the inputs."""
  tokens = row["inputs"][np.newaxis]
  real = row["inputs_segmentation"] != 0
  full = np.array([tokens.size])
  rule = segments_lib.SegmentRule("at_eos", eod_token_id)
  starts = segments_lib.segment_starts(tokens, full, rule) & real
  (documents,), (positions,) = segments_lib.segments_and_positions(starts, full)
  row = dict(row)
  for side in SIDES:
    row[f"{side}_segmentation"] = documents * (row[f"{side}_segmentation"] != 0)
    row[f"{side}_position"] = positions * real
  return row


def to_row(
    record: Record,
    *,
    length: int,
    long_documents: str,
    pad: bool,
    shift: str | None,
    eod_token_id: int,
) -> Record:
  """Turns a record into a row: truncates or pads it, shifts it, and numbers its documents."""
  (record,) = fit(record, length, long_documents)
  row = padded(record, length if pad else None)
  return segmented(shifted(row, shift, eod_token_id), eod_token_id)


class SplitDocuments(grain_compat.FlatMapTransform):
  """Splits or truncates documents that are longer than a row."""

  max_fan_out = 1 << 20

  def __init__(self, length: int, long_documents: str):
    self._length = length
    self._long_documents = long_documents

  def flat_map(self, element: Record) -> list[Record]:
    return fit(element, self._length, self._long_documents)


def pack_stream(
    documents: grain.IterDataset,
    packing: str,
    *,
    length: int,
    bins: int,
    shuffle: bool,
    seed: int,
    masks: tuple[str, ...] = (),
) -> grain.IterDataset:
  """Returns a stream of rows that Grain packs from documents: six arrays per row, not yet shifted.

  Args:
    documents: Records, none longer than `length` unless the packing is concat_then_split.
    packing: One of `packing.STREAMING`.
    length: Tokens per row.
    bins: Rows that are filled at the same time.
    shuffle: Whether rows that were filled together come in random order.
    seed: The seed of that order.
    masks: The sides for which records have their own segmentation.
  """
  lengths = dict.fromkeys((*SIDES, *(f"{side}_mask" for side in masks)), length)
  # An empty document would use up a segment number without holding a token.
  documents = documents.filter(lambda record: len(record["inputs"]) > 0)
  documents = documents.map(functools.partial(_name_masks, masks=masks))
  if packing == "concat_then_split":
    rows = grain_compat.ConcatThenSplitIterDataset(documents, length_struct=lengths)
  else:
    packer: Callable[..., grain.IterDataset] = {
        "first_fit": grain_compat.FirstFitPackIterDataset,
        "best_fit": grain_compat.BestFitPackIterDataset,
    }[packing]
    rows = packer(
        documents, length_struct=lengths, num_packing_bins=bins, shuffle_bins=shuffle, seed=seed
    )
  return rows.map(functools.partial(_name_arrays, masks=masks))


def _name_masks(record: Record, masks: tuple[str, ...]) -> Record:
  """Renames the segmentations of a record, so that Grain packs them like tokens."""
  tokens = {side: record[side] for side in SIDES}
  return tokens | {f"{side}_mask": record[f"{side}_segmentation"] for side in masks}


def _name_arrays(packed: Record, masks: tuple[str, ...]) -> Record:
  """Renames Grain's segments and positions; tokens that a record masks stay masked."""
  row = {}
  for side in SIDES:
    segments = packed[f"{side}_segment_ids"]
    if side in masks:
      segments = np.where(packed[f"{side}_mask"] != 0, segments, 0).astype(np.int32)
    row[side] = packed[side]
    row[f"{side}_segmentation"] = segments
    row[f"{side}_position"] = packed[f"{side}_positions"]
  return row


def row_spec(shape: tuple[int | None, ...]) -> dict[str, grain_compat.ShapeDtypeStruct]:
  """Returns the shape and dtype of the arrays of a row or batch; None is a size that varies."""
  # This is Grain's type, because the type of JAX 0.12 refuses None.
  return {name: grain_compat.ShapeDtypeStruct(shape, np.int32) for name in NAMES}


def stack(rows: Sequence[Record], size: int, length: int | None) -> Record:
  """Stacks rows into arrays of `size` rows, padded to `length` or to the longest row.

  Missing rows are padding.
  """
  batch = {}
  for name in rows[0] if rows else NAMES:
    arrays = [np.asarray(row[name]) for row in rows] or [np.zeros(length or 0, np.int32)]
    shape = tuple(max(sizes) for sizes in zip(*(array.shape for array in arrays)))
    if length is not None and len(shape) == 1:
      if shape[0] > length:
        raise CorpusError(
            f"A row has {shape[0]} tokens, expected {length}; leave apply_padding on, or truncate"
            " the row."
        )
      shape = (length,)
    batch[name] = np.zeros((size, *shape), arrays[0].dtype)
    for number, array in enumerate(arrays[: len(rows)]):
      here: tuple[int | slice, ...] = (number, *(slice(n) for n in array.shape))
      batch[name][here] = array
  return batch


class TokenFeatures(grain.transforms.Map):
  """Takes the `inputs` of a record from a column with a different name.

  >>> TokenFeatures("ids").map({"ids": [5, 6]})
  {'inputs': array([5, 6], dtype=int32)}
  """

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

  With `max_length`, a document of at least that length is truncated to it and gets no EOD.

  >>> AddEndOfDocument(0).map({"inputs": [5, 6]})["inputs"].tolist()
  [5, 6, 0]
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


def collate(arrays: dict[str, np.ndarray], batch_class: type) -> Any:
  """Makes a batch of a class from arrays; drops arrays that are not fields of the class."""
  if batch_class is dict:
    return arrays
  names = {field.name for field in dataclasses.fields(batch_class)}
  return batch_class(**{name: values for name, values in arrays.items() if name in names})
