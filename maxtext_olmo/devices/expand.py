"""Expands compact batches into full arrays on the devices, so that only tokens and bits are sent.

A batch is six int32 arrays, 24 bytes per token. All six can be computed from the tokens, two values
per row, and two bits per token (whether a segment begins there, and whether loss is taken on it):

    tokens 5 7 0 9  →  inputs    5 7 0 9     position  0 1 2 3     segmentation  1 1 1 1
                       targets   7 0 9 0     position  0 1 2 3     segmentation  1 1 1 0

So the tokens are sent as they are stored, in 2 or 4 bytes each. A program on each device computes
the arrays from the tokens. It runs on that device alone, so no process waits for another. If the
tokens of a row are split over several devices, a device does not have the target of its last token,
which is on the next device, so the host makes all six arrays.

Arrays that do not depend on the data are made once and shared by all batches. A trainer may donate
a batch; the shared arrays are then made again for the next one. A trainer that keeps an earlier
batch must copy it before it donates a later one, because donating deletes the shared arrays.

Segments and positions come from one bit per token, without a scan over the tokens. Compilers handle
cumulative sums and maxima along a row badly: on a CPU each takes log(L) passes over the row. So the
host sends the starts of segments as 32-bit words, and the scans run over the words. The rest is
arithmetic on each token's word:

    starts      . . . 1 . 1 1 .     one bit per token; segment 1 begins at column 0 without a bit
    segments    1 + the bits set in earlier words + the bits set in this word at or before the token
    positions   the distance from the last bit set in this word at or before the token; if there is
                none, from the start of the segment in which the previous word ends

The scans over words are a separate program. If the program that does the arithmetic also did the
scans, XLA on CPUs would repeat them for every token.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from maxtext_olmo.devices import layout as layout_lib
from maxtext_olmo.rows import batch as batch_lib

_BITS = 32


class Starts(NamedTuple):
  """Segment starts, packed into words of 32 tokens. Each array has the shape (rows, words).

  Attributes:
    bits: One bit per token, set if a segment begins there. The lowest bit is the first token.
    segments: Segment at the end of the previous word.
    columns: Column where that segment begins.
  """

  bits: jax.Array
  segments: jax.Array
  columns: jax.Array


@jax.jit
def scan_words(bits: jax.Array) -> Starts:
  """Returns the bits with, for each word, the segment at the end of the previous word."""
  counts = lax.population_count(bits).astype(jnp.int32)
  last = jnp.where(bits != 0, _word_columns(bits.shape[1]) + _last_bit(bits), 0)
  latest = lax.cummax(last, axis=1)
  before = jnp.pad(latest[:, :-1], ((0, 0), (1, 0)))
  return Starts(bits, 1 + jnp.cumsum(counts, axis=1) - counts, before)


def segments_and_positions(starts: Starts, length: int) -> tuple[jax.Array, jax.Array]:
  """Returns each token's segment number, from 1, and position in the segment, as int32."""
  rows, words = starts.bits.shape
  up_to_here = (jnp.uint32(2) << jnp.arange(_BITS, dtype=jnp.uint32)) - jnp.uint32(1)
  seen = starts.bits[:, :, None] & up_to_here
  segments = starts.segments[:, :, None] + lax.population_count(seen).astype(jnp.int32)
  columns = _word_columns(words)[:, None]
  begins = jnp.where(seen != 0, columns + _last_bit(seen), starts.columns[:, :, None])
  positions = columns + jnp.arange(_BITS, dtype=jnp.int32) - begins
  shape = (rows, words * _BITS)
  return segments.reshape(shape)[:, :length], positions.reshape(shape)[:, :length]


def unpack(bits: jax.Array, length: int) -> jax.Array:
  """Unpacks words of bits (rows, words) into one int32 per bit (rows, length)."""
  rows, words = bits.shape
  each = (bits[:, :, None] >> jnp.arange(_BITS, dtype=jnp.uint32)) & jnp.uint32(1)
  return each.reshape(rows, words * _BITS)[:, :length].astype(jnp.int32)


def _word_columns(words: int) -> jax.Array:
  return jnp.arange(words, dtype=jnp.int32) * _BITS


def _last_bit(bits: jax.Array) -> jax.Array:
  return _BITS - 1 - lax.clz(bits).astype(jnp.int32)


class Placed(NamedTuple):
  """A batch on its way to the devices: the arrays that it does not share, and the bytes sent."""

  arrays: dict[str, jax.Array]
  bytes_crossed: int


