"""Tests of maxtext_olmo.trainers.rendezvous; cluster_test.py has those with several processes."""

import os
import socket
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.trainers import rendezvous
from tests import distributed


class RendezvousTest(parameterized.TestCase):

  @parameterized.parameters("10.0.0.1", ":1234", "host:", "host:http", "host:0", "host:65536")
  def test_an_address_without_host_or_port_is_refused(self, address: str):
    with self.assertRaisesRegex(errors.ConfigError, f"is '{address}', but must be HOST:PORT"):
      rendezvous.check_address(address, is_ours=False)

  @parameterized.parameters(("127.0.0.1", socket.AF_INET), ("::", socket.AF_INET6))
  def test_a_port_in_use_is_refused_by_the_process_that_needs_it(self, host: str, family: int):
    with socket.socket(family) as other:
      other.bind((host, 0))
      other.listen()
      address = f"127.0.0.1:{other.getsockname()[1]}"
      rendezvous.check_address(address, is_ours=False)
      with self.assertRaisesRegex(errors.ConfigError, r"port \d+ of this host is in use"):
        rendezvous.check_address(address, is_ours=True)

  def test_the_port_that_process_0_binds_counts(self):
    name = "JAX_COORDINATOR_BIND_ADDRESS"
    with socket.socket() as other:
      other.bind(("127.0.0.1", 0))
      other.listen()
      used, free = other.getsockname()[1], distributed.free_port()
      with mock.patch.dict(os.environ, {name: f"[::]:{free}"}):
        rendezvous.check_address(f"127.0.0.1:{used}", is_ours=True)
      with (
          mock.patch.dict(os.environ, {name: f"[::]:{used}"}),
          self.assertRaisesRegex(errors.ConfigError, f"port {used} of this host is in use"),
      ):
        rendezvous.check_address(f"127.0.0.1:{free}", is_ours=True)

  def test_a_free_port_is_accepted(self):
    rendezvous.check_address(f"[::1]:{distributed.free_port()}", is_ours=True)


if __name__ == "__main__":
  absltest.main()
