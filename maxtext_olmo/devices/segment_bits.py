"""Segments and positions on a device, from one bit per token, without a scan over the tokens.

Sums and maxima that run along a row are what a compiler does badly: on a CPU each takes log(L)
passes over the row. The host sends where segments begin as words of 32 bits, and the scans run over
the words. What is left is arithmetic on each token's word:

    starts      . . . 1 . 1 1 .     one bit each; column 0 begins segment 1 without one
    segments    1 + the bits set in the words before + the bits set up to here in this one
    positions   counted from the last bit set up to here, or from where the last segment of the
                words before began

The scans over words are a program of their own: in one with what follows, XLA for CPUs makes them
again for every token.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_BITS = 32


class Starts(NamedTuple):
  """Where segments begin, in words of 32 tokens: arrays (rows, words).

  Attributes:
    bits: Whether a segment begins at a token, the first token of the word in the lowest bit.
    segments: The segment at the end of the word before.
    columns: Where that segment begins.
  """

  bits: jax.Array
  segments: jax.Array
  columns: jax.Array


@jax.jit
def scan_words(bits: jax.Array) -> Starts:
  """Returns the bits with what the words before each word contain."""
  counts = lax.population_count(bits).astype(jnp.int32)
  last = jnp.where(bits != 0, _word_columns(bits.shape[1]) + _last_bit(bits), 0)
  latest = lax.cummax(last, axis=1)
  before = jnp.pad(latest[:, :-1], ((0, 0), (1, 0)))
  return Starts(bits, 1 + jnp.cumsum(counts, axis=1) - counts, before)


def segments_and_positions(starts: Starts, length: int) -> tuple[jax.Array, jax.Array]:
  """Returns the number of each token's segment, from 1, and its place in it; both int32."""
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
  """Returns the bits of words (rows, words) as int32 (rows, length)."""
  rows, words = bits.shape
  each = (bits[:, :, None] >> jnp.arange(_BITS, dtype=jnp.uint32)) & jnp.uint32(1)
  return each.reshape(rows, words * _BITS)[:, :length].astype(jnp.int32)


def _word_columns(words: int) -> jax.Array:
  return jnp.arange(words, dtype=jnp.int32) * _BITS


def _last_bit(bits: jax.Array) -> jax.Array:
  return _BITS - 1 - lax.clz(bits).astype(jnp.int32)
