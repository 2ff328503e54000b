"""Tests of where a run continues when its iterator moves to a step."""

import numpy as np
from absl.testing import absltest

from tests.loader import cases


def setUpModule():
  cases.compile_fast()


class RestartTest(cases.LoaderCase):

  def test_going_to_a_step_continues_there_and_a_position_anchors_it(self):
    expected = np.concatenate(cases.take_inputs(self.train(), 6))
    iterator = self.train()
    cases.take_inputs(iterator, 1)
    iterator.go_to(4)
    np.testing.assert_array_equal(cases.take_inputs(iterator, 1)[0], expected[16:20])
    iterator.go_to(100, 3)
    np.testing.assert_array_equal(cases.take_inputs(iterator, 2)[1], expected[7:11])
    self.assertEqual((iterator.step, iterator.position), (102, 11))
    iterator.go_to(99)  # The history knows where it was before.
    self.assertEqual((iterator.step, iterator.position), (99, 396))

  def test_going_to_a_step_whose_past_is_unknown_begins_the_history_there(self):
    for position, expected in ((None, 16), (3, 3)):
      iterator = self.train()
      iterator.go_to(4, position, keep_history=False)
      self.assertEqual((iterator.step, iterator.position), (4, expected))
      self.assertEqual([(e.step, e.position) for e in iterator.history.entries], [(4, expected)])

  def test_going_to_a_step_keeps_the_history_up_to_it(self):
    small = self.train(global_batch_size_to_load=4)
    cases.take_inputs(small, 5)
    iterator = self.train(global_batch_size_to_load=8)
    iterator.set_state(small.get_state())
    self.assertLen(iterator.history.entries, 2)
    iterator.go_to(10)
    self.assertEqual((iterator.position, len(iterator.history.entries)), (60, 2))
    iterator.go_to(3)
    self.assertEqual(iterator.position, 12)
    state = iterator.get_state()
    self.assertEqual([entry["step"] for entry in state["history"]], [0, 3])


if __name__ == "__main__":
  absltest.main()
