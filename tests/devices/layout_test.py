"""Tests of the layout of a batch on a mesh."""

import jax
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from jax.sharding import PartitionSpec as P

from maxtext_olmo import errors
from maxtext_olmo.devices import layout as layout_lib

jax.config.update("jax_num_cpu_devices", 8)


def _mesh(**axes: int) -> jax.sharding.Mesh:
  devices = np.array(jax.devices()[: int(np.prod(list(axes.values())))])
  return jax.sharding.Mesh(devices.reshape(tuple(axes.values())), tuple(axes))


class PartitionSpecTest(parameterized.TestCase):

  @parameterized.parameters(
      (None, P(("data", "fsdp"))),
      ((), P(("data", "fsdp"))),
      ("fsdp", P("fsdp")),
      ([["data", "fsdp"]], P(("data", "fsdp"))),
      ((("data",), "fsdp"), P(("data",), "fsdp")),
      ([None, "data"], P(None, "data")),
      (P("data"), P("data")),
  )
  def test_config_values_become_partitions(self, value, expected):
    self.assertEqual(layout_lib.partition_spec(_mesh(data=2, fsdp=2), value), expected)

  def test_an_unknown_axis_is_a_config_error_that_names_it(self):
    with self.assertRaisesRegex(
        errors.ConfigError, r"axes \['model'\], but the mesh has \['data'\]"
    ):
      layout_lib.partition_spec(_mesh(data=2), [["data", "model"]])

  @parameterized.parameters([["data", "data"]], ["data", "data"], [["data"], "data"])
  def test_an_axis_that_is_named_twice_is_a_config_error(self, *value):
    with self.assertRaisesRegex(errors.ConfigError, "data_sharding=.* names a mesh axis twice"):
      layout_lib.partition_spec(_mesh(data=2), list(value))

  def test_a_third_dimension_is_refused(self):
    with self.assertRaisesRegex(errors.ConfigError, "has 3 dimensions; a batch has two"):
      layout_lib.partition_spec(_mesh(data=2), [None, None, "data"])


class AxisNamesTest(parameterized.TestCase):

  @parameterized.parameters(
      (None, ()),
      ((), ()),
      ("fsdp", ("fsdp",)),
      ([["data", "fsdp"]], ("data", "fsdp")),
      ([["data"], "sequence"], ("data", "sequence")),
      ([None, "data"], ("data",)),
      (P(("data", "fsdp"), None), ("data", "fsdp")),
  )
  def test_names_are_those_of_the_config_value(self, value, expected):
    self.assertEqual(layout_lib.axis_names(value), expected)


class BatchLayoutTest(parameterized.TestCase):

  @parameterized.parameters(
      ({"data": 8}, P("data")),
      ({"data": 4, "tensor": 2}, P("data")),
      ({"data": 2, "fsdp": 2, "tensor": 2}, P(("data", "fsdp"))),
      ({"data": 2, "sequence": 4}, P("data", "sequence")),
      ({"data": 2, "sequence": 4}, P(None, "sequence")),
      ({"data": 8}, P()),
      ({"data": 1}, P("data")),
  )
  def test_placed_rows_come_back_whole_and_laid_out_as_asked(self, axes, spec):
    mesh = _mesh(**axes)
    layout = layout_lib.BatchLayout(mesh, spec, 8, 12)
    np.testing.assert_array_equal(layout.rows, np.arange(8))
    local = {
        "inputs": np.arange(96, dtype=np.int32).reshape(8, 12),
        "targets": -np.arange(96, dtype=np.int32).reshape(8, 12),
    }
    placed = layout.place(local)
    for name, array in placed.items():
      np.testing.assert_array_equal(np.asarray(array), local[name])
      self.assertEqual(array.sharding, jax.sharding.NamedSharding(mesh, spec))

  @parameterized.parameters((8,), (8, 12), (8, 12, 3))
  def test_arrays_of_any_rank_are_sent(self, *shape):
    layout = layout_lib.BatchLayout(_mesh(data=2, sequence=4), P("data", "sequence"), 8, 12)
    local = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    sent = layout.send(local)
    np.testing.assert_array_equal(np.asarray(sent), local)
    self.assertEqual(sent.addressable_shards[0].data.shape, (4, 3, 3)[: len(shape)])

  def test_rows_that_do_not_divide_are_a_config_error_with_the_numbers(self):
    with self.assertRaisesRegex(
        errors.ConfigError, r"batch of 6 × 12 does not divide.*6 rows over 4 shards.*multiple of 4"
    ):
      layout_lib.BatchLayout(_mesh(data=4), P("data"), 6, 12)

  def test_tokens_that_do_not_divide_are_a_config_error_with_the_numbers(self):
    with self.assertRaisesRegex(errors.ConfigError, "10 tokens over 4 shards"):
      layout_lib.BatchLayout(_mesh(sequence=4), P(None, "sequence"), 6, 10)


if __name__ == "__main__":
  absltest.main()
