"""Tests of train and held-out."""

import hypothesis
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import strategies as st

from maxtext_olmo import errors
from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.order import split as split_lib
from tests import corpora


class SplitTest(parameterized.TestCase):

  @hypothesis.given(
      windows=st.integers(2, 300), chunk_size=st.sampled_from([1, 2, 4]), data=st.data()
  )
  @hypothesis.settings(max_examples=60, deadline=None)
  def test_train_and_held_out_share_nothing_and_miss_nothing(self, windows, chunk_size, data):
    held_out = data.draw(st.integers(0, windows - 1))
    split = split_lib.Split(windows, chunk_size, held_out, key="k", keyed_windows=windows)
    train = split.train_ids(np.arange(split.num_train))
    held = split.eval_ids(np.arange(split.num_eval)) if held_out else np.array([], np.int64)
    self.assertTrue(np.all(np.diff(train) > 0))
    np.testing.assert_array_equal(
        np.sort(np.concatenate([train, held])), np.arange(windows * chunk_size)
    )
    np.testing.assert_array_equal(
        held // chunk_size * chunk_size, np.repeat(held[::chunk_size], chunk_size)
    )

  def test_files_appended_later_do_not_move_the_held_out_set(self):
    before = split_lib.Split(100, 2, 10, key="k", keyed_windows=100)
    after = split_lib.Split(140, 2, 10, key="k", keyed_windows=100)
    ranks = np.arange(before.num_eval)
    np.testing.assert_array_equal(before.eval_ids(ranks), after.eval_ids(ranks))
    np.testing.assert_array_equal(
        after.train_ids(np.arange(before.num_train)), before.train_ids(np.arange(before.num_train))
    )

  def test_the_held_out_set_is_uniform_over_the_corpus(self):
    counts = np.zeros(10)
    for key in range(300):
      split = split_lib.Split(1000, 1, 50, key=str(key), keyed_windows=1000)
      counts += np.bincount(split.eval_ids(np.arange(50)) // 100, minlength=10)
    chi_square = ((counts - 1500) ** 2 / 1500).sum()
    self.assertLess(chi_square, 35)

  def test_a_smaller_held_out_set_is_the_beginning_of_a_larger_one(self):
    small = split_lib.Split(1000, 1, 5, key="k", keyed_windows=1000)
    large = split_lib.Split(1000, 1, 50, key="k", keyed_windows=1000)
    np.testing.assert_array_equal(small.eval_ids(np.arange(5)), large.eval_ids(np.arange(5)))

  def test_the_split_of_an_index_takes_whole_windows(self):
    path, _ = corpora.write_corpus(
        self.create_tempdir().full_path, sequence_length=4, max_target_sequence_length=16
    )
    index = index_lib.load_index(path)
    split = split_lib.Split.of_index(index, 5)
    self.assertEqual((split.chunk_size, split.num_held_out, split.num_eval), (4, 2, 8))
    self.assertEqual(split.num_train + split.num_eval, index.total_instances)
    self.assertIn(index.split_key, split.identity())
    self.assertEqual(split_lib.Split.of_index(index, 0).identity(), "none")

  @parameterized.parameters(-1, 124, 10_000)
  def test_holding_out_all_or_nonsense_is_a_config_error(self, instances):
    path, rows = corpora.write_corpus(self.create_tempdir().full_path)
    self.assertLen(rows, 123)
    with self.assertRaisesRegex(errors.ConfigError, f"olmo_eval_instances={instances} cannot be"):
      split_lib.Split.of_index(index_lib.load_index(path), instances)


if __name__ == "__main__":
  absltest.main()
