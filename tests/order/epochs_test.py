import hypothesis
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import strategies as st

from maxtext_olmo import errors
from maxtext_olmo.order import epochs as epochs_lib


class EpochsTest(parameterized.TestCase):

  def test_the_example_of_the_module_holds(self):
    grown = epochs_lib.Epochs(((0, 5), (2, 8)))
    self.assertEqual([grown.length(e) for e in range(4)], [5, 5, 8, 8])
    self.assertEqual([grown.start(e) for e in range(4)], [0, 5, 10, 18])

  @hypothesis.given(
      parts=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9)), min_size=1, max_size=4)
  )
  @hypothesis.settings(deadline=None)
  def test_it_equals_a_walk_over_the_places(self, parts):
    firsts = [sum(count for count, _ in parts[:i]) for i in range(len(parts))]
    under_test = epochs_lib.Epochs(tuple(zip(firsts, (length for _, length in parts))))
    walk = [
        (epoch, place)
        for epoch in range(firsts[-1] + 3)
        for place in range(parts[np.searchsorted(firsts, epoch, side="right") - 1][1])
    ]
    found = under_test.locate(np.arange(len(walk)))
    self.assertEqual(list(zip(*(column.tolist() for column in found))), walk)
    for position, (epoch, place) in enumerate(walk):
      self.assertEqual(under_test.epoch(position), epoch)
      self.assertEqual(under_test.start(epoch), position - place)

  @parameterized.parameters(((),), (((1, 5),),), (((0, 5), (0, 6)),), (((0, 0),),))
  def test_impossible_lengths_are_refused(self, lengths):
    with self.assertRaises(errors.OrderError):
      epochs_lib.Epochs(lengths)

  def test_negative_positions_and_epochs_are_refused(self):
    with self.assertRaisesRegex(errors.OrderError, "Epochs count from 0, got -1"):
      epochs_lib.Epochs.constant(5).start(-1)
    with self.assertRaisesRegex(errors.OrderError, "Positions count from 0, got -2"):
      epochs_lib.Epochs.constant(5).epoch(-2)


if __name__ == "__main__":
  absltest.main()
