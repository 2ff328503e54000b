"""Tests of segments and positions by bits."""

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from maxtext_olmo.devices import segment_bits
from maxtext_olmo.rows import segments as segments_lib


class DocumentBitsTest(parameterized.TestCase):

  def _check(self, tokens, eos_id):
    begins = segment_bits.find(jnp.asarray(tokens), eos_id=eos_id)
    segments, positions = segment_bits.segments_and_positions(begins, tokens.shape[1])
    self.assertEqual((segments.dtype, positions.dtype), (np.int32, np.int32))
    wide = tokens.astype(np.int64)
    np.testing.assert_array_equal(segments, segments_lib.segment_ids(wide, eos_id))
    np.testing.assert_array_equal(positions, segments_lib.positions(wide, eos_id))

  # Few lengths, because each is compiled.
  @given(
      st.sampled_from([1, 2, 31, 32, 33, 64, 100, 256]),
      st.integers(0, 2**32 - 1),
      st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]),
  )
  @settings(max_examples=60, deadline=None)
  def test_they_are_those_of_the_host(self, length, seed, share):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, 50, (3, length)).astype(np.int32)
    tokens[rng.random(tokens.shape) < share] = 0
    self._check(tokens, 0)

  @parameterized.parameters(0, 30, 31, 32, 63, 64, 94, 95)
  def test_an_end_at_any_place_of_a_word(self, place):
    tokens = np.ones((1, 96), np.int32)
    tokens[0, place] = 7
    self._check(tokens, 7)

  @parameterized.parameters(np.uint16, np.int32)
  def test_an_id_that_the_dtype_does_not_hold_ends_nothing(self, dtype):
    tokens = np.arange(64, dtype=dtype)[None]
    self._check(tokens, 65536 + 3)
    self._check(tokens, 3)

  def test_a_long_row(self):
    rng = np.random.default_rng(0)
    self._check(rng.integers(0, 600, (4, 8192)).astype(np.int32), 0)


if __name__ == "__main__":
  absltest.main()
