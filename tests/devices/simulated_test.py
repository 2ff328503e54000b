"""Tests of simulated devices, also against the devices of real processes."""

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from jax.sharding import PartitionSpec as P

from maxtext_olmo import errors
from maxtext_olmo.devices import layout as layout_lib
from maxtext_olmo.devices import simulated
from tests import distributed

STARTS_PROCESSES = True


class SimulatedTest(parameterized.TestCase):

  def test_devices_are_divided_over_hosts_in_the_order_of_the_axes(self):
    mesh = simulated.make_mesh({"data": 4, "tensor": 2}, hosts=2)
    hosts = [device.process_index for device in mesh.devices.flat]
    self.assertEqual(hosts, [0, 0, 0, 0, 1, 1, 1, 1])
    self.assertEqual(dict(mesh.shape), {"data": 4, "tensor": 2})

  @parameterized.parameters(({"data": 6}, 4), ({"data": 2}, 4), ({"data": 4}, 0), ({"data": 0}, 1))
  def test_devices_that_do_not_divide_are_a_config_error(self, axes, hosts):
    with self.assertRaisesRegex(errors.ConfigError, "cannot be divided evenly over"):
      simulated.make_mesh(axes, hosts)

  @parameterized.parameters(
      ({"data": 16384}, P("data"), 4096, 1),
      ({"data": 2048, "tensor": 8}, P("data"), 4096, 2),  # 8 devices with the same rows: 2 hosts.
      ({"tensor": 8, "data": 2048}, P("data"), 4096, 8),
      ({"data": 1024, "sequence": 4}, P("data", "sequence"), 1024, 1),
  )
  def test_every_row_is_held_by_as_many_hosts_as_the_mesh_says(self, axes, spec, hosts, copies):
    mesh = simulated.make_mesh(axes, hosts)
    held = np.zeros(16384, np.int64)
    for process in range(hosts):
      held[layout_lib.BatchLayout(mesh, spec, 16384, 64, process).rows] += 1
    self.assertEqual(set(held.tolist()), {copies})

  def test_simulated_hosts_hold_the_rows_of_real_processes(self):
    cases = [
        ({"data": 4}, ("data",)),
        ({"data": 2, "model": 2}, ("data",)),
        ({"model": 2, "data": 2}, ("data",)),
        ({"data": 2, "model": 2}, ("data", "model")),
        ({"data": 2, "model": 2}, (None, "model")),
    ]
    real = distributed.run(
        "tests.devices.multihost_cases:rows_of_layouts", processes=2, devices=2, args=(cases,)
    )
    for process, found in enumerate(real):
      for (axes, spec), (addressable, by_number) in zip(cases, found):
        mesh = simulated.make_mesh(axes, hosts=2)
        layout = layout_lib.BatchLayout(mesh, P(*spec), 8, 4, process)
        self.assertEqual(layout.rows.tolist(), addressable, (axes, spec, process))
        self.assertEqual(by_number, addressable)


if __name__ == "__main__":
  absltest.main()
