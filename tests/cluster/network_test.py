"""Tests of the hosts in network namespaces themselves."""

from __future__ import annotations

import subprocess
import sys
import tempfile

from absl.testing import absltest

from tests import distributed
from tests.cluster import network as network_lib

STARTS_PROCESSES = True


class NetworkTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    if reason := network_lib.why_not():
      self.skipTest(reason)

  def run_on(self, network: network_lib.Network, host: int, code: str) -> str:
    with tempfile.TemporaryFile("w+") as output:
      env = distributed.child_environment()
      network.start(host, [sys.executable, "-c", code], env, output).wait()
      output.seek(0)
      return output.read()

  def test_hosts_have_names_and_addresses_and_can_be_cut_off(self):
    network = network_lib.Network(2)
    self.addCleanup(network.close)
    names = "import socket; print(socket.gethostname(), socket.gethostbyname('host1'))"
    self.assertEqual(self.run_on(network, 0, names), f"host0 {network.addresses[1]}\n")
    refused = (
        "import socket\n"
        "try: socket.create_connection(('host1', 1), timeout=1)\n"
        "except OSError as error: print(type(error).__name__)"
    )
    self.assertEqual(self.run_on(network, 0, refused), "ConnectionRefusedError\n")
    network.cut(1)
    self.assertEqual(self.run_on(network, 0, refused), "TimeoutError\n")
    network.heal(1)
    self.assertEqual(self.run_on(network, 0, refused), "ConnectionRefusedError\n")

  def test_closing_removes_everything(self):
    before = subprocess.check_output(["ip", "netns", "list"], text=True)
    network = network_lib.Network(3)
    self.assertNotEqual(subprocess.check_output(["ip", "netns", "list"], text=True), before)
    network.close()
    self.assertEqual(subprocess.check_output(["ip", "netns", "list"], text=True), before)


if __name__ == "__main__":
  absltest.main()
