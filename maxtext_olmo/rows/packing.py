"""Packing documents into rows: the choices, Grain's packers, and the packer of planned rows.

    documents of 5, 3, 6 and 2 tokens in rows of 8

    first_fit           |5 5 5 5 5 3 3 3|  |6 6 6 6 6 6 2 2|     the first row with room
    best_fit            the row with the least room that suffices; the same here
    concat_then_split   one long line cut every 8 tokens: no padding, but documents are cut too
    planned             best fit over a window of documents, longest first: any row at once (`plan`)

The first three are Grain's, and stream: a row depends on all documents before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grain
import numpy as np

from maxtext_olmo import compiled
from maxtext_olmo.errors import ConfigError

STREAMING = ("first_fit", "best_fit", "concat_then_split")
PACKINGS = (*STREAMING, "planned")
LONG_DOCUMENTS = ("error", "truncate", "split")

_SIDES = ("inputs", "targets")
_MASK = "_mask"
# How many pieces are packed before compiling is worth a second of another core.
_COMPILE_AFTER_PIECES = 20_000


def check_long_documents(choice: str) -> None:
  """Raises ConfigError unless `choice` is one of `LONG_DOCUMENTS`."""
  if choice not in LONG_DOCUMENTS:
    raise ConfigError(
        f"long_documents={choice!r} is unknown; known are {', '.join(LONG_DOCUMENTS)}."
    )


def best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
  """Packs pieces into bins, the longest first, each into the bin it fills best.

  Returns:
    The bin of each piece, and the number of bins.
  """
  lengths = np.asarray(lengths, np.int64)
  if lengths.size and not (lengths.min() > 0 and lengths.max() <= capacity):
    raise ConfigError(
        f"Pieces of 1 to {capacity} tokens can be packed, found {lengths.min()} to {lengths.max()}."
    )
  order = np.argsort(-lengths, kind="stable")
  bins = np.empty(len(lengths), np.int64)
  found = np.empty(len(lengths), np.int64)
  pack = _COMPILED.get(len(lengths)) or _best_fit
  count = pack(lengths[order], capacity, found)
  bins[order] = found
  return bins, count


def compile_best_fit() -> bool:
  """Waits until best fit is compiled; False where Python must do without it."""
  return _COMPILED.wait()


def _best_fit(lengths: np.ndarray, capacity: int, bins: np.ndarray) -> int:
  """Packs pieces in the given order.

  Bins with equal room are on one stack, and the bits of an integer say which stacks are not empty,
  so the best bin is found with a shift.
  """
  stacks: list[list[int]] = [[] for _ in range(capacity + 1)]
  rooms = 0  # Bit r: some bin has room for r tokens.
  count = 0
  for piece, length in enumerate(lengths.tolist()):
    fitting = rooms >> length
    if fitting:
      space = length + (fitting & -fitting).bit_length() - 1
      stack = stacks[space]
      number = stack.pop()
      if not stack:
        rooms ^= 1 << space
    else:
      space, number = capacity, count
      count += 1
    bins[piece] = number
    rest = space - length
    if rest:
      stacks[rest].append(number)
      rooms |= 1 << rest
  return count


def _build() -> Callable[[np.ndarray, int, np.ndarray], int]:
  from maxtext_olmo.rows import kernel

  return kernel.build_best_fit()


_COMPILED = compiled.Background(_build, after=_COMPILE_AFTER_PIECES, what="Best-fit packing")


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
  """Rows of documents, packed by Grain, as the six arrays of a row before the shift.

  Args:
    documents: Records as `grain_llm.records` makes them, none longer than `length` unless it is
      concat_then_split.
    bins: Rows that are filled at a time.
    shuffle: Whether rows that were filled together come in random order.
    masks: The sides whose records have a segmentation of their own.
  """
  features = (*_SIDES, *(f"{side}{_MASK}" for side in masks))
  lengths = dict.fromkeys(features, length)
  documents = documents.filter(_has_tokens).map(_MaskNames(masks))
  if packing == "concat_then_split":
    rows = grain.experimental.ConcatThenSplitIterDataset(documents, length_struct=lengths)
  else:
    packer: Callable[..., grain.IterDataset] = {
        "first_fit": grain.experimental.FirstFitPackIterDataset,
        "best_fit": grain.experimental.BestFitPackIterDataset,
    }[packing]
    rows = packer(
        documents, length_struct=lengths, num_packing_bins=bins, shuffle_bins=shuffle, seed=seed
    )
  return rows.map(_RowNames(masks))


def _has_tokens(record: dict[str, np.ndarray]) -> bool:
  """An empty document would take a segment number and hold nothing."""
  return len(record["inputs"]) > 0


class _MaskNames(grain.transforms.Map):
  """Renames the segmentations that records have, so that Grain packs them as it packs tokens."""

  def __init__(self, masks: tuple[str, ...]):
    self._masks = masks

  def map(self, element: dict[str, Any]) -> dict[str, Any]:
    record = {side: element[side] for side in _SIDES}
    for side in self._masks:
      record[f"{side}{_MASK}"] = element[f"{side}_segmentation"]
    return record


class _RowNames(grain.transforms.Map):
  """Grain's names of segments and positions → ours; what a record masked stays masked."""

  def __init__(self, masks: tuple[str, ...]):
    self._masks = masks

  def map(self, element: dict[str, Any]) -> dict[str, Any]:
    row = {}
    for side in _SIDES:
      segments = element[f"{side}_segment_ids"]
      if side in self._masks:
        segments = np.where(element[f"{side}{_MASK}"] != 0, segments, 0).astype(np.int32)
      row[side] = element[side]
      row[f"{side}_segmentation"] = segments
      row[f"{side}_position"] = element[f"{side}_positions"]
    return row
