"""A run on hosts with their own network: they die, lose the network, are slow, or differ.

After each event, the ledger must say that the run was trained on exactly the rows that come first
in its order, each once.
"""

from __future__ import annotations

import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from absl import logging
from absl.testing import absltest

from maxtext_olmo.cli import demo
from maxtext_olmo.trainers import RESTART_CODE
from tests import corpora
from tests.cluster import network as network_lib
from tests.trainers.tiny import ledger

STARTS_PROCESSES = True

_HOSTS = 3
_PORT = 8476
_DELAY_MILLISECONDS = 20


class ClusterRunTest(ledger.LedgerTestCase):

  def setUp(self):
    super().setUp()
    if reason := network_lib.why_not():
      self.skipTest(reason)
    self.network = network_lib.Network(_HOSTS)
    self.addCleanup(self.network.close)
    self.logs: list[pathlib.Path] = []

  def start_on(
      self, hosts: int, steps: int = 1_000_000, module: str = demo.__name__, **last: object
  ) -> list[subprocess.Popen[str]]:
    """Starts the run on the first hosts; `last` are other keys of the last host."""
    flags, env = self.prepare(steps, size=2 * hosts)
    self.logs = []
    started = []
    for host in range(hosts):
      own = [f"--config.{name}={value}" for name, value in last.items() if host == hosts - 1]
      self.logs.append(self.dir / f"log-{len(self.attempts)}-{host}")
      variables = {
          **env,
          "JAX_COORDINATOR_ADDRESS": f"{self.network.names[0]}:{_PORT}",
          "JAX_NUM_PROCESSES": str(hosts),
          "JAX_PROCESS_ID": str(host),
      }
      with open(self.logs[-1], "w", encoding="utf-8") as log:
        command = [sys.executable, "-P", "-m", module, *flags, *own]
        started.append(self.network.start(host, command, variables, log))
    return started

  def text(self) -> str:
    return "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in self.logs)

  def wait_for(self, holds: Callable[[], bool], started: list[subprocess.Popen[str]]) -> None:
    while not holds():
      self.assertTrue(all(process.poll() is None for process in started), self.text())
      time.sleep(0.05)

  def wait_for_steps(self, count: int, started: list[subprocess.Popen[str]]) -> None:
    """Waits until each host has begun more steps."""
    goal = self.lines() + count * len(started)
    self.wait_for(lambda: self.lines() >= goal, started)

  def codes(self, started: list[subprocess.Popen[str]]) -> list[int]:
    return [process.wait() for process in started]

  def stop(self, started: list[subprocess.Popen[str]], host: int) -> None:
    """Sends SIGTERM to one host; all must save after the same step."""
    started[host].send_signal(signal.SIGTERM)
    self.assertEqual(self.codes(started), [RESTART_CODE] * len(started), self.text())
    steps = demo.read_ledger(self.attempts[-1][2])
    self.assertEqual(self.steps_done(), max(steps) + 1, self.text())

  def test_the_ledger_is_exact_whatever_happens_to_hosts_and_network(self):
    for event in (
        self.preempt_a_host,
        self.kill_a_host,
        self.cut_and_heal_the_network,
        self.slow_a_host_down,
        self.give_a_host_another_index,
        self.finish_on_fewer_hosts,
    ):
      began = time.monotonic()
      event()
      self.check_ledger(complete=event == self.finish_on_fewer_hosts)
      logging.info("%s: ok, %.0f s", event.__name__, time.monotonic() - began)

  def preempt_a_host(self) -> None:
    started = self.start_on(3)
    self.wait_for_steps(10, started)
    self.assertIn("devices of 3 processes", self.text())
    self.stop(started, host=2)

  def kill_a_host(self) -> None:
    done = self.steps_done()
    started = self.start_on(3)
    self.wait_for(lambda: self.steps_done() > done + 3, started)
    started[1].kill()
    started[1].wait()
    self.network.cut(1)
    codes = self.codes(started)
    self.network.heal(1)
    self.assertEqual(codes[1], -signal.SIGKILL)
    self.assertNotIn(0, codes, self.text())

  def cut_and_heal_the_network(self) -> None:
    started = self.start_on(2)
    self.wait_for_steps(5, started)
    self.network.cut(1)
    # No process gets further than the step in which it waits for the other host.
    stalled = -1
    while stalled != self.lines():
      stalled = self.lines()
      time.sleep(2.0)
    self.assertTrue(all(process.poll() is None for process in started), self.text())
    self.network.heal(1)
    self.wait_for_steps(10, started)
    self.stop(started, host=0)

  def slow_a_host_down(self) -> None:
    started = self.start_on(2)
    self.wait_for_steps(2, started)
    if not self.network.delay(1, _DELAY_MILLISECONDS):
      logging.info("The kernel has no netem: the host is stopped for a while instead.")
      for _ in range(5):
        started[1].send_signal(signal.SIGSTOP)
        time.sleep(0.5)
        started[1].send_signal(signal.SIGCONT)
    self.wait_for_steps(10, started)
    self.stop(started, host=1)

  def give_a_host_another_index(self) -> None:
    other, _ = corpora.write_corpus(
        self.dir / "other", tokens_per_file=(5000,), sequence_length=16, vocab_size=60
    )
    done = self.steps_done()
    started = self.start_on(2, olmo_index_path=other)
    self.assertEqual(self.codes(started), [2, 2], self.text())
    self.assertIn("would read different streams", self.text())
    self.assertEqual(self.steps_done(), done)

  def test_doctor_names_the_hosts_that_differ(self):
    other, _ = corpora.write_corpus(self.dir / "other", sequence_length=16, seed=9)
    for last, code in (({}, 0), ({"olmo_index_path": other}, 1)):
      flags, env = self.prepare(10, size=4)
      logs = []
      started = []
      for host in range(2):
        own = [f"--config.{k}={v}" for k, v in last.items() if host == 1]
        address = f"--config.coordinator_address={self.network.addresses[0]}:{_PORT}"
        place = ["--config.num_processes=2", f"--config.process_id={host}"]
        logs.append(self.dir / f"doctor-{host}")
        with open(logs[-1], "w", encoding="utf-8") as log:
          command = [sys.executable, "-m", "maxtext_olmo", "doctor", *flags, *own, address, *place]
          started.append(self.network.start(host, command, env, log))
      self.assertEqual(self.codes(started), [code, code], logs[0].read_text())
      self.assertIn("2 of 2, on host0, host1", logs[0].read_text())
    self.assertIn("indexes: process 1 on host1 and process 0 on host0 differ", logs[0].read_text())

  def finish_on_fewer_hosts(self) -> None:
    started = self.start_on(2, steps=self.steps_done() + 5)
    self.assertEqual(self.codes(started), [0, 0], self.text())
    started = self.start_on(1, steps=self.steps_done() + 140)
    self.assertEqual(self.codes(started), [0], self.text())


if __name__ == "__main__":
  absltest.main()
