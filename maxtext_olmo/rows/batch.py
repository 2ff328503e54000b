"""From tokens to what a trainer takes: inputs, targets, positions and segmentations.

A row keeps its full length, since attention kernels want round ones: the target of a token is the
token after it, and the last one, which has none, gets the target 0 and is masked. The loss counts
where `targets_segmentation` is not 0.

    tokens                 5  6  0  7  8                  the same with eos_id=0
    inputs                 5  6  0  7  8                  5  6  0  7  8
    targets                6  0  7  8  0                  6  0  7  8  0
    inputs_position        0  1  2  3  4                  0  1  2  0  1
    targets_position       0  1  2  3  4                  0  1  2  0  1
    inputs_segmentation    1  1  1  1  1                  1  1  1  2  2
    targets_segmentation   1  1  1  1  0                  1  1  2  2  0

A row that the repetition filter rejects has `targets_segmentation` all 0; in a padding row
everything is 0.
"""

from __future__ import annotations

from typing import Any

import grain
import numpy as np

from maxtext_olmo.errors import CorpusError
from maxtext_olmo.rows import segments as segments_lib

_INT32 = np.iinfo(np.int32)


def make_rows(
    tokens: np.ndarray,
    keep: np.ndarray | None,
    *,
    real: np.ndarray | None = None,
    eos_id: int | None = None,
) -> dict[str, np.ndarray]:
  """Six int32 arrays (n, L) for a whole batch of windows.

  `tokens` is never changed, but `inputs` may share its memory, and where all rows of an array are
  the same they are read-only views of one: copy before writing.

  Args:
    tokens: Token ids (n, L), of any integer dtype.
    keep: The filter's verdict (n,), False where a row is rejected; None keeps all.
    real: False where a row is padding (n,); None where none is.
    eos_id: Ends a document; segments and positions then follow the documents.
  """
  tokens = np.asarray(tokens)
  if tokens.ndim != 2:
    raise ValueError(f"Expected tokens of shape (rows, tokens), found {tokens.shape}.")
  tokens = _as_int32(tokens)
  n, length = tokens.shape
  keep = _flags("keep", keep, n)
  real = _flags("real", real, n)

  inputs = tokens
  targets = np.zeros((n, length), np.int32)
  targets[:, :-1] = tokens[:, 1:]
  if eos_id is None:
    position = _every_row(np.arange(length, dtype=np.int32), n)
    segments = _every_row(np.ones(length, np.int32), n)
  else:
    position = segments_lib.positions(tokens, eos_id)
    segments = segments_lib.segment_ids(tokens, eos_id)

  scored = keep & real
  if eos_id is None and scored.all():
    target_segments = np.ones(length, np.int32)
    target_segments[-1:] = 0
    target_segments = _every_row(target_segments, n)
  else:
    target_segments = np.zeros((n, length), np.int32)
    np.multiply(segments[:, 1:], scored[:, np.newaxis], out=target_segments[:, :-1])

  if not real.all():
    inputs, targets, position, segments = (
        np.where(real[:, np.newaxis], rows, np.int32(0))
        for rows in (inputs, targets, position, segments)
    )
  return {
      "inputs": inputs,
      "targets": targets,
      "inputs_position": position,
      "targets_position": position,
      "inputs_segmentation": segments,
      "targets_segmentation": target_segments,
  }


class ShiftToInputsTargets(grain.transforms.Map):
  """Turns a record's `tokens`, and `instance_mask` if there is one, into the six arrays of a row.

  Everything else in the record is left behind, and the arrays share no memory with it.
  """

  def __init__(self, *, eos_id: int | None = None):
    self._eos_id = eos_id

  def map(self, element: dict[str, Any]) -> dict[str, np.ndarray]:
    tokens = np.asarray(element["tokens"])
    if tokens.ndim != 1:
      raise ValueError(f"Expected a record with 1-D tokens, found shape {tokens.shape}.")
    keep = np.array([bool(element.get("instance_mask", True))])
    rows = make_rows(tokens[np.newaxis], keep, eos_id=self._eos_id)
    return {name: values[0].copy() for name, values in rows.items()}

  def __repr__(self) -> str:
    return f"ShiftToInputsTargets(eos_id={self._eos_id})"


def _as_int32(tokens: np.ndarray) -> np.ndarray:
  """The same ids as int32, without a copy where the bytes are the same."""
  if not np.issubdtype(tokens.dtype, np.integer):
    raise CorpusError(f"Token ids must be integers, found an array of {tokens.dtype}.")
  if np.can_cast(tokens.dtype, np.int32):
    return tokens.astype(np.int32, copy=False)
  if tokens.size and (tokens.max() > _INT32.max or tokens.min() < _INT32.min):
    row, column = np.argwhere((tokens > _INT32.max) | (tokens < _INT32.min))[0]
    raise CorpusError(
        f"Token id {tokens[row, column]} in row {row}, column {column} does not fit int32: expected"
        f" ids below 2**31 = {2**31}. No vocabulary is that large: check that the index has the"
        " dtype the files were written with (`maxtext-olmo verify`)."
    )
  if tokens.dtype == np.uint32:
    return tokens.view(np.int32)
  return tokens.astype(np.int32)


def _flags(name: str, flags: np.ndarray | None, n: int) -> np.ndarray:
  if flags is None:
    return np.ones(n, np.bool_)
  flags = np.asarray(flags)
  if flags.dtype != np.bool_ or flags.shape != (n,):
    raise ValueError(f"{name}: expected bool ({n},), found {flags.dtype} {flags.shape}.")
  return flags


def _every_row(row: np.ndarray, n: int) -> np.ndarray:
  return np.broadcast_to(row, (n, row.size))
