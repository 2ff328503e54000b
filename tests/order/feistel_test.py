"""Tests of the keyed bijection."""

import collections
import itertools
import math

import hypothesis
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import strategies as st

from maxtext_olmo import errors
from maxtext_olmo.order import feistel


class BijectionTest(parameterized.TestCase):

  def test_every_small_size_is_permuted_completely(self):
    for n in range(1, 300):
      image = feistel.Bijection(n, "test", n)(np.arange(n))
      self.assertEqual(sorted(image.tolist()), list(range(n)), n)

  @hypothesis.given(n=st.integers(1, 300_000), key=st.integers())
  @hypothesis.settings(max_examples=40, deadline=None)
  def test_any_size_is_permuted_completely(self, n, key):
    image = feistel.Bijection(n, key)(np.arange(n))
    self.assertTrue(np.array_equal(np.sort(image), np.arange(n)))

  @parameterized.parameters(724_000_000, 2**32, 2**40 - 1, 2**40)
  def test_large_sizes_stay_in_range_and_do_not_collide(self, n):
    places = np.concatenate([np.arange(100_000), n - 1 - np.arange(100_000)])
    image = feistel.Bijection(n, 0)(places)
    self.assertBetween(image.min(), 0, n - 1)
    self.assertBetween(image.max(), 0, n - 1)
    self.assertLen(np.unique(image), len(places))

  @hypothesis.given(
      n=st.one_of(st.integers(1, 300), st.integers(1, 2**25), st.integers(2**24, 2**40)),
      key=st.integers(),
      data=st.data(),
  )
  @hypothesis.settings(max_examples=80, deadline=None)
  def test_the_inverse_undoes_the_map(self, n, key, data):
    bijection = feistel.Bijection(n, key)
    drawn = data.draw(st.lists(st.integers(0, n - 1), max_size=50))
    numbers = np.array([*drawn, 0, n - 1, n // 2], np.int64)
    np.testing.assert_array_equal(bijection.inverse(bijection(numbers)), numbers)
    np.testing.assert_array_equal(bijection(bijection.inverse(numbers)), numbers)

  @parameterized.parameters(0, -1, 2**40 + 1)
  def test_a_size_outside_the_range_is_refused(self, n):
    with self.assertRaisesRegex(errors.OrderError, r"from 1 to 2\*\*40, got"):
      feistel.Bijection(n, 0)

  def test_a_call_with_some_numbers_returns_some_of_the_images(self):
    bijection = feistel.Bijection(1001, 5)
    whole = bijection(np.arange(1001))
    for size in (1, 7, 64):
      parts = [bijection(np.arange(i, min(i + size, 1001))) for i in range(0, 1001, size)]
      np.testing.assert_array_equal(np.concatenate(parts), whole)

  def test_small_sizes_reach_every_permutation_about_equally_often(self):
    for n in (2, 3, 4):
      samples = 400 * math.factorial(n)
      counts = collections.Counter(
          tuple(feistel.Bijection(n, seed)(np.arange(n)).tolist()) for seed in range(samples)
      )
      self.assertCountEqual(counts, itertools.permutations(range(n)))
      chi_square = sum((c - 400) ** 2 / 400 for c in counts.values())
      freedom = math.factorial(n) - 1
      self.assertLess(chi_square, freedom + 6 * math.sqrt(2 * freedom) + 6)

  @parameterized.parameters(1_000_000, 724_000_000)
  def test_neighbours_are_not_correlated(self, n):
    image = feistel.Bijection(n, 34521)(np.arange(100_000)).astype(float)
    noise = 1 / math.sqrt(100_000)
    self.assertLess(abs(np.corrcoef(image[:-1], image[1:])[0, 1]), 4.5 * noise)
    self.assertLess(abs(np.corrcoef(image, np.arange(100_000))[0, 1]), 4.5 * noise)

  def test_the_permutation_never_changes_between_versions(self):
    # If these numbers changed, every existing run would get another order.
    np.testing.assert_array_equal(
        feistel.Bijection(10, "order", 0, 0)(np.arange(10)), [7, 6, 0, 5, 8, 1, 9, 4, 3, 2]
    )
    np.testing.assert_array_equal(
        feistel.Bijection(724_000_000, "order", 34521, 0)(np.arange(4)),
        [110006391, 11661069, 358724959, 522979710],
    )


if __name__ == "__main__":
  absltest.main()
