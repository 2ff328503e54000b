"""Tests of step ↔ position."""

import hypothesis
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import strategies as st

from maxtext_olmo import errors
from maxtext_olmo.order import schedule

_STAGES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=5).map(
    lambda parts: tuple(
        (sum(length for length, _ in parts[:i]), size) for i, (_, size) in enumerate(parts)
    )
)


class BatchScheduleTest(parameterized.TestCase):

  def test_the_example_of_the_module_holds(self):
    ramp = schedule.BatchSchedule(((0, 4), (3, 8)))
    self.assertEqual([ramp.size(k) for k in range(5)], [4, 4, 4, 8, 8])
    self.assertEqual([ramp.start(k) for k in range(5)], [0, 4, 8, 12, 20])
    self.assertEqual(ramp.sizes, (4, 8))

  @hypothesis.given(stages=_STAGES, anchor=st.tuples(st.integers(0, 30), st.integers(0, 99)))
  @hypothesis.settings(deadline=None)
  def test_it_equals_a_walk_over_the_steps(self, stages, anchor):
    anchored = schedule.BatchSchedule(stages).anchored(*anchor)
    position = anchor[1]
    for step in range(anchor[0], anchor[0] + 40):
      self.assertEqual(anchored.start(step), position)
      size = [size for first, size in stages if first <= step][-1]
      self.assertEqual(anchored.size(step), size)
      for offset in (0, size - 1):
        self.assertEqual(anchored.step_at(position + offset), step)
      position += size

  def test_an_anchor_that_agrees_changes_nothing(self):
    constant = schedule.BatchSchedule.constant(8)
    self.assertIs(constant.anchored(5, 40), constant)
    moved = constant.anchored(5, 41)
    self.assertEqual((moved.start(5), moved.start(7), moved.step_at(57)), (41, 57, 7))
    self.assertIs(moved.anchored(6, 49), moved)

  def test_what_lies_before_an_anchor_is_unknown(self):
    moved = schedule.BatchSchedule.constant(8).anchored(5, 41)
    with self.assertRaisesRegex(errors.OrderError, "Step 4 lies before step 5"):
      moved.start(4)
    with self.assertRaisesRegex(errors.OrderError, "Position 40 lies before position 41"):
      moved.step_at(40)

  @parameterized.parameters(
      ((), "begins at step 0"),
      (((1, 8),), "begins at step 0"),
      (((0, 8), (0, 4)), "steps increase"),
      (((0, 8), (5, 0)), "at least one row"),
  )
  def test_a_schedule_that_cannot_work_is_a_config_error(self, stages, message):
    with self.assertRaisesRegex(errors.ConfigError, message):
      schedule.BatchSchedule(stages)

  def test_negative_steps_and_anchors_are_refused(self):
    with self.assertRaisesRegex(errors.OrderError, "Steps count from 0, got -1"):
      schedule.BatchSchedule.constant(8).size(-1)
    with self.assertRaisesRegex(errors.OrderError, "0 or more, got step 1 at position -3"):
      schedule.BatchSchedule.constant(8).anchored(1, -3)


if __name__ == "__main__":
  absltest.main()
