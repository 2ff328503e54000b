"""Tests of batch schedules and epochs."""

import hypothesis
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import strategies as st

from maxtext_olmo import errors
from maxtext_olmo.order import epochs as epochs_lib
from maxtext_olmo.order import schedule
from maxtext_olmo.order import skips

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

  def test_the_example_with_epochs_holds(self):
    cut = schedule.BatchSchedule(((0, 4),)).within(epochs_lib.Epochs.constant(10))
    self.assertEqual([cut.start(k) for k in range(5)], [0, 4, 10, 14, 20])
    self.assertEqual([cut.position(k) for k in range(5)], [0, 4, 8, 14, 18])
    self.assertEqual([cut.step_at(p) for p in (7, 8, 9, 10, 17, 18)], [1, 2, 2, 2, 3, 4])

  @hypothesis.given(
      stages=_STAGES,
      anchor=st.tuples(st.integers(0, 30), st.integers(0, 99)),
      by_position=st.booleans(),
      lengths=st.one_of(
          st.none(),
          st.lists(st.tuples(st.integers(1, 3), st.integers(12, 40)), min_size=1, max_size=3),
      ),
  )
  @hypothesis.settings(deadline=None, max_examples=300)
  def test_it_equals_a_walk_over_the_steps(self, stages, anchor, by_position, lengths):
    anchored = schedule.BatchSchedule(stages, by_position=by_position)
    within = None
    if lengths is not None:
      firsts = [sum(count for count, _ in lengths[:i]) for i in range(len(lengths))]
      within = epochs_lib.Epochs(tuple(zip(firsts, (length for _, length in lengths))))
      anchored = anchored.within(within)
    anchored = anchored.anchored(*anchor)
    position = anchor[1]
    starts, sizes = anchored.block(anchor[0], 40)
    for step in range(anchor[0], anchor[0] + 40):
      reached = position if by_position else step
      size = [size for first, size in stages if first <= reached][-1]
      start = position
      if within is not None:
        end = within.start(within.epoch(position) + 1)
        start = position if position + size <= end else end
      self.assertEqual(anchored.position(step), position)
      self.assertEqual(anchored.start(step), start)
      self.assertEqual(anchored.size(step), size)
      self.assertEqual((starts[step - anchor[0]], sizes[step - anchor[0]]), (start, size))
      for place in {position, start, start + size - 1}:
        self.assertEqual(anchored.step_at(place), step)
      position = start + size

  def test_the_example_with_skips_holds(self):
    skipping = schedule.BatchSchedule(((0, 4),)).skipping(skips.Skips.of([(4, 7)]))
    self.assertEqual([skipping.start(k) for k in range(4)], [0, 7, 11, 15])
    self.assertEqual([skipping.position(k) for k in range(4)], [0, 4, 11, 15])
    self.assertEqual([skipping.step_at(p) for p in (3, 4, 6, 7, 10, 11)], [0, 1, 1, 1, 1, 2])

  @hypothesis.given(
      stages=_STAGES,
      anchor=st.tuples(st.integers(0, 30), st.integers(0, 60)),
      by_position=st.booleans(),
      length=st.one_of(st.none(), st.integers(60, 90)),
      ranges=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 15)), max_size=3).map(
          lambda pairs: [(first, first + size) for first, size in pairs]
      ),
  )
  @hypothesis.settings(deadline=None, max_examples=150)
  def test_with_skips_it_equals_a_walk_over_the_samples(
      self, stages, anchor, by_position, length, ranges
  ):
    some = schedule.BatchSchedule(stages, by_position=by_position).skipping(skips.Skips.of(ranges))
    if length is not None:
      some = some.within(epochs_lib.Epochs.constant(length))
    some = some.anchored(*anchor)
    position = anchor[1]
    starts, sizes = some.block(anchor[0], 30)
    for number, step in enumerate(range(anchor[0], anchor[0] + 30)):
      reached = step
      if by_position:  # A stage has begun if all samples before it are consumed or skipped.
        reached = position
        while any(first <= reached < end for first, end in ranges):
          reached += 1
      size = [size for first, size in stages if first <= reached][-1]

      def samples_from(position):
        epoch = None
        taken = []
        while len(taken) < size:  # noqa: B023
          if not any(first <= position < end for first, end in ranges):
            if length is not None and taken and position // length != epoch:
              taken = []  # The batch begins at the new epoch.
            if length is not None:
              epoch = position // length
            taken.append(position)
          position += 1
        return taken

      taken = samples_from(position)
      self.assertEqual(some.size(step), size)
      self.assertEqual(some.start(step), taken[0])
      self.assertEqual(
          some.skips.positions(starts[number] + np.arange(sizes[number])).tolist(), taken
      )
      position = taken[-1] + 1
      self.assertEqual(some.position(step + 1), position)

  def test_an_epoch_that_is_skipped_whole_is_a_config_error(self):
    within = schedule.BatchSchedule.constant(4).within(epochs_lib.Epochs.constant(10))
    with self.assertRaisesRegex(errors.ConfigError, "positions 8 to 21 cover all of epoch 1"):
      within.skipping(skips.Skips.of([(8, 21)]))
    with self.assertRaisesRegex(errors.ConfigError, "epoch of 3 instances .excluding skip"):
      within.skipping(skips.Skips.of([(11, 18)]))

  def test_a_block_may_begin_with_any_step(self):
    ramp = schedule.BatchSchedule(((0, 4), (3, 8))).within(epochs_lib.Epochs.constant(30))
    starts, sizes = ramp.block(0, 20)
    for first in range(20):
      later = ramp.block(first, 20 - first)
      self.assertEqual(
          [a.tolist() for a in later], [starts[first:].tolist(), sizes[first:].tolist()]
      )
    self.assertEqual([a.tolist() for a in ramp.block(5, 0)], [[], []])

  def test_a_distant_step_is_found_without_a_walk(self):
    far = schedule.BatchSchedule(((0, 7), (10, 11))).within(epochs_lib.Epochs.constant(10**9 + 7))
    step = 10**15
    start = far.start(step)
    self.assertEqual(far.step_at(start), step)
    self.assertLess(start % (10**9 + 7), 10**9)

  def test_boundaries_may_be_in_tokens(self):
    ramp = schedule.BatchSchedule.from_tokens(((0, 4), (90, 8)), sequence_length=8)
    # 90 tokens are 12 samples of 8, the last of them incomplete; the third step ends there.
    self.assertEqual([ramp.size(k) for k in range(5)], [4, 4, 4, 8, 8])
    moved = ramp.anchored(7, 9)
    self.assertEqual([moved.size(k) for k in range(7, 10)], [4, 8, 8])

  def test_factors_apply_to_the_initial_size_and_do_not_accumulate(self):
    ramp = schedule.BatchSchedule.from_factors(8, ((2, 0.5), (4, 2), (6, 1.99)))
    self.assertEqual(ramp.stages, ((0, 8), (2, 4), (4, 16), (6, 15)))
    self.assertEqual(
        schedule.BatchSchedule.from_factors(8, ((0, 0.25), (64, 1)), sequence_length=8),
        schedule.BatchSchedule.from_tokens(((0, 2), (64, 8)), sequence_length=8),
    )
    for factor in (0.1, 0, -1, float("nan"), float("inf")):
      with self.assertRaisesRegex(errors.ConfigError, "at least one row, but 8 rows times"):
        schedule.BatchSchedule.from_factors(8, ((0, factor),))

  def test_a_batch_that_fits_into_no_epoch_is_a_config_error(self):
    with self.assertRaisesRegex(errors.ConfigError, "batch of 9 rows does not fit .* 8 instances"):
      schedule.BatchSchedule.constant(9).within(epochs_lib.Epochs(((0, 8), (1, 20))))

  def test_an_anchor_that_agrees_changes_nothing(self):
    constant = schedule.BatchSchedule.constant(8)
    self.assertIs(constant.anchored(5, 40), constant)
    moved = constant.anchored(5, 41)
    self.assertEqual((moved.start(5), moved.start(7), moved.step_at(57)), (41, 57, 7))
    self.assertIs(moved.anchored(6, 49), moved)

  def test_steps_before_an_anchor_are_unknown(self):
    moved = schedule.BatchSchedule.constant(8).anchored(5, 41)
    with self.assertRaisesRegex(errors.OrderError, "Step 4 lies before step 5"):
      moved.start(4)
    with self.assertRaisesRegex(errors.OrderError, "Position 40 lies before position 41"):
      moved.step_at(40)

  @parameterized.parameters(
      ((), "must begin at step 0"),
      (((1, 8),), "must begin at step 0"),
      (((0, 8), (0, 4)), "steps must ascend"),
      (((0, 8), (5, 0)), "at least one row"),
  )
  def test_an_impossible_schedule_is_a_config_error(self, stages, message):
    with self.assertRaisesRegex(errors.ConfigError, message):
      schedule.BatchSchedule(stages)

  def test_negative_steps_and_anchors_are_refused(self):
    with self.assertRaisesRegex(errors.OrderError, "Steps count from 0, got -1"):
      schedule.BatchSchedule.constant(8).size(-1)
    with self.assertRaisesRegex(errors.OrderError, "0 or more, got step 1 at position -3"):
      schedule.BatchSchedule.constant(8).anchored(1, -3)


if __name__ == "__main__":
  absltest.main()
