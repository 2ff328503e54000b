"""Tests of interleaving by shares."""

import fractions

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from maxtext_olmo import errors
from maxtext_olmo.order import interleave

_COUNTS = st.lists(st.integers(1, 50), min_size=1, max_size=9)


class InterleaveTest(parameterized.TestCase):

  def test_the_example_of_the_module(self):
    members, indices = interleave.Interleave([3, 1]).locate(np.arange(8))
    self.assertEqual(members.tolist(), [0, 0, 1, 0, 0, 0, 1, 0])
    self.assertEqual(indices.tolist(), [0, 1, 0, 2, 3, 4, 1, 5])

  @settings(deadline=None, max_examples=60)
  @given(_COUNTS)
  def test_each_member_keeps_its_order_and_its_exact_share(self, counts):
    mix = interleave.Interleave(counts)
    members, indices = mix.locate(np.arange(3 * mix.period))
    for number, count in enumerate(counts):
      self.assertEqual(indices[members == number].tolist(), list(range(3 * count)))
      for period in range(3):
        here = members[period * mix.period : (period + 1) * mix.period]
        self.assertEqual((here == number).sum(), count)

  @settings(deadline=None, max_examples=60)
  @given(_COUNTS, st.integers(0, 300), st.integers(1, 300))
  def test_over_any_range_no_member_is_far_from_its_share(self, counts, start, length):
    mix = interleave.Interleave(counts)
    members, _ = mix.locate(np.arange(start, start + length))
    for number, count in enumerate(counts):
      ideal = length * count / mix.period
      self.assertLess(
          abs((members == number).sum() - ideal), 2 * (len(counts) - 1).bit_length() + 1
      )

  @settings(deadline=None, max_examples=40)
  @given(_COUNTS, st.integers(0, 400))
  def test_taken_and_position_of_agree_with_locate(self, counts, position):
    mix = interleave.Interleave(counts)
    members, indices = mix.locate(np.arange(position + 1))
    taken = [int((members[:position] == number).sum()) for number in range(len(counts))]
    self.assertEqual(mix.taken(position), taken)
    self.assertEqual(mix.taken_before(np.array([0, position]))[1].tolist(), taken)
    self.assertEqual(mix.position_of(int(members[-1]), int(indices[-1])), position)

  @settings(deadline=None, max_examples=60)
  @given(_COUNTS, st.sampled_from([1, 1 << 33]), st.integers(0, 1 << 50))
  def test_positions_of_undoes_locate(self, counts, scale, start):
    mix = interleave.Interleave([count * scale for count in counts])
    positions = start + np.arange(100)
    members, indices = mix.locate(positions)
    for number in np.unique(members).tolist():
      here = members == number
      found = mix.positions_of(number, indices[here])
      np.testing.assert_array_equal(found, positions[here])

  def test_a_period_beyond_int64_products_is_exact(self):
    small = interleave.Interleave([3, 2, 1])
    large = interleave.Interleave([3 << 33, 2 << 33, 1 << 33])
    starts = np.arange(1000)
    # The fractions are the same, so each place of a period of six has the same member.
    np.testing.assert_array_equal(small.locate(starts)[0], large.locate(starts)[0])
    members, indices = large.locate(np.array([large.period, 5 * large.period]))
    self.assertEqual(members.tolist(), [0, 0])
    self.assertEqual(indices.tolist(), [3 << 33, 15 << 33])

  @parameterized.parameters(
      ([0.7, 0.3], [7, 3]),
      ([1, 1, 1], [1, 1, 1]),
      ([0.1, 0.25], [2, 5]),
      ([fractions.Fraction(1, 3), fractions.Fraction(2, 3)], [1, 2]),
  )
  def test_weights_are_read_as_exact_decimals(self, weights, counts):
    self.assertEqual(interleave.counts_of_weights(weights), counts)

  def test_weights_with_too_long_a_period_are_rounded(self):
    counts = interleave.counts_of_weights([1 / 3, 2 / 3 + 1e-16, 1e-9])
    self.assertLessEqual(sum(counts), interleave.MAX_PERIOD)
    self.assertAlmostEqual(counts[0] / sum(counts), 1 / 3, delta=1e-8)
    interleave.Interleave(counts)

  def test_a_share_of_zero_is_an_error(self):
    with self.assertRaisesRegex(errors.ConfigError, "share above 0"):
      interleave.Interleave([1, 0])
    with self.assertRaisesRegex(errors.ConfigError, "positive and finite"):
      interleave.counts_of_weights([1, -1])
    with self.assertRaisesRegex(errors.ConfigError, "at most"):
      interleave.Interleave([interleave.MAX_PERIOD, 1])


if __name__ == "__main__":
  absltest.main()
