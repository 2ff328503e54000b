"""Tests of the judgement of figures."""

import dataclasses

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.cli import bench_goals
from maxtext_olmo.cli import bench_plan
from maxtext_olmo.cli import bench_start
from tests.cli import bench_report_test


class BenchGoalsTest(parameterized.TestCase):

  def _goal(self, begins, **changes):
    goals = bench_goals.judge(bench_report_test.results(**changes))
    (found,) = [goal for goal in goals if goal.what.startswith(begins)]
    return found

  @parameterized.parameters((0.4, True), (0.416, True), (0.42, False))
  def test_a_ratio_is_reached_from_its_bound_on(self, milliseconds, reached):
    compare = [
        bench_report_test.figure(bench_plan.LIMIT, 0.25),
        bench_report_test.figure(bench_plan.INLINE, milliseconds, filter=True),
    ]
    goal = self._goal("filter on, inline, against the copy limit", compare=compare)
    self.assertAlmostEqual(goal.found, 0.25 / milliseconds)
    self.assertEqual(goal.reached, reached)

  @parameterized.parameters((599e6, True), (601e6, False))
  def test_memory_is_that_of_the_largest_corpus(self, peak, reached):
    starts = [
        bench_start.Start("this library", n, 3.0, 0.8, int(size))
        for n, size in zip(bench_start.INSTANCES, (9e9, 9e9, peak))
    ]
    self.assertEqual(self._goal("peak memory", startup=starts).reached, reached)

  @parameterized.parameters((0.009, True), (0.011, False))
  def test_the_share_of_waiting(self, share, reached):
    goal = self._goal("share of time", trainer={"wait_share": share, "step_seconds": 0.1})
    self.assertEqual((goal.found, goal.reached), (share, reached))

  def test_the_best_peer_is_the_fastest_of_those_without_filter_and_devices(self):
    slow, fast = (
        dataclasses.replace(bench_plan.MAXTEXT, name=name) for name in ("slow peer", "fast peer")
    )
    compare = [
        bench_report_test.figure(bench_plan.INLINE, 1.0),
        bench_report_test.figure(slow, 20.0),
        bench_report_test.figure(fast, 10.0),
        bench_report_test.figure(bench_plan.MAXTEXT_DEVICE, 2.0),
        bench_report_test.figure(bench_plan.OLMO_CORE, 3.0, filter=True),
    ]
    goal = self._goal("filter off, inline, against the best peer", compare=compare)
    self.assertIn("fast peer", goal.what)
    self.assertAlmostEqual(goal.found, 10.0)

  def test_what_is_written_by_hand_has_a_goal_of_its_own(self):
    compare = [
        bench_report_test.figure(bench_plan.LIMIT, 0.8),
        bench_report_test.figure(bench_plan.INLINE, 1.0),
        bench_report_test.figure(bench_plan.ALONE, 1.6),
        bench_report_test.figure(bench_plan.MAXTEXT, 10.0),
        bench_report_test.figure(bench_plan.BY_HAND, 2.0),
    ]
    goal = self._goal("filter off, inline, against a loop over a memory map", compare=compare)
    self.assertEqual((goal.found, goal.reached), (2.0, False))
    self.assertIn("by one thread 1.25 ×", goal.text)
    self.assertIn("a plain copy is 2.5 × it", goal.text)
    best = self._goal("filter off, inline, against the best peer", compare=compare)
    self.assertEqual((best.found, best.reached), (10.0, True))

  def test_what_was_not_measured_is_neither_reached_nor_missed(self):
    for goal in bench_goals.judge({}):
      self.assertEqual((goal.found, goal.reached, goal.text), (None, None, "not measured"))


if __name__ == "__main__":
  absltest.main()
