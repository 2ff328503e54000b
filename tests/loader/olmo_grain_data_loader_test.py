"""Tests of `make_olmo_grain_data_loader`: it serves, by records, what the train iterator does."""

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import maxtext_olmo
from maxtext_olmo.order import permutations
from tests import workers as workers_lib
from tests.loader import cases

STARTS_PROCESSES = True


def setUpModule():
  cases.compile_fast()


class DataLoaderTest(cases.LoaderCase):

  def loader(self, **values):
    return maxtext_olmo.make_olmo_grain_data_loader(
        maxtext_olmo.load_index(self.index_path),
        **{"seed": 11, "batch_size": 4, "shard_index": 0, "shard_count": 1, **values},
    )

  def inputs(self, loader, count):
    iterator = iter(loader)
    return [next(iterator)["inputs"] for _ in range(count)]

  @parameterized.parameters(0, 1, 3)
  def test_its_batches_are_those_of_the_train_iterator_for_any_workers(self, workers):
    expected = cases.take_inputs(self.train(), 36)
    with workers_lib.started_quickly():
      loader = self.loader(grain_worker_count=workers, grain_worker_buffer_size=2)
      np.testing.assert_array_equal(self.inputs(loader, 36), expected)

  @parameterized.parameters(2, 4)
  def test_hosts_share_the_global_batches(self, hosts):
    expected = cases.take_inputs(self.train(), 6)
    parts = []
    for host in range(hosts):
      shard = {"shard_index": host, "shard_count": hosts, "initial_step": 8 // hosts}
      parts.append(self.inputs(self.loader(batch_size=4 // hosts, **shard), 4))
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), expected[2:])

  def test_all_arrays_equal_those_of_the_train_iterator(self):
    batch, expected = next(iter(self.loader())), next(self.train())
    self.assertEqual(set(batch), set(expected))
    for name, array in batch.items():
      np.testing.assert_array_equal(array, expected[name])

  def test_without_shift_it_gives_the_tokens_as_they_are(self):
    loader = self.loader(shift_to_inputs_targets=False, apply_ngram_filter=False)
    batch = next(iter(loader))
    self.assertEqual(set(batch), {"tokens", "instance_id", "file_id"})
    np.testing.assert_array_equal(batch["tokens"], self.rows[batch["instance_id"]])

  def test_the_filter_masks_and_can_be_left_out(self):
    self.assertIn("instance_mask", next(iter(self.loader(shift_to_inputs_targets=False))))

  def test_the_maxtext_order_is_served_too(self):
    cache = self.create_tempdir().full_path
    got = self.inputs(self.loader(order="maxtext", order_cache_dir=cache), 3)
    order = permutations.make_order("maxtext", num_instances=123, seed=11, cache_dir=cache)
    np.testing.assert_array_equal(np.concatenate(got), self.rows[order.ids(0, np.arange(12))])

  def test_grain_state_restores_into_the_same_workers(self):
    iterator = iter(self.loader())
    for _ in range(3):
      next(iterator)
    state = iterator.get_state()
    expected = next(iterator)["inputs"]
    other = iter(self.loader())
    other.set_state(state)
    np.testing.assert_array_equal(next(other)["inputs"], expected)


if __name__ == "__main__":
  absltest.main()
