"""Tests of skipped samples."""

import hypothesis
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import strategies as st

from maxtext_olmo import errors
from maxtext_olmo.order import skips

RANGES = st.lists(st.tuples(st.integers(0, 80), st.integers(1, 15)), max_size=5).map(
    lambda pairs: [(first, first + size) for first, size in pairs]
)


class SkipsTest(parameterized.TestCase):

  def test_the_example_of_the_module_holds(self):
    some = skips.Skips.of([(4, 7)])
    self.assertEqual(some.positions(np.arange(7)).tolist(), [0, 1, 2, 3, 7, 8, 9])
    self.assertEqual([some.number(p) for p in range(10)], [0, 1, 2, 3, 4, 4, 4, 4, 5, 6])
    self.assertEqual([some.consumed(n) for n in range(7)], [0, 1, 2, 3, 4, 8, 9])

  @hypothesis.given(RANGES)
  @hypothesis.settings(deadline=None)
  def test_it_equals_leaving_positions_out_one_by_one(self, ranges):
    some = skips.Skips.of(ranges)
    left = [p for p in range(200) if not any(first <= p < end for first, end in ranges)]
    numbers = np.arange(len(left))
    self.assertEqual(some.positions(numbers).tolist(), left)
    self.assertEqual(
        some.contains(np.arange(200)).tolist(), [p not in set(left) for p in range(200)]
    )
    for position in range(200):
      self.assertEqual(some.number(position), sum(p < position for p in left))
    for number in range(1, len(left)):
      self.assertEqual(some.position(number), left[number])
      self.assertEqual(some.consumed(number), left[number - 1] + 1)
    self.assertEqual(some.consumed(0), 0)

  def test_padding_rows_stay_padding_rows(self):
    some = skips.Skips.of([(0, 3)])
    self.assertEqual(some.positions(np.array([-1, 0, -1])).tolist(), [-1, 3, -1])

  def test_ranges_that_overlap_or_touch_become_one(self):
    self.assertEqual(skips.Skips.of([(8, 10), (1, 4), (3, 6), (6, 7)]).ranges, ((1, 7), (8, 10)))
    self.assertEqual(skips.Skips.of([(1, 9), (2, 3)]).ranges, ((1, 9),))

  @parameterized.parameters((-1, 3), (3, 3), (4, 2))
  def test_a_range_without_samples_is_a_config_error(self, first, end):
    with self.assertRaisesRegex(errors.ConfigError, f"got {first} to {end}"):
      skips.Skips.of([(first, end)])


if __name__ == "__main__":
  absltest.main()
