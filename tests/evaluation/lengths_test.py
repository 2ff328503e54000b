"""Tests for the choice of padded lengths."""

import doctest
import itertools
import math

from absl.testing import absltest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from maxtext_olmo.evaluation import lengths

_MULTIPLES = st.sampled_from([1, 4, 16])


def least_padding(rounded, budget, known):
  """By trying all: the least padding with `budget` new lengths, or None where none will do."""
  found = []
  for count in range(budget + 1):
    for bought in itertools.combinations(sorted(set(rounded)), count):
      allowed = sorted({*bought, *known})
      if allowed and allowed[-1] >= max(rounded):
        found.append(sum(min(a for a in allowed if a >= r) - r for r in rounded))
  return min(found, default=None)


class LMEvalLengthsTest(absltest.TestCase):

  def test_the_documented_examples_hold(self):
    self.assertEqual(doctest.testmod(lengths), (0, 3))

  @settings(deadline=None)
  @given(
      st.lists(st.integers(0, 100), min_size=1, max_size=9),
      _MULTIPLES,
      st.integers(1, 5),
      st.sets(st.integers(1, 7), max_size=3),
  )
  def test_no_other_choice_of_so_few_lengths_pads_less(self, longest, multiple, shapes, known):
    known = {multiple * factor for factor in known}
    found = lengths.plan_lengths(longest, multiple, max_shapes=shapes, known=known)
    rounded = [lengths.round_up(max(n, 1), multiple) for n in longest]
    budget = max(0, shapes - len(known))
    least = least_padding(rounded, budget, known)
    new = set(found) - known
    for length, row in zip(found, rounded):
      self.assertGreaterEqual(length, row)
      self.assertEqual(length % multiple, 0)
    if least is not None:
      self.assertEqual(sum(found) - sum(rounded), least)
      self.assertLessEqual(len(new), budget)
    else:  # the budget is used up, and something longer comes
      self.assertEqual(new, {lengths.power_of_two(max(rounded), multiple)})

  @settings(deadline=None)
  @given(st.lists(st.lists(st.integers(1, 5000), min_size=1, max_size=40), min_size=1, max_size=6))
  def test_the_number_of_shapes_is_bounded_whatever_is_evaluated(self, evaluations):
    known: set[int] = set()
    for longest in evaluations:
      known.update(lengths.plan_lengths(longest, 16, known=known))
    doublings = math.ceil(math.log2(5000 / 16))
    self.assertLessEqual(len(known), lengths.MAX_SHAPES + doublings)

  def test_nothing_to_plan_is_no_plan(self):
    self.assertEqual(lengths.plan_lengths([], 16), [])


if __name__ == "__main__":
  absltest.main()
