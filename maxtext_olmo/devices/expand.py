"""From a compact batch to what a trainer takes, on the devices: only tokens cross.

A batch is six int32 arrays, 24 bytes per token. All of it follows from the tokens and one flag per row:

    tokens  5 7 0 9     inputs    5 7 0 9     position  0 1 2 3     segmentation  1 1 1 1
    flag    trained     targets   7 0 9 0     position  0 1 2 3     segmentation  1 1 1 0

So the tokens cross as they lie in the files, 4 bytes each or 2, the targets are made of them on each device by a program that
runs on that device alone (no process waits for another), and what does not depend on the data is made once and used again.
Where each row's tokens lie on several devices, a device does not see its neighbour's first token, and the host makes all six.

Batches share the arrays that do not depend on the data. A trainer may donate the batch of its step, and the next one gets fresh
arrays; one that keeps an earlier batch while it donates a later one has to copy what it keeps.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_olmo.devices import layout as layout_lib
from maxtext_olmo.devices import segment_bits
from maxtext_olmo.rows import steps

NAMES = (
    "inputs",
    "targets",
    "inputs_position",
    "targets_position",
    "inputs_segmentation",
    "targets_segmentation",
)
_OF_LOSS = "targets_segmentation"


class Placed(NamedTuple):
  """A batch on its way to the devices: the arrays that are its own, and how many bytes crossed for them."""

  arrays: dict[str, jax.Array]
  bytes_crossed: int


class Expander:
  """Compact batches → dicts of six global arrays, for one layout."""

  def __init__(self, layout: layout_lib.BatchLayout, content: steps.Content):
    self._layout = layout
    self._content = content
    self._constants: dict[str, jax.Array] = {}

  def place(self, batch: Mapping[str, np.ndarray]) -> Placed:
    """Sends a batch to the devices and starts what is to be computed there; returns at once."""
    if self._layout.splits_rows:
      made = steps.to_arrays(batch, self._content)
      return Placed(self._layout.place(made), sum(array.nbytes for array in made.values()))
    tokens, flags = _as_device_takes_it(batch["tokens"]), batch["flags"]
    sent = self._layout.send(tokens)
    shards = self._layout.shards(sent)
    crossed = tokens.nbytes
    begins = [self._begins(shard) for shard in shards]
    parts: list[dict[str, jax.Array]]
    if (flags == steps.TRAINED).all():
      parts = [_expand_whole(*shard) for shard in zip(shards, begins)]
    else:
      flag_shards = self._layout.shards(self._layout.send(flags))
      crossed += flags.nbytes
      padded = bool((flags == steps.PADDING).any())
      parts = [_expand(*shard, padded=padded) for shard in zip(shards, begins, flag_shards)]
    arrays = self._layout.join(parts)
    if tokens.dtype == np.int32:
      arrays["inputs"] = sent
    return Placed(arrays, crossed)

  def _begins(self, tokens: jax.Array) -> segment_bits.Begins | None:
    eos_id = self._content.document_eos_id
    return None if eos_id is None else segment_bits.find(tokens, eos_id=eos_id)

  def finish(self, placed: Placed) -> dict[str, jax.Array]:
    """The six arrays of a batch; those that all batches share are made anew once a trainer has donated them."""
    own = placed.arrays
    return {name: own[name] if name in own else self._constant(name) for name in NAMES}

  def _constant(self, name: str) -> jax.Array:
    constant = self._constants.get(name)
    if constant is None or constant.is_deleted():
      rows, length = len(self._layout.rows), self._layout.length
      flags = np.full(rows, steps.TRAINED, np.uint8)
      shards = self._layout.shards(self._layout.send(flags))
      made = [_row_arrays(flag, length) for flag in shards]
      constant = self._layout.join([{name: part[name]} for part in made])[name]
      self._constants[name] = constant
    return constant


def _as_device_takes_it(tokens: np.ndarray) -> np.ndarray:
  if tokens.dtype.itemsize == 4:
    return tokens.view(np.int32)  # The vocabulary check has shown that no id reaches the sign bit.
  return tokens.astype(np.int32) if tokens.dtype.itemsize == 8 else tokens


@functools.partial(jax.jit, static_argnames="length")
def _row_arrays(flags: jax.Array, length: int) -> dict[str, jax.Array]:
  """What depends on the row's flag alone."""
  shape = (flags.shape[0], length)
  real = jnp.broadcast_to((flags != steps.PADDING)[:, None], shape).astype(jnp.int32)
  trained = jnp.broadcast_to((flags == steps.TRAINED)[:, None], shape).astype(jnp.int32)
  places = jnp.arange(length, dtype=jnp.int32)[None]
  return {
      "inputs_position": places * real,
      "targets_position": places * real,
      "inputs_segmentation": real,
      "targets_segmentation": trained * (places < length - 1),
  }


def _targets(tokens: jax.Array) -> jax.Array:
  return jnp.pad(tokens[:, 1:].astype(jnp.int32), ((0, 0), (0, 1)))


def _document_arrays(
    begins: segment_bits.Begins, length: int, real: jax.Array, trained: jax.Array
) -> dict[str, jax.Array]:
  """Segments and positions that restart after each EOS."""
  segments, positions = segment_bits.segments_and_positions(begins, length)
  segments, positions = segments * real, positions * real
  return {
      "inputs_segmentation": segments,
      "targets_segmentation": jnp.pad(segments[:, 1:], ((0, 0), (0, 1))) * trained,
      "inputs_position": positions,
      "targets_position": positions,
  }


@jax.jit
def _expand_whole(tokens: jax.Array, begins: segment_bits.Begins | None) -> dict[str, jax.Array]:
  """The arrays of rows that are all trained on, apart from those that all such batches share."""
  arrays = {"targets": _targets(tokens)}
  if tokens.dtype != jnp.int32:
    arrays["inputs"] = tokens.astype(jnp.int32)
  if begins is not None:
    one = jnp.ones((tokens.shape[0], 1), jnp.int32)
    arrays |= _document_arrays(begins, tokens.shape[1], one, one)
  return arrays


@functools.partial(jax.jit, static_argnames="padded")
def _expand(
    tokens: jax.Array, begins: segment_bits.Begins | None, flags: jax.Array, *, padded: bool
) -> dict[str, jax.Array]:
  """The arrays of rows of which some are masked, or `padded`; without padding, only the loss knows of a masked row."""
  arrays = {"targets": _targets(tokens)}
  if tokens.dtype != jnp.int32:
    arrays["inputs"] = tokens.astype(jnp.int32)
  if begins is None:
    made = _row_arrays(flags, tokens.shape[1])
    return arrays | (made if padded else {_OF_LOSS: made[_OF_LOSS]})
  real = (flags != steps.PADDING)[:, None].astype(jnp.int32)
  trained = (flags == steps.TRAINED)[:, None].astype(jnp.int32)
  return arrays | _document_arrays(begins, tokens.shape[1], real, trained)
