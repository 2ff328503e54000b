"""Tests of the stream."""

import tempfile

import hypothesis
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import strategies as st

from maxtext_olmo import errors
from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.order import permutations
from maxtext_olmo.order import stream
from maxtext_olmo.order import stream as stream_lib
from tests import corpora


class StreamTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    path, rows = corpora.write_corpus(self.create_tempdir().full_path)
    self.index = index_lib.load_index(path)
    self.num_instances = len(rows)

  @parameterized.parameters("feistel", "sequential")
  def test_train_never_sees_what_eval_sees_in_any_epoch(self, order):
    train = stream_lib.train_stream(self.index, order=order, seed=0, held_out_instances=20)
    evaluation = stream_lib.eval_stream(self.index, held_out_instances=20)
    held = evaluation.instance_ids(np.arange(20))
    per_epoch = self.num_instances - 20
    for epoch in range(3):
      seen = train.instance_ids(epoch * per_epoch + np.arange(per_epoch))
      self.assertCountEqual(np.concatenate([seen, held]).tolist(), range(self.num_instances))

  def test_identity_names_what_decides_the_order(self):
    stream = stream_lib.train_stream(self.index, order="feistel", seed=7)
    self.assertEqual(
        stream.identity(),
        {"fingerprint": self.index.fingerprint, "order": "feistel", "seed": 7, "split": "none"},
    )

  def test_a_stream_ends_after_its_epochs(self):
    endless = stream_lib.train_stream(self.index, order="feistel", seed=7)
    self.assertIsNone(endless.num_positions)
    self.assertTrue(endless.endless and endless.has(10**12))
    finite = stream_lib.train_stream(self.index, order="feistel", seed=7, num_epochs=3)
    end = 3 * self.num_instances
    self.assertEqual(finite.num_positions, end)
    self.assertFalse(finite.endless)
    self.assertEqual([finite.has(end - 1), finite.has(end)], [True, False])

  @parameterized.parameters(0, 20)
  def test_locate_returns_the_epoch_and_instance_of_a_position(self, held_out):
    stream = stream_lib.train_stream(
        self.index, order="feistel", seed=7, held_out_instances=held_out
    )
    positions = np.random.default_rng(0).integers(0, 3 * self.num_instances, 50)
    epochs, instances = stream.locate(positions)
    np.testing.assert_array_equal(epochs, positions // (self.num_instances - held_out))
    np.testing.assert_array_equal(instances, stream.instance_ids(positions))

  @hypothesis.given(
      held_out=st.integers(0, 100),
      order=st.sampled_from(["feistel", "sequential"]),
      epoch=st.integers(0, 3),
  )
  @hypothesis.settings(max_examples=30, deadline=None)
  def test_positions_is_the_inverse_of_instance_ids(self, held_out, order, epoch):
    stream = stream_lib.train_stream(self.index, order=order, seed=7, held_out_instances=held_out)
    length = stream.order.num_instances
    positions = epoch * length + np.arange(length)
    rows = stream.instance_ids(positions)
    np.testing.assert_array_equal(stream.positions(epoch, rows), positions)
    evaluation = stream_lib.eval_stream(self.index, held_out_instances=held_out or None)
    if held_out:
      held = evaluation.instance_ids(np.arange(held_out))
      self.assertEqual(set(stream.positions(epoch, held)), {-1})
      self.assertEqual(set(evaluation.positions(0, rows)), {-1})
      np.testing.assert_array_equal(evaluation.positions(0, held), np.arange(held_out))

  @hypothesis.given(
      order=st.sampled_from(list(permutations.order_names())),
      windows=st.integers(2, 400),
      large=st.integers(2**20, 2**40),
      chunk_size=st.sampled_from([1, 2, 4]),
      epoch=st.integers(0, 3),
      data=st.data(),
  )
  @hypothesis.settings(max_examples=60, deadline=None)
  def test_positions_is_the_inverse_for_any_order_size_chunk_and_split(
      self, order, windows, large, chunk_size, epoch, data
  ):
    if order == "feistel" and data.draw(st.booleans()):
      windows = large
    held_out = data.draw(st.integers(0, min(windows - 1, 200)))
    split = stream_lib.Split(windows, chunk_size, held_out, key="k", keyed_windows=windows)
    with tempfile.TemporaryDirectory() as cache:
      made = permutations.make_order(
          order,
          num_instances=split.num_train,
          seed=data.draw(st.integers(0, 2**31)),
          chunk_size=chunk_size,
          cache_dir=cache,
      )
      stream = stream_lib.Stream("f", 8, made, split)
      places = data.draw(st.lists(st.integers(0, split.num_train - 1), max_size=20))
      places = np.array([0, split.num_train - 1, *places], np.int64)
      positions = epoch * split.num_train + places
      instances = stream.instance_ids(positions)
      np.testing.assert_array_equal(stream.positions(epoch, instances), positions)
      held = split.eval_ids(np.arange(split.num_eval))
      self.assertTrue((stream.positions(epoch, held) == -1).all())
      made.close()

  def test_evaluation_on_another_index_takes_all_of_it_once(self):
    stream = stream_lib.eval_stream(self.index)
    self.assertEqual(stream.num_positions, self.num_instances)
    np.testing.assert_array_equal(
        stream.instance_ids(np.arange(self.num_instances)), np.arange(self.num_instances)
    )


class SplitTest(parameterized.TestCase):

  @hypothesis.given(
      windows=st.integers(2, 300), chunk_size=st.sampled_from([1, 2, 4]), data=st.data()
  )
  @hypothesis.settings(max_examples=60, deadline=None)
  def test_train_and_held_out_are_disjoint_and_complete(self, windows, chunk_size, data):
    held_out = data.draw(st.integers(0, windows - 1))
    split = stream.Split(windows, chunk_size, held_out, key="k", keyed_windows=windows)
    train = split.train_ids(np.arange(split.num_train))
    held = split.eval_ids(np.arange(split.num_eval)) if held_out else np.array([], np.int64)
    self.assertTrue(np.all(np.diff(train) > 0))
    np.testing.assert_array_equal(split.train_ranks(train), np.arange(split.num_train))
    if held_out:
      np.testing.assert_array_equal(split.eval_ranks(held), np.arange(split.num_eval))
      self.assertEqual(set(split.train_ranks(held)), {-1})
      self.assertEqual(set(split.eval_ranks(train)), {-1})
    np.testing.assert_array_equal(
        np.sort(np.concatenate([train, held])), np.arange(windows * chunk_size)
    )
    np.testing.assert_array_equal(
        held // chunk_size * chunk_size, np.repeat(held[::chunk_size], chunk_size)
    )

  def test_files_appended_later_do_not_move_the_held_out_set(self):
    before = stream.Split(100, 2, 10, key="k", keyed_windows=100)
    after = stream.Split(140, 2, 10, key="k", keyed_windows=100)
    ranks = np.arange(before.num_eval)
    np.testing.assert_array_equal(before.eval_ids(ranks), after.eval_ids(ranks))
    np.testing.assert_array_equal(
        after.train_ids(np.arange(before.num_train)), before.train_ids(np.arange(before.num_train))
    )

  def test_the_held_out_set_is_uniform_over_the_corpus(self):
    counts = np.zeros(10)
    for key in range(300):
      split = stream.Split(1000, 1, 50, key=str(key), keyed_windows=1000)
      counts += np.bincount(split.eval_ids(np.arange(50)) // 100, minlength=10)
    chi_square = ((counts - 1500) ** 2 / 1500).sum()
    self.assertLess(chi_square, 35)

  def test_a_smaller_held_out_set_is_the_beginning_of_a_larger_one(self):
    small = stream.Split(1000, 1, 5, key="k", keyed_windows=1000)
    large = stream.Split(1000, 1, 50, key="k", keyed_windows=1000)
    np.testing.assert_array_equal(small.eval_ids(np.arange(5)), large.eval_ids(np.arange(5)))

  def test_the_split_of_an_index_takes_whole_windows(self):
    path, _ = corpora.write_corpus(
        self.create_tempdir().full_path, sequence_length=4, max_target_sequence_length=16
    )
    index = index_lib.load_index(path)
    split = stream.Split.of_index(index, 5)
    self.assertEqual((split.chunk_size, split.num_held_out, split.num_eval), (4, 2, 8))
    self.assertEqual(split.num_train + split.num_eval, index.total_instances)
    self.assertIn(index.split_key, split.identity())
    self.assertEqual(stream.Split.of_index(index, 0).identity(), "none")

  @parameterized.parameters(-1, 124, 10_000)
  def test_an_impossible_held_out_count_is_a_config_error(self, instances):
    path, rows = corpora.write_corpus(self.create_tempdir().full_path)
    self.assertLen(rows, 123)
    with self.assertRaisesRegex(errors.ConfigError, f"olmo_eval_instances={instances} cannot be"):
      stream.Split.of_index(index_lib.load_index(path), instances)


if __name__ == "__main__":
  absltest.main()
