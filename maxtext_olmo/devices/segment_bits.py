"""Segments and positions of documents on a device, without a scan over the tokens.

Sums and maxima that run along a row are what a compiler does badly: on a CPU each takes log(L) passes over the row. So which tokens
begin a document is packed into words of 32 bits, and the scans run over the words. What is left is arithmetic on each token's word:

    tokens      5 6 0 7 0 0 8 9     0 ends a document
    begins      . . . 1 . 1 1 .     one bit each
    segments    1 + the bits set in the words before + the bits set up to here in this one
    positions   counted from the last bit set up to here, or from where the last document of the words before began

The words are made by a program of their own: in one with what follows, XLA for CPUs makes them again for every token.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_BITS = 32


class Begins(NamedTuple):
  """Where documents begin, in words of 32 tokens: arrays (rows, words).

  Attributes:
    bits: Whether a document begins at a token, the first of the word being the lowest bit.
    segments: The segment at the end of the word before.
    starts: Where that segment begins.
  """

  bits: jax.Array
  segments: jax.Array
  starts: jax.Array


@functools.partial(jax.jit, static_argnames="eos_id")
def find(tokens: jax.Array, *, eos_id: int) -> Begins:
  """Where documents begin in rows of tokens: after an EOS."""
  rows, length = tokens.shape
  words = -(-length // _BITS)
  # Widened first: in a narrow dtype an id that does not fit would be compared modulo its size.
  ends = tokens.astype(jnp.int32) == eos_id
  ends = jnp.pad(ends, ((0, 0), (0, words * _BITS - length))).reshape(rows, words, _BITS)
  set_bits = jnp.where(ends, jnp.uint32(1) << _numbers(), jnp.uint32(0))
  end_bits = lax.reduce(set_bits, np.uint32(0), lax.bitwise_or, (2,))
  bits = (end_bits << 1) | _shifted(end_bits >> (_BITS - 1))
  counts = lax.population_count(bits).astype(jnp.int32)
  latest = lax.cummax(jnp.where(bits != 0, _word_starts(words) + _last_bit(bits), 0), axis=1)
  return Begins(bits, 1 + jnp.cumsum(counts, axis=1) - counts, _shifted(latest))


def segments_and_positions(begins: Begins, length: int) -> tuple[jax.Array, jax.Array]:
  """For each token of a row, the number of its document, from 1 on, and its place in it; both int32."""
  rows, words = begins.bits.shape
  up_to_here = (jnp.uint32(2) << _numbers()) - jnp.uint32(1)
  seen = begins.bits[:, :, None] & up_to_here
  segments = begins.segments[:, :, None] + lax.population_count(seen).astype(jnp.int32)
  word_starts = _word_starts(words)[:, None]
  starts = jnp.where(seen != 0, word_starts + _last_bit(seen), begins.starts[:, :, None])
  positions = word_starts + jnp.arange(_BITS, dtype=jnp.int32) - starts
  shape = (rows, words * _BITS)
  return segments.reshape(shape)[:, :length], positions.reshape(shape)[:, :length]


def _numbers() -> jax.Array:
  return jnp.arange(_BITS, dtype=jnp.uint32)


def _word_starts(words: int) -> jax.Array:
  return jnp.arange(words, dtype=jnp.int32) * _BITS


def _last_bit(bits: jax.Array) -> jax.Array:
  return _BITS - 1 - lax.clz(bits).astype(jnp.int32)


def _shifted(words: jax.Array) -> jax.Array:
  """What the word before has, 0 for the first."""
  return jnp.pad(words[:, :-1], ((0, 0), (1, 0)))