class Expander:
  """Expands compact batches into dicts of global arrays, for one layout."""

  def __init__(self, layout: layout_lib.BatchLayout, shift: batch_lib.Shift = batch_lib.Shift()):
    self._layout = layout
    self._shift = shift
    self._constants: dict[str, jax.Array] = {}

  def place(self, batch: Mapping[str, np.ndarray]) -> Placed:
    """Sends a batch to the devices and starts the computation there, without waiting for either."""
    if self._layout.splits_rows:
      made = batch_lib.to_arrays(batch, self._shift)
      return Placed(self._layout.place(made), sum(array.nbytes for array in made.values()))
    tokens = _as_device_takes_it(batch["tokens"])
    sent = self._layout.send(tokens)
    crossed = tokens.nbytes
    besides = _besides_tokens(batch, tokens.shape[1])
    shards: dict[str, list[jax.Array]] = {}
    for name, values in besides.items():
      crossed += values.nbytes
      shards[name] = self._layout.shards(self._layout.send(values))
    parts = []
    for number, shard in enumerate(self._layout.shards(sent)):
      own: dict[str, Any] = {}
      for name, each in shards.items():
        own[name] = scan_words(each[number]) if name == "starts" else each[number]
      parts.append(_expand(shard, own, self._shift))
    arrays = self._layout.join(parts)
    if self._shift.direction == "left" and tokens.dtype == np.int32 and "used" not in besides:
      arrays["inputs"] = sent
    for name in batch_lib.EXTRAS:
      if name in batch:
        arrays[name] = self._layout.send(batch[name])
        crossed += batch[name].nbytes
    return Placed(arrays, crossed)

  def finish(self, placed: Placed) -> dict[str, jax.Array]:
    """Returns all arrays of a batch; makes shared arrays again if a trainer has donated them."""
    own, made = placed.arrays, {}
    for name in batch_lib.NAMES:
      value = own.get(name)
      if value is None:
        value = self._constants.get(name)
        if value is None or value.is_deleted():
          value = self._constants[name] = self._constant(name)
      made[name] = value
    return {**own, **made}

  def _constant(self, name: str) -> jax.Array:
    local = np.ones(len(self._layout.rows), np.uint8)
    shards = self._layout.shards(self._layout.send(local))
    made = [_row_arrays(shard, self._layout.length, self._shift) for shard in shards]
    return self._layout.join([{name: part[name]} for part in made])[name]


def _besides_tokens(batch: Mapping[str, np.ndarray], length: int) -> dict[str, np.ndarray]:
  """Returns the arrays to send in addition to the tokens: values per row, and bits per token."""
  found = {}
  if not (batch["used"] == length).all():
    found["used"] = batch["used"].astype(np.int32)
  if not batch["trained"].all():
    found["trained"] = batch["trained"].astype(np.uint8)
  for name in ("starts", "loss"):
    if name in batch:
      found[name] = batch[name]
  return found


def _as_device_takes_it(tokens: np.ndarray) -> np.ndarray:
  if tokens.dtype.itemsize == 4:
    return tokens.view(np.int32)  # The vocabulary check ensures that no id uses the sign bit.
  return tokens.astype(np.int32) if tokens.dtype.itemsize == 8 else tokens


def _shift_left(values: jax.Array) -> jax.Array:
  return jnp.pad(values[:, 1:], ((0, 0), (0, 1)))


def _arrays_from_segments(
    segments: jax.Array, positions: jax.Array, counted: jax.Array, shift: batch_lib.Shift
) -> dict[str, jax.Array]:
  left = shift.direction == "left"
  return {
      "inputs_position": positions,
      "targets_position": positions,
      "inputs_segmentation": segments,
      "targets_segmentation": _shift_left(counted) if left else counted,
  }


@functools.partial(jax.jit, static_argnames=("length", "shift"))
def _row_arrays(real: jax.Array, length: int, shift: batch_lib.Shift) -> dict[str, jax.Array]:
  """Returns the arrays that do not depend on the data if all rows are full."""
  shape = (real.shape[0], length)
  ones = jnp.broadcast_to(real[:, None].astype(jnp.int32), shape)
  columns = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], shape)
  return _arrays_from_segments(ones, columns * ones, ones, shift)


@functools.partial(jax.jit, static_argnames="shift")
def _expand(tokens: jax.Array, own: dict[str, Any], shift: batch_lib.Shift) -> dict[str, jax.Array]:
  """Returns the arrays of a batch, except those that all batches share.

  Args:
    tokens: Tokens of this device's rows.
    own: Other arrays that were sent: `used` and `trained` per row, `starts` and `loss` as bits.
    shift: Offset between inputs and targets.
  """
  rows, length = tokens.shape
  ids = tokens.astype(jnp.int32)
  used = own.get("used")
  if used is not None:
    # Padding rows become all zeros. Padding tokens within a row keep their id.
    ids = jnp.where(used[:, None] > 0, ids, 0)
  arrays = {}
  if shift.direction == "left":
    arrays["targets"] = _shift_left(ids)
    if used is not None or tokens.dtype != jnp.int32:
      arrays["inputs"] = ids
  else:
    first = jnp.full((rows, 1), shift.first_id, jnp.int32)
    if used is not None:
      first = jnp.where(used[:, None] > 0, first, 0)
    arrays["targets"], arrays["inputs"] = ids, jnp.concatenate([first, ids[:, :-1]], axis=1)
  if not own:
    return arrays
  columns = jnp.arange(length, dtype=jnp.int32)[None]
  real = jnp.ones((rows, length), jnp.int32)
  if used is not None:
    real = (columns < used[:, None]).astype(jnp.int32)
  if "starts" in own:
    segments, positions = segments_and_positions(own["starts"], length)
    segments, positions = segments * real, positions * real
  else:
    segments, positions = real, columns * real
  counted = segments
  if "loss" in own:
    counted = counted * unpack(own["loss"], length)
  if "trained" in own:
    counted = counted * own["trained"][:, None].astype(jnp.int32)
  made = _arrays_from_segments(segments, positions, counted, shift)
  if used is None and "starts" not in own:
    # Masks change only targets_segmentation; the other arrays are shared.
    return arrays | {batch_lib.TARGETS_SEGMENTATION: made[batch_lib.TARGETS_SEGMENTATION]}
  return arrays | made
