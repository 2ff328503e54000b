"""Tests of the sort algorithms, one by one; `tie_order_test` compares them with NumPy."""

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from maxtext_olmo.rows import tie_sort
from tests.rows import adversary

_KEYS = st.lists(st.integers(-5, 5), max_size=400)


def _scalar(keys, order, first, end):
  tie_sort.scalar_sort(keys, order, first, end, [0] * tie_sort.STACK)


def _standard(keys, order, first, end):
  tie_sort.standard_sort(keys, order, first, end, [0] * tie_sort.STACK)


def _vector(lanes):
  def sort(keys, order, first, end):
    spare = [[0] * size for size in (tie_sort.STACK, tie_sort.SCRATCH, tie_sort.SCRATCH)]
    tie_sort.vector_sort(keys, order, first, end, lanes, *spare)

  return sort


_SORTS = {
    "insertion": tie_sort.insertion_sort,
    "heap": tie_sort.heap_sort,
    "standard_heap": tie_sort.standard_heap_sort,
    "scalar": _scalar,
    "standard": _standard,
    "vector_4": _vector(4),
    "vector_8": _vector(8),
}


class SortTest(parameterized.TestCase):

  @parameterized.named_parameters(_SORTS.items())
  def test_it_sorts_a_part_and_moves_numbers_along(self, sort):
    @settings(deadline=None, max_examples=60)
    @given(_KEYS, st.integers(0, 3), st.integers(0, 3))
    def check(keys, before, after):
      given_keys = [7] * before + keys + [-7] * after
      sorted_keys, order = list(given_keys), list(range(len(given_keys)))
      sort(sorted_keys, order, before, before + len(keys))
      self.assertEqual(sorted_keys, [7] * before + sorted(keys) + [-7] * after)
      self.assertEqual([given_keys[number] for number in order], sorted_keys)
      self.assertCountEqual(order, range(len(given_keys)))

    check()

  @parameterized.named_parameters(
      (name, _SORTS[name]) for name in ("scalar", "standard", "vector_4", "vector_8")
  )
  def test_many_keys_of_few_values_exhaust_no_scratch_memory(self, sort):
    for values in (1, 2, 3, 1000):
      keys = np.random.default_rng(values).integers(0, values, 20_000).tolist()
      keys[-1] = -1  # Not in order, so that the vector sort does not stop at once.
      sorted_keys, order = list(keys), list(range(len(keys)))
      sort(sorted_keys, order, 0, len(keys))
      self.assertEqual(sorted_keys, sorted(keys))

  @parameterized.parameters("scalar", "standard")
  def test_keys_that_defeat_the_pivots_take_no_more_than_n_log_n_comparisons(self, name):
    keys = [_Counted(key) for key in adversary.defeat(_SORTS[name], 2000)]
    order = list(range(len(keys)))
    _Counted.comparisons = 0
    _SORTS[name](list(keys), order, 0, len(keys))
    self.assertLess(_Counted.comparisons, 5 * len(keys) * np.log2(len(keys)))
    self.assertEqual([keys[number] for number in order], sorted(keys))


class _Counted(int):
  """A key that counts how often keys are compared."""

  comparisons = 0

  def __lt__(self, other):
    _Counted.comparisons += 1
    return int(self) < int(other)


if __name__ == "__main__":
  absltest.main()
