"""Tests of the orders."""

import pickle
import tempfile

import hypothesis
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import strategies as st

from maxtext_olmo import errors
from maxtext_olmo.order import permutations


class OrderTest(parameterized.TestCase):

  @hypothesis.given(
      name=st.sampled_from(list(permutations.order_names())),
      chunks=st.integers(1, 500),
      chunk_size=st.sampled_from([1, 2, 4, 7]),
      seed=st.integers(0, 2**63),
      epoch=st.integers(0, 5),
  )
  @hypothesis.settings(max_examples=60, deadline=None)
  def test_an_epoch_has_each_instance_once_and_keeps_chunks_together(
      self, name, chunks, chunk_size, seed, epoch
  ):
    n = chunks * chunk_size
    with tempfile.TemporaryDirectory() as cache:
      order = permutations.make_order(
          name, num_instances=n, seed=seed, chunk_size=chunk_size, cache_dir=cache
      )
      ids = order.ids(epoch, np.arange(n))
    np.testing.assert_array_equal(np.sort(ids), np.arange(n))
    whole = ids.reshape(-1, chunk_size)
    np.testing.assert_array_equal(whole - whole[:, :1], np.tile(np.arange(chunk_size), (chunks, 1)))
    self.assertFalse((whole[:, 0] % chunk_size).any())

  @hypothesis.given(
      name=st.sampled_from(list(permutations.order_names())),
      chunks=st.integers(1, 500),
      chunk_size=st.sampled_from([1, 2, 4, 7]),
      seed=st.integers(0, 2**63),
      epoch=st.integers(0, 5),
  )
  @hypothesis.settings(max_examples=60, deadline=None)
  def test_places_is_the_inverse_of_ids(self, name, chunks, chunk_size, seed, epoch):
    n = chunks * chunk_size
    with tempfile.TemporaryDirectory() as cache:
      order = permutations.make_order(
          name, num_instances=n, seed=seed, chunk_size=chunk_size, cache_dir=cache
      )
      places = np.random.default_rng(0).permutation(n)
      np.testing.assert_array_equal(order.places(epoch, order.ids(epoch, places)), places)
      self.assertEqual(order.places(epoch, np.array([-1, n, n + 70_000])).tolist(), [-1, -1, -1])
      self.assertEqual(order.places(epoch, np.zeros(0, np.int64)).shape, (0,))
      which, found = order.visits(epoch, np.array([n, n - 1, -5, 0]))
      self.assertEqual(which.tolist(), [1, 3])
      np.testing.assert_array_equal(order.ids(epoch, found), [n - 1, 0])

  @hypothesis.given(
      chunks=st.integers(1, 2**40),
      chunk_size=st.sampled_from([1, 2, 4, 7]),
      seed=st.integers(0, 2**63),
      epoch=st.integers(0, 1000),
      data=st.data(),
  )
  @hypothesis.settings(max_examples=60, deadline=None)
  def test_places_is_the_inverse_of_ids_up_to_2_to_the_40(
      self, chunks, chunk_size, seed, epoch, data
  ):
    n = chunks * chunk_size
    order = permutations.make_order("feistel", num_instances=n, seed=seed, chunk_size=chunk_size)
    drawn = data.draw(st.lists(st.integers(0, n - 1), max_size=20))
    places = np.array([0, n - 1, *drawn], np.int64)
    np.testing.assert_array_equal(order.places(epoch, order.ids(epoch, places)), places)
    np.testing.assert_array_equal(order.ids(epoch, order.places(epoch, places)), places)

  def test_a_stored_order_of_many_chunks_is_inverted_by_one_scan(self):
    n = 5_000_000
    order = permutations.make_order(
        "olmo_core", num_instances=n, seed=1, cache_dir=self.create_tempdir().full_path
    )
    places = np.array([0, 4_194_303, 4_194_304, n - 1, 77])
    np.testing.assert_array_equal(order.places(0, order.ids(0, places)), places)

  def test_epochs_and_seeds_give_different_orders_and_do_not_shift_into_each_other(self):
    def first(seed, epoch):
      order = permutations.make_order("feistel", num_instances=10_000, seed=seed)
      return tuple(order.ids(epoch, np.arange(50)).tolist())

    orders = {(s, e): first(s, e) for s in range(4) for e in range(4)}
    self.assertLen(set(orders.values()), len(orders))
    self.assertNotEqual(orders[0, 1], orders[1, 0])

  def test_an_order_survives_pickling(self):
    order = permutations.make_order("feistel", num_instances=100, seed=1)
    copy = pickle.loads(pickle.dumps(order))
    np.testing.assert_array_equal(copy.ids(1, np.arange(100)), order.ids(1, np.arange(100)))
    self.assertEqual(repr(copy), repr(order))

  def test_an_unknown_order_is_a_config_error_that_lists_the_known_ones(self):
    with self.assertRaisesRegex(errors.ConfigError, "'random' is not a known order.*feistel"):
      permutations.make_order("random", num_instances=10, seed=0)


if __name__ == "__main__":
  absltest.main()
