"""Tests for the plan of which requests share a row."""

import doctest
import itertools
import math
import subprocess
import sys

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from maxtext_olmo.evaluation import packing
from maxtext_olmo.evaluation import requests as requests_lib
from tests import distributed
from tests.benchmarks import lmeval

STARTS_PROCESSES = True

_LENGTHS = st.lists(st.integers(1, 700), max_size=120)
_MULTIPLES = st.sampled_from([1, 8, 16, 128])


def make_rows(lengths, seed=0):
  rng = np.random.default_rng(seed)
  return [
      requests_lib.Row(rng.integers(0, 50, size=n + 1), int(rng.integers(1, n + 1)), 3 * i, i % 2)
      for i, n in enumerate(lengths)
  ]


def print_plan():
  """Prints a plan; run in a process of its own."""
  rng = np.random.default_rng(0)
  print(packing.plan_steps(rng.integers(1, 500, size=400).tolist(), 8, 16, pack=True))


class LMEvalPackingTest(parameterized.TestCase):

  def test_the_documented_example_holds(self):
    self.assertEqual(doctest.testmod(packing), (0, 4))

  @settings(deadline=None)
  @given(
      _LENGTHS,
      st.integers(1, 9),
      _MULTIPLES,
      st.booleans(),
      st.sampled_from([None, 700, 1000]),
      st.sets(st.integers(1, 60), max_size=14),
      st.integers(0, 3),
  )
  def test_every_request_has_one_place_and_no_row_overflows(
      self, lengths, batch_size, multiple, pack, max_length, known, overhead
  ):
    known = {multiple * factor for factor in known if multiple * factor <= (max_length or math.inf)}
    steps = packing.plan_steps(
        lengths,
        batch_size,
        multiple,
        pack=pack,
        max_length=max_length,
        known=known,
        overhead=overhead,
    )
    placed = [number for step in steps for row in step.rows for number in row]
    self.assertCountEqual(placed, range(len(lengths)))
    for step in steps:
      self.assertBetween(len(step.rows), 1, batch_size)
      self.assertLessEqual(step.length, max_length or math.inf)
      self.assertTrue(step.length % multiple == 0 or step.length == max_length)
      for row in step.rows:
        self.assertNotEmpty(row)
        self.assertLessEqual(sum(lengths[number] for number in row), step.length)
        if not pack:
          self.assertLen(row, 1)
    self.assertEqual([step.length for step in steps], sorted([s.length for s in steps])[::-1])
    self.assertTrue(all(len(step.rows) == batch_size for step in steps[:-1]))
    if len(known) < packing.MAX_SHAPES:
      self.assertLessEqual(len({step.length for step in steps} | known), packing.MAX_SHAPES)

  @settings(deadline=None)
  @given(st.lists(_LENGTHS, min_size=1, max_size=6))
  def test_the_number_of_shapes_is_bounded_whatever_is_evaluated(self, evaluations):
    known: set[int] = set()
    for lengths in evaluations:
      known.update(
          step.length for step in packing.plan_steps(lengths, 4, 8, pack=True, known=known)
      )
    self.assertLessEqual(len(known), packing.MAX_SHAPES + math.ceil(math.log2(700 / 8)))

  @settings(deadline=None)
  @given(_LENGTHS, st.sampled_from([4, 8]), st.sampled_from([1, 2, 4]))
  def test_the_parts_of_all_hosts_are_the_batch(self, lengths, batch_size, hosts):
    rows = make_rows(lengths)
    local = batch_size // hosts
    for step in packing.plan_steps(lengths, batch_size, 16, pack=True):
      whole = packing.step_batch(step, rows, 0, batch_size)
      parts = [packing.step_batch(step, rows, host * local, local) for host in range(hosts)]
      for name in ("inputs", "inputs_segmentation", "inputs_position", "document_idx"):
        joined = np.concatenate([getattr(part, name) for part in parts])
        np.testing.assert_array_equal(joined, getattr(whole, name))
      self.assertEqual(
          int(np.count_nonzero(whole.inputs_segmentation)),
          sum(lengths[number] for members in step.rows for number in members),
      )

  def test_every_process_makes_the_same_plan(self):
    plans = {
        subprocess.run(
            [
                sys.executable,
                "-c",
                "from tests.evaluation import packing_test; packing_test.print_plan()",
            ],
            env=distributed.child_environment({"PYTHONHASHSEED": seed}),
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    self.assertLen(plans, 1)
    self.assertIn(b"Step(length=", plans.pop())

  @parameterized.parameters(*lmeval.SETS)
  def test_realistic_requests_have_less_than_five_percent_padding_in_batches_of_64(self, name):
    lengths = lmeval.make_lengths(8192, name)
    steps = packing.plan_steps(lengths, 64, 16, pack=True, max_length=2048, overhead=3)
    run = 64 * sum(step.length for step in steps)  # filler rows included
    self.assertLess(1 - sum(lengths) / run, 0.05)
    self.assertLessEqual(len({step.length for step in steps}), packing.MAX_SHAPES)

  def test_rows_are_no_longer_than_the_longest_request_unless_they_are_short(self):
    for lengths, most in (([600] * 3 + [20] * 500, 608), ([20] * 500, 256)):
      steps = packing.plan_steps(lengths, 4, 16, pack=True, max_length=4096)
      self.assertTrue(steps[0].is_packed)
      self.assertLessEqual(max(step.length for step in steps), most)

  def test_packing_is_not_used_if_it_does_not_pay(self):
    self.assertFalse(any(s.is_packed for s in packing.plan_steps([250] * 64, 8, 16, pack=True)))
    # These share rows if that is all, and not if something else must be run first.
    few = [64, 30, 30, 4]
    self.assertTrue(packing.plan_steps(few, 2, 64, pack=True)[0].is_packed)
    self.assertFalse(packing.plan_steps(few, 2, 64, pack=True, overhead=3)[0].is_packed)

  def test_lengths_that_are_compiled_are_used_again(self):
    rng = np.random.default_rng(0)
    known: set[int] = set()
    for _ in range(2):
      before = set(known)
      lengths = rng.integers(1, 100, size=500).tolist()
      known.update(s.length for s in packing.plan_steps(lengths, 8, 16, pack=True, known=known))
    self.assertEqual(known, before)

  def test_positions_and_segments_begin_again_with_each_request(self):
    rows = [
        requests_lib.Row(np.array([7, 8, 9, 10]), 2, 4, 1),
        requests_lib.Row(np.array([5, 6], np.uint16), 1, 0),
    ]
    batch = packing.step_batch(packing.Step(6, ((0, 1),)), rows, 0, 2)
    found = {name: np.asarray(getattr(batch, name)).tolist() for name in vars(batch)}
    none = [0] * 6
    self.assertEqual(
        found,
        {
            "inputs": [[7, 8, 9, 5, 0, 0], none],
            "targets": [[8, 9, 10, 6, 0, 0], none],
            "inputs_position": [[0, 1, 2, 0, 0, 0], none],
            "targets_position": [[0, 1, 2, 0, 0, 0], none],
            "inputs_segmentation": [[1, 1, 1, 2, 0, 0], none],
            "targets_segmentation": [[0, 1, 1, 2, 0, 0], none],
            "document_idx": [5, 0],
            "sequence_idx": [1, 0],
            "_document_borders": [[True, False, False, True, True, False], [True] + [False] * 5],
        },
    )
    self.assertEqual(
        packing.row_starts(packing.Step(6, ((0, 1), (1,))), rows), ([0, 1, 1], [0, 3, 6])
    )


_LENGTH_MULTIPLES = st.sampled_from([1, 4, 16])


def least_padding(rounded, budget, known):
  """Returns the least padding with `budget` new lengths, by trying all; None if none fits."""
  found = []
  for count in range(budget + 1):
    for bought in itertools.combinations(sorted(set(rounded)), count):
      allowed = sorted({*bought, *known})
      if allowed and allowed[-1] >= max(rounded):
        found.append(sum(min(a for a in allowed if a >= r) - r for r in rounded))
  return min(found, default=None)


class LMEvalLengthsTest(absltest.TestCase):

  @settings(deadline=None)
  @given(
      st.lists(st.integers(0, 100), min_size=1, max_size=9),
      _LENGTH_MULTIPLES,
      st.integers(1, 5),
      st.sets(st.integers(1, 7), max_size=3),
  )
  def test_no_other_choice_of_lengths_pads_less(self, longest, multiple, shapes, known):
    known = {multiple * factor for factor in known}
    found = packing.plan_lengths(longest, multiple, max_shapes=shapes, known=known)
    rounded = [packing.round_up(max(n, 1), multiple) for n in longest]
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
      self.assertEqual(new, {packing.power_of_two(max(rounded), multiple)})

  @settings(deadline=None)
  @given(st.lists(st.lists(st.integers(1, 5000), min_size=1, max_size=40), min_size=1, max_size=6))
  def test_the_number_of_shapes_is_bounded_whatever_is_evaluated(self, evaluations):
    known: set[int] = set()
    for longest in evaluations:
      known.update(packing.plan_lengths(longest, 16, known=known))
    doublings = math.ceil(math.log2(5000 / 16))
    self.assertLessEqual(len(known), packing.MAX_SHAPES + doublings)

  def test_no_batches_give_no_lengths(self):
    self.assertEqual(packing.plan_lengths([], 16), [])


if __name__ == "__main__":
  absltest.main()
