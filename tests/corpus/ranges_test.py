"""Tests of finding the range that holds a number."""

from unittest import mock

import hypothesis
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import strategies as st

from maxtext_olmo.corpus import ranges


def _ranges(sizes):
  ends = np.cumsum(sizes)
  return ranges.Ranges(ends - sizes, int(ends[-1]))


class RangesTest(parameterized.TestCase):

  @hypothesis.given(st.lists(st.integers(0, 40), min_size=1, max_size=60))
  @hypothesis.settings(deadline=None)
  def test_every_number_is_found_where_it_lies(self, sizes):
    sizes = np.array(sizes)
    found = _ranges(sizes)
    numbers = np.arange(sizes.sum())
    with mock.patch.object(ranges, "_MANY", 0):
      np.testing.assert_array_equal(found.find(numbers), np.repeat(np.arange(len(sizes)), sizes))

  @parameterized.named_parameters(
      ("even", [1000] * 950, True),
      ("of_the_real_mix", list(np.random.default_rng(0).integers(500, 3000, 950)), True),
      ("one_large", [10**9, 5, 5, 5], True),
      ("many_small_behind_a_large_one", [10**6] + [1] * 500, False),
      ("many_empty", [50_000] + [0] * 50 + [50_000], False),
  )
  def test_the_table_serves_where_few_ranges_begin_in_a_cell(self, sizes, serves):
    found = _ranges(np.array(sizes, np.int64))
    self.assertEqual(found._table is not None, serves)
    numbers = np.random.default_rng(1).integers(0, sum(sizes), 5000)
    ends = np.cumsum(sizes)
    for some in (numbers, numbers[:10], np.array([0, sum(sizes) - 1] * 500)):
      answer = found.find(some)
      self.assertEqual(answer.dtype, np.int64)
      np.testing.assert_array_equal(answer, np.searchsorted(ends, some, side="right"))

  def test_the_table_grows_with_the_ranges_and_not_with_what_they_hold(self):
    for size in (10, 10**6, 10**12):
      table = _ranges(np.full(1000, size, np.int64))._table
      self.assertBetween(len(table.first), 1000, 5000)

  def test_nothing_is_found_in_nothing(self):
    self.assertEmpty(_ranges(np.zeros(3, np.int64)).find(np.zeros(0, np.int64)))


if __name__ == "__main__":
  absltest.main()
