"""Tests of maxtext_olmo.devices.global_batch; `multihost_test` has those on several processes."""

from __future__ import annotations

import doctest

import jax
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.devices import global_batch
from tests.devices import multihost_cases as cases


def setUpModule():
  jax.config.update("jax_num_cpu_devices", 4)


class GlobalBatchTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.mesh = cases.mesh((2, 2), ("data", "model"))

  def test_rows_are_split_over_all_mesh_axes_by_default(self):
    batch = {"a": np.arange(8, dtype=np.int32).reshape(8, 1), "b": (np.arange(4.0),)}
    placed = global_batch.get_next_batch_sharded(iter([batch]), self.mesh)
    np.testing.assert_array_equal(placed["a"], batch["a"])
    np.testing.assert_array_equal(placed["b"][0], batch["b"][0])
    self.assertLen({str(shard.index) for shard in placed["a"].addressable_shards}, 4)

  def test_data_sharding_chooses_the_axes_of_rows_and_columns(self):
    array = np.arange(24, dtype=np.int32).reshape(6, 4)
    spec = jax.sharding.PartitionSpec("data", "model")
    batch = {"x": array, "ids": np.arange(6, dtype=np.int32)}
    placed = global_batch.get_next_batch_sharded(iter([batch]), self.mesh, data_sharding=spec)
    self.assertEqual({shard.data.shape for shard in placed["x"].addressable_shards}, {(3, 2)})
    for shard in placed["x"].addressable_shards:
      np.testing.assert_array_equal(shard.data, array[shard.index])
    np.testing.assert_array_equal(placed["ids"], batch["ids"])

  def test_rows_that_do_not_divide_are_named_with_shape_devices_and_path(self):
    with self.assertRaisesRegex(
        errors.ConfigError,
        r"batch\['x'\]\[1\] of shape \(6, 3\) does not divide .* 6 entries on process 0, for 4"
        r" shards on its 4 local devices \(4 in all\)\. Choose a multiple of 4\.",
    ):
      batch = {"x": (np.zeros((4, 3)), np.zeros((6, 3)))}
      global_batch.get_next_batch_sharded(iter([batch]), self.mesh)

  def test_a_scalar_leaf_is_an_error(self):
    with self.assertRaisesRegex(errors.ConfigError, r"batch\['n'\] is a scalar"):
      global_batch.get_next_batch_sharded(iter([{"n": np.int32(3)}]), self.mesh)

  def test_text_leaves_are_an_error(self):
    with self.assertRaisesRegex(errors.CorpusError, r"batch\['t'\] has dtype <U1"):
      global_batch.get_next_batch_sharded(iter([{"t": np.array(["a"] * 4)}]), self.mesh)

  def test_wide_integers_are_narrowed_only_if_they_fit(self):
    fits = global_batch.get_next_batch_sharded(iter([np.arange(4)]), self.mesh)
    self.assertEqual(fits.dtype, np.int32)
    with self.assertRaisesRegex(errors.CorpusError, "4000000000 as int64, but devices take int32"):
      global_batch.get_next_batch_sharded(iter([np.array([0, 1, 2, 4_000_000_000])]), self.mesh)

  def test_arrays_of_any_rank_are_laid_out(self):
    array = np.arange(4 * 2 * 3, dtype=np.int32).reshape(4, 2, 3)
    spec = jax.sharding.PartitionSpec("data", "model")
    placed = global_batch.get_next_batch_sharded(iter([array]), self.mesh, data_sharding=spec)
    np.testing.assert_array_equal(placed, array)
    self.assertEqual({shard.data.shape for shard in placed.addressable_shards}, {(2, 1, 3)})
    shape, sharding = global_batch._build_global_shape_and_sharding((4, 2, 3), self.mesh, spec)
    self.assertEqual((shape, sharding), (placed.shape, placed.sharding))

  def test_padding_is_at_the_end_of_each_axis(self):
    self.assertEqual(doctest.testmod(global_batch).failed, 0)
    padded = global_batch._pad_array_to_shape((np.ones((1, 2)), (2, 3)), pad_value=7)
    np.testing.assert_array_equal(padded, [[1, 1, 7], [7, 7, 7]])

  @parameterized.parameters((3,), (3, 1))
  def test_an_array_cannot_be_padded_to_less(self, *shape: int):
    with self.assertRaisesRegex(errors.ConfigError, "cannot be padded to"):
      global_batch._pad_array_to_shape((np.ones((2, 2)), shape))


if __name__ == "__main__":
  absltest.main()
