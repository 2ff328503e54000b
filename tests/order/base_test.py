import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.order import base
from maxtext_olmo.order import epochs as epochs_lib
from maxtext_olmo.order import permutations


class _Reversed(base.Order):
  """The least that an order must have."""

  name = "reversed"

  def _chunks(self, epoch, places):
    return self.epochs.length(epoch) // self.chunk_size - 1 - places


class OrderTest(parameterized.TestCase):

  def test_an_order_needs_only_its_chunks(self):
    order = _Reversed(num_instances=6, seed=0, chunk_size=2)
    self.assertEqual(order.ids(0, np.arange(6)).tolist(), [4, 5, 2, 3, 0, 1])
    self.assertEqual(order.places(0, np.array([5, 0, 6, -1])).tolist(), [1, 4, -1, -1])
    which, places = order.visits(0, np.array([9, 3]))
    self.assertEqual((which.tolist(), places.tolist()), ([1], [3]))

  def test_positions_of_a_run_pass_from_epoch_to_epoch(self):
    order = permutations.make_order("feistel", num_instances=10, seed=3)
    run = order.at(np.arange(30))
    for epoch in range(3):
      np.testing.assert_array_equal(
          run[10 * epoch : 10 * epoch + 10], order.ids(epoch, np.arange(10))
      )
    np.testing.assert_array_equal(order.at(np.array([25, 3, 14])), run[[25, 3, 14]])
    self.assertEqual(order.at(np.array([], np.int64)).shape, (0,))
    epochs, places = order.locate(np.array([9, 10, 29]))
    self.assertEqual((epochs.tolist(), places.tolist()), ([0, 1, 2], [9, 0, 9]))

  def test_halving_the_sequence_length_keeps_the_tokens(self):
    long = permutations.make_order("feistel", num_instances=8, seed=1, chunk_size=1)
    short = permutations.make_order("feistel", num_instances=16, seed=1, chunk_size=2)
    long_ids = long.ids(0, np.arange(8))
    np.testing.assert_array_equal(
        short.ids(0, np.arange(16)), np.stack([2 * long_ids, 2 * long_ids + 1], 1).ravel()
    )

  def test_places_outside_an_epoch_are_refused(self):
    order = permutations.make_order("feistel", num_instances=10, seed=0)
    with self.assertRaisesRegex(errors.OrderError, r"are in \[0, 10\), got 4 to 10"):
      order.ids(0, np.array([4, 10]))
    with self.assertRaisesRegex(errors.OrderError, "Epochs count from 0, got -1"):
      order.ids(-1, np.array([4]))

  @parameterized.parameters((0, 1), (10, 3))
  def test_sizes_that_cannot_work_are_refused(self, num_instances, chunk_size):
    with self.assertRaises(errors.OrderError):
      permutations.make_order("feistel", num_instances=num_instances, seed=0, chunk_size=chunk_size)

  def test_epochs_may_differ_in_length(self):
    lengths = epochs_lib.Epochs(((0, 10), (2, 16)))
    grown = permutations.make_order("feistel", num_instances=16, seed=3).with_epochs(lengths)
    small = permutations.make_order("feistel", num_instances=10, seed=3)
    large = permutations.make_order("feistel", num_instances=16, seed=3)
    run = grown.at(np.arange(52))
    np.testing.assert_array_equal(run[:20], small.at(np.arange(20)))
    for epoch in (2, 3):
      start = 20 + 16 * (epoch - 2)
      np.testing.assert_array_equal(run[start : start + 16], large.ids(epoch, np.arange(16)))
    self.assertEqual(grown.places(1, np.array([10, 15])).tolist(), [-1, -1])
    np.testing.assert_array_equal(grown.places(2, run[20:36]), np.arange(16))


if __name__ == "__main__":
  absltest.main()
