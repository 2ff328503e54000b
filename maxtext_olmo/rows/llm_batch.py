"""Batches with named fields, as JAX pytrees.

`LLMBatch` holds the six arrays of a batch, of shape (B, L); `LLMIndexedBatch` also says which
request each row answers. They work with NumPy and JAX arrays alike, and pass through `jit`,
`device_put` and `tree.map`. Importing this module starts no JAX backend.

Segmentation 0 is padding, documents count from 1, and the loss counts where `targets_segmentation`
is not 0. A recurrent model starts afresh at document borders. Cutting a batch along the sequence
must not invent any, so the borders of the whole are kept with its parts:

    inputs_segmentation                  1 1 1 2 2 2
    batch.get_document_borders()         1 0 0 1 0 0
    batch[:, 2:].get_document_borders()      0 1 0 0
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

import numpy as np
from jax import tree_util

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
  """Inputs and targets of a language model, (B, L) int32 each."""

  inputs: Array
  targets: Array
  inputs_position: Array
  inputs_segmentation: Array
  targets_position: Array
  targets_segmentation: Array
  # (B, L) bool, or None, which is no leaf, where the segmentation tells.
  _document_borders: Array | None = None

  _ROW_FIELDS: ClassVar[tuple[str, ...]] = ()  # one value per row, (B,)

  def get_document_borders(self) -> Array:
    """True where a token is the first of its document, of the padding, or of the row."""
    if self._document_borders is not None:
      return self._document_borders
    segments = self.inputs_segmentation
    xp = segments.__array_namespace__()
    changes = segments[..., 1:] != segments[..., :-1]
    return xp.concatenate([xp.ones_like(segments[..., :1], dtype=bool), changes], axis=-1)

  def __getitem__(self: _Batch, key: Any) -> _Batch:
    """Indexes every array; of a tuple, an array takes as many parts as it has axes."""
    whole = dataclasses.replace(self, _document_borders=self.get_document_borders())
    return tree_util.tree_map(
        lambda array: array[key[: array.ndim] if isinstance(key, tuple) else key], whole
    )

  @classmethod
  def from_inputs(
      cls: type[_Batch], inputs: Array, targets: Array | None = None, **row_fields: Array
  ) -> _Batch:
    """One document per row; without `targets`, `inputs` are predicted, each from those before.

    Args:
      inputs: Token ids (B, L). Without `targets` they become the targets, and the inputs are the
        same shifted right by one, behind a 0.
      targets: Token ids (B, L).
      **row_fields: The fields of shape (B,), where the class has any.
    """
    xp: Any = inputs.__array_namespace__()
    if targets is None:
      targets = inputs
      inputs = xp.concatenate([xp.zeros_like(inputs[:, :1]), inputs[:, :-1]], axis=1)
    batch_size, length = inputs.shape
    fields: dict[str, Any] = {"inputs": inputs, "targets": targets, **row_fields}
    for side in ("inputs", "targets"):
      position = xp.arange(length, dtype=np.int32)
      fields[f"{side}_position"] = xp.tile(position, (batch_size, 1))
      fields[f"{side}_segmentation"] = xp.ones((batch_size, length), dtype=np.int32)
    return cls(**fields)

  @classmethod
  def get_dtype_struct(cls: type[_Batch], batch_size: int, max_length: int) -> _Batch:
    """Shapes and dtypes of a batch, as `jax.ShapeDtypeStruct`s."""
    import jax

    return tree_util.tree_map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype),
        cls.get_sample(batch_size, max_length),
    )

  @classmethod
  def get_sample(cls: type[_Batch], batch_size: int, max_length: int) -> _Batch:
    """A batch of zeros, in NumPy."""
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
  """A batch that also says which request each row answers, (B,) int32 each."""

  document_idx: Array  # requests count from 1; 0 is a filler row
  sequence_idx: Array  # which part of the request's text

  _ROW_FIELDS: ClassVar[tuple[str, ...]] = ("document_idx", "sequence_idx")
