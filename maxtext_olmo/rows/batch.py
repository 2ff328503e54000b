"""The arrays of a batch: their names, and how they are made from tokens.

A row keeps its full length, because attention kernels prefer round lengths. The target of a token
is the token after it. The last token of a row has no target, so the last column of the targets is
masked. Loss is taken where `targets_segmentation` is not 0.

    tokens                 5  6  0  7  8                  with a new segment after each 0
    inputs                 5  6  0  7  8                  5  6  0  7  8
    targets                6  0  7  8  0                  6  0  7  8  0
    inputs_position        0  1  2  3  4                  0  1  2  0  1
    targets_position       0  1  2  3  4                  0  1  2  0  1
    inputs_segmentation    1  1  1  1  1                  1  1  1  2  2
    targets_segmentation   1  1  1  1  0                  1  1  2  2  0

With a right shift, the tokens are the targets, and the inputs are an EOS followed by all tokens but
the last. If the repetition filter rejects a row, its `targets_segmentation` is all zeros. In a
padding row, all six arrays are zeros.

The devices, or `to_arrays` on the host, make these arrays from the compact batches of the step
dataset:

    tokens    (rows, length) as they are stored in the files
    used      (rows,)        the number of tokens that are not padding
    trained   (rows,)        False if the whole row is masked in the loss
    starts    (rows, words)  optional: one bit per token, set if a segment begins there
    loss      (rows, words)  optional: one bit per token, set if loss is taken on it

Batches with named fields are JAX pytrees. `LLMBatch` holds the six arrays of a batch, of shape (B,
L); `LLMIndexedBatch` also has the request that each row answers. Both work with NumPy and JAX
arrays, and pass through `jit`, `device_put` and `tree.map`. Importing this module initializes no
JAX backend.

Segmentation 0 is padding, and documents count from 1. A recurrent model resets its state at
document borders. Slicing a batch along the sequence must not add borders, so a slice keeps the
borders of the whole batch:

    inputs_segmentation                  1 1 1 2 2 2
    batch.get_document_borders()         1 0 0 1 0 0
    batch[:, 2:].get_document_borders()      0 1 0 0
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

import grain
import numpy as np
from jax import tree_util

from maxtext_olmo.errors import CorpusError
from maxtext_olmo.rows import segments as segments_lib

SIDES = ("inputs", "targets")
NAMES = (
    "inputs",
    "targets",
    "inputs_position",
    "targets_position",
    "inputs_segmentation",
    "targets_segmentation",
)
TARGETS_SEGMENTATION = NAMES[-1]
# Optional arrays of a batch, with one value per row.
EXTRAS = ("row_ids", "labels")
# Names of the values in `cost` of a compact batch, which records the cost of making the batch.
COST = ("order_seconds", "read_seconds", "filter_seconds", "bytes_read", "reads")

_INT32 = np.iinfo(np.int32)


@dataclasses.dataclass(frozen=True)
class Shift:
  """The offset of one token between inputs and targets.

  Attributes:
    direction: `left` shifts the targets, `right` the inputs.
    first_id: First input, if the inputs are shifted.
  """

  direction: str = "left"
  first_id: int = 0


def to_arrays(batch: Mapping[str, np.ndarray], shift: Shift = Shift()) -> dict[str, np.ndarray]:
  """Returns the arrays of a compact batch, made on the host.

  `inputs` may share memory with the tokens, and an array whose rows are all the same may be a
  read-only view of one row: copy before writing.

  Args:
    batch: Compact batch from the step dataset.
    shift: Offset between inputs and targets.
  """
  tokens, used, trained = _as_int32(batch["tokens"]), batch["used"], batch["trained"]
  rows, length = tokens.shape
  full = bool((used == length).all())
  starts, loss = batch.get("starts"), batch.get("loss")
  if starts is None and full:
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
    segments = np.broadcast_to(np.ones(length, np.int32), (rows, length))
  else:
    begins = np.zeros((rows, length), np.bool_)
    if starts is not None:
      begins = segments_lib.unpack_bits(starts, length)
    segments, positions = segments_lib.segments_and_positions(begins, used)
  counted = segments if loss is None else segments * segments_lib.unpack_bits(loss, length)
  target_segments = np.zeros((rows, length), np.int32)
  if shift.direction == "left":
    inputs, targets = tokens, np.zeros((rows, length), np.int32)
    targets[:, :-1] = tokens[:, 1:]
    np.multiply(counted[:, 1:], trained[:, np.newaxis], out=target_segments[:, :-1])
  else:
    targets = tokens
    inputs = np.empty((rows, length), np.int32)
    inputs[:, :1] = shift.first_id
    inputs[:, 1:] = tokens[:, :-1]
    np.multiply(counted, trained[:, np.newaxis], out=target_segments)
  if not full and not used.all():
    inputs, targets = (np.where(used[:, np.newaxis] > 0, a, np.int32(0)) for a in (inputs, targets))
  made = (inputs, targets, positions, positions, segments, target_segments)
  return {
      **dict(zip(NAMES, made)),
      **{name: batch[name] for name in EXTRAS if name in batch},
  }


def make_rows(
    tokens: np.ndarray,
    keep: np.ndarray | None,
    *,
    real: np.ndarray | None = None,
    eos_id: int | None = None,
) -> dict[str, np.ndarray]:
  """Returns the six int32 arrays (n, L) of a batch of windows; does not modify `tokens`.

  Args:
    tokens: Token ids (n, L), of any integer dtype.
    keep: For each row, whether the filter keeps it (n,); None keeps all.
    real: For each row, False if it is padding (n,); None if there are no padding rows.
    eos_id: Token that ends a document. If given, each document is a segment with positions from 0.
  """
  tokens = np.asarray(tokens)
  if tokens.ndim != 2:
    raise ValueError(f"Expected tokens of shape (rows, tokens), found {tokens.shape}.")
  n, length = tokens.shape
  tokens = _as_int32(tokens)
  used = np.where(_flags("real", real, n), length, 0)
  batch = {"tokens": tokens, "used": used, "trained": _flags("keep", keep, n)}
  if eos_id is not None:
    rule = segments_lib.SegmentRule("after_eos", int(eos_id))
    batch["starts"] = segments_lib.pack_bits(segments_lib.segment_starts(tokens, used, rule))
  return to_arrays(batch)


class ShiftToInputsTargets(grain.transforms.Map):
  """Turns a record's `tokens`, and `instance_mask` if present, into the six arrays of a row.

  Drops everything else in the record. The arrays share no memory with the record.

  >>> row = ShiftToInputsTargets().map({"tokens": np.array([5, 6, 7])})
  >>> row["inputs"].tolist(), row["targets"].tolist(), row["targets_segmentation"].tolist()
  ([5, 6, 7], [6, 7, 0], [1, 1, 0])
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
  """Returns token ids as int32, without a copy if they already have 32 bits."""
  if not np.issubdtype(tokens.dtype, np.integer):
    raise CorpusError(f"Token ids must be integers, found an array of {tokens.dtype}.")
  if np.can_cast(tokens.dtype, np.int32):
    return tokens.astype(np.int32, copy=False)
  if tokens.size and (tokens.max() > _INT32.max or tokens.min() < _INT32.min):
    row, column = np.argwhere((tokens > _INT32.max) | (tokens < _INT32.min))[0]
    raise CorpusError(
        f"Token id {tokens[row, column]} in row {row}, column {column} does not fit int32: expected"
        f" ids below 2**31 = {2**31}. No vocabulary is that large: check that the index has the"
        " dtype of the files (`maxtext-olmo verify`)."
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


if TYPE_CHECKING:
  import jax

  Array: TypeAlias = np.ndarray | jax.Array

_Batch = TypeVar("_Batch", bound="LLMBatch")


def _register(cls: type[_Batch]) -> type[_Batch]:
  names = [field.name for field in dataclasses.fields(cls)]
  return tree_util.register_dataclass(cls, data_fields=names, meta_fields=[])


@_register
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LLMBatch:
  """Inputs and targets of a language model, (B, L) int32 each.

  >>> batch = LLMBatch.from_inputs(np.array([[5, 6, 7]]))
  >>> batch.inputs.tolist(), batch.targets.tolist()
  ([[0, 5, 6]], [[5, 6, 7]])
  >>> batch[:, 1:].targets.tolist()
  [[6, 7]]
  """

  inputs: Array
  targets: Array
  inputs_position: Array
  inputs_segmentation: Array
  targets_position: Array
  targets_segmentation: Array
  # (B, L) bool. None, which is not a pytree leaf, means that the segmentation gives the borders.
  _document_borders: Array | None = None

  _ROW_FIELDS: ClassVar[tuple[str, ...]] = ()  # Fields with one value per row, (B,).

  def get_document_borders(self) -> Array:
    """Returns whether each token is the first token of a document, of padding or of the row."""
    if self._document_borders is not None:
      return self._document_borders
    segments = self.inputs_segmentation
    xp = segments.__array_namespace__()
    changes = segments[..., 1:] != segments[..., :-1]
    first = xp.ones_like(segments[..., :1], dtype=bool)
    borders: Array = xp.concatenate([first, changes], axis=-1)
    return borders

  def __getitem__(self: _Batch, key: Any) -> _Batch:
    """Indexes every array with `key`, or with as many items of `key` as the array has axes."""
    whole = dataclasses.replace(self, _document_borders=self.get_document_borders())
    indexed: _Batch = tree_util.tree_map(
        lambda array: array[key[: array.ndim] if isinstance(key, tuple) else key], whole
    )
    return indexed

  @classmethod
  def from_inputs(cls: type[_Batch], inputs: Array, targets: Array | None = None) -> _Batch:
    """Makes a batch with one document per row.

    Args:
      inputs: Token ids (B, L). Without `targets`, these become the targets, and the inputs are the
        same ids shifted right by one, after a 0.
      targets: Token ids (B, L).
    """
    xp: Any = inputs.__array_namespace__()
    if targets is None:
      targets = inputs
      inputs = xp.concatenate([xp.zeros_like(inputs[:, :1]), inputs[:, :-1]], axis=1)
    batch_size, length = inputs.shape
    fields: dict[str, Any] = {"inputs": inputs, "targets": targets}
    for side in ("inputs", "targets"):
      position = xp.arange(length, dtype=np.int32)
      fields[f"{side}_position"] = xp.tile(position, (batch_size, 1))
      fields[f"{side}_segmentation"] = xp.ones((batch_size, length), dtype=np.int32)
    return cls(**fields)

  @classmethod
  def get_dtype_struct(cls: type[_Batch], batch_size: int, max_length: int) -> _Batch:
    """Returns the shapes and dtypes of a batch, as `jax.ShapeDtypeStruct`s."""
    import jax

    made: _Batch = tree_util.tree_map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype),
        cls.get_sample(batch_size, max_length),
    )
    return made

  @classmethod
  def get_sample(cls: type[_Batch], batch_size: int, max_length: int) -> _Batch:
    """Returns a batch of zeros, as NumPy arrays."""
    arrays: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
      if field.name in cls._ROW_FIELDS:
        arrays[field.name] = np.zeros(batch_size, np.int32)
      elif field.name != "_document_borders":
        arrays[field.name] = np.zeros((batch_size, max_length), np.int32)
    return cls(**arrays)


@_register
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LLMIndexedBatch(LLMBatch):
  """A batch that also says which request each row answers, in two int32 arrays (B,).

  >>> batch = LLMIndexedBatch.from_inputs(np.array([[5, 6]]), np.array([1]), np.array([0]))
  >>> batch.document_idx.tolist(), batch.targets.tolist()
  ([1], [[5, 6]])
  """

  document_idx: Array  # Number of the request, from 1; 0 for a filler row.
  sequence_idx: Array  # Number of the part, if the request's text has several parts.

  _ROW_FIELDS: ClassVar[tuple[str, ...]] = ("document_idx", "sequence_idx")

  @classmethod
  def from_inputs(  # type: ignore[override]
      cls: type[_Batch],
      inputs: Array,
      document_idx: Array,
      sequence_idx: Array,
      targets: Array | None = None,
  ) -> _Batch:
    """Makes a batch as `LLMBatch.from_inputs` does, with the request and part of each row."""
    fields = vars(LLMBatch.from_inputs(inputs, targets))
    return cls(**{**fields, "document_idx": document_idx, "sequence_idx": sequence_idx})
