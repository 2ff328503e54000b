"""Tests that a device finds the segments and positions that the host finds."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from maxtext_olmo.devices import segment_bits
from maxtext_olmo.rows import segments as segments_lib
from tests.rows import segments_test

# Few, because the program for each is compiled.
_LENGTHS = (1, 2, 31, 32, 33, 64, 100)
_ROWS = 3


# In one program, as where a batch is expanded.
_segments_and_positions = jax.jit(segment_bits.segments_and_positions, static_argnames="length")


def _on_device(starts):
  words = segment_bits.scan_words(jnp.asarray(segments_lib.pack_bits(starts)))
  segments, positions = _segments_and_positions(words, starts.shape[1])
  return np.asarray(segments), np.asarray(positions)


class SegmentBitsTest(parameterized.TestCase):

  def _check(self, starts):
    """Compares full rows; padding is cleared by what expands a batch."""
    used = np.full(len(starts), starts.shape[1])
    found, expected = _on_device(starts), segments_lib.segments_and_positions(starts, used)
    for got, wanted in zip(found, expected):
      self.assertEqual(got.dtype, np.int32)
      np.testing.assert_array_equal(got, wanted)

  @parameterized.parameters(*segments_test.RULES)
  def test_rows_by_any_rule_equal_those_of_the_host(self, rule):
    @given(segments_test.batches(st.sampled_from(_LENGTHS), max_rows=_ROWS))
    @settings(max_examples=15, deadline=None)
    def check(batch):
      tokens, counts = batch
      parts = segments_test.parts_of(counts)
      starts = np.zeros((_ROWS, tokens.shape[1]), bool)
      starts[: len(tokens)] = segments_lib.segment_starts(tokens, parts.used, rule, parts)
      self._check(starts)

    check()

  @given(
      st.sampled_from(_LENGTHS),
      st.integers(0, 2**32 - 1),
      st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]),
  )
  @settings(max_examples=25, deadline=None)
  def test_so_do_rows_with_any_share_of_starts(self, length, seed, share):
    starts = np.random.default_rng(seed).random((_ROWS, length)) < share
    starts[:, 0] = False
    self._check(starts)

  @parameterized.parameters(1, 30, 31, 32, 33, 63, 64, 95)
  def test_a_start_at_any_place_of_a_word(self, place):
    starts = np.zeros((1, 96), bool)
    starts[0, place] = True
    self._check(starts)

  def test_a_long_row(self):
    starts = np.random.default_rng(0).random((2, 8192)) < 0.002
    starts[:, 0] = False
    self._check(starts)

  @parameterized.parameters(*_LENGTHS)
  def test_unpack_gives_the_flags_that_were_packed(self, length):
    flags = np.random.default_rng(length).random((_ROWS, length)) < 0.5
    found = segment_bits.unpack(jnp.asarray(segments_lib.pack_bits(flags)), length)
    self.assertEqual(found.dtype, np.int32)
    np.testing.assert_array_equal(found, flags)


if __name__ == "__main__":
  absltest.main()
