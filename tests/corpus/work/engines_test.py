"""Tests of threads and processes as engines, with workers that die."""

import dataclasses
import os
import signal
import socket
import threading

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.corpus.work import engines
from maxtext_olmo.corpus.work import run
from maxtext_olmo.corpus.work.options import WorkOptions
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import WorkerError
from tests.corpus.work import sample_work
from tests.corpus.work.sample_work import SumWork

STARTS_PROCESSES = True


class EnginesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = self.create_tempdir().full_path
    self.trace = self.create_tempdir().full_path
    self.index = sample_work.write_corpus(self.directory)
    self.pieces = sample_work.pieces(self.index)
    self.options = WorkOptions(
        workers=2, results=os.path.join(self.directory, "x.work"), processes=True
    )
    self.expected = sample_work.values(
        run.run_work(SumWork(), self.pieces, WorkOptions(workers=1), fingerprint="f")
    )

  def run_work(self, **settings):
    work = SumWork(trace=self.trace, **settings)
    return run.run_work(work, self.pieces, self.options, fingerprint="f")

  def test_processes_give_the_results_of_one_thread(self):
    outcome = self.run_work()
    self.assertEqual(sample_work.values(outcome), self.expected)
    pids = {name.split("@")[1] for name in os.listdir(self.trace)}
    self.assertNotIn(str(os.getpid()), pids)

  def test_a_killed_process_costs_the_items_in_hand(self):
    key = self.pieces[4].key
    killer = threading.Thread(target=self._kill_a_worker_at, args=(key,))
    killer.start()
    outcome = self.run_work(waiting=(key,))
    killer.join()
    outcome.check("Sums are wrong")
    self.assertEqual(sample_work.values(outcome), self.expected)
    calls = sample_work.calls(self.trace)
    self.assertGreaterEqual(calls[key], 2)
    self.assertLessEqual(sum(calls.values()), len(self.pieces) + 6)  # Those in hand, of 2 workers.

  def _kill_a_worker_at(self, key):
    (pid,) = sample_work.wait_for(
        lambda: sample_work.processes(self.trace, key), "the start of the item"
    )
    os.kill(pid, signal.SIGKILL)
    open(os.path.join(self.trace, "open"), "w").close()

  def test_an_item_that_kills_every_worker_fails_and_the_others_are_done(self):
    key = self.pieces[4].key
    outcome = self.run_work(killing=(key,))
    self.assertEqual([failure.item.key for failure in outcome.failures], [key])
    self.assertRegex(outcome.failures[0].reason, "its worker process died each time")
    self.assertEqual(
        sample_work.values(outcome), [value for value in self.expected if value[0] != key]
    )

  def test_workers_that_always_die_stop_the_run(self):
    killing = tuple(piece.key for piece in self.pieces)
    with self.assertRaisesRegex(WorkerError, "no result for 4 pieces in a row"):
      self.run_work(killing=killing)
    # The items are not to blame: a later run with workers that live does them.
    open(os.path.join(self.trace, "fixed"), "w").close()
    outcome = self.run_work(killing=killing)
    self.assertEqual(sample_work.values(outcome), self.expected)

  def test_processes_leave_interrupts_to_their_parent(self):
    with engines.open_engine(self.options, 1) as engine:
      blocked = engine.submit(signal.pthread_sigmask, signal.SIG_BLOCK, set()).result()
    self.assertIn(signal.SIGINT, blocked)
    self.assertNotIn(signal.SIGINT, signal.pthread_sigmask(signal.SIG_BLOCK, set()))

  def test_threads_are_the_default(self):
    with engines.open_engine(WorkOptions(workers=3), 2) as engine:
      self.assertTrue(engine.in_process)
      self.assertEqual(engine.parallelism(), 2)
      self.assertEqual(engine.submit(threading.get_ident).exception(), None)
      with self.assertRaises(RuntimeError):
        engine.restart()

  @parameterized.parameters(
      "127.0.0.1:{}", "tcp://127.0.0.1:{}", "tls://127.0.0.1:{}", "ray://127.0.0.1:{}"
  )
  def test_an_address_is_reachable_if_something_listens_there(self, address):
    with socket.create_server(("127.0.0.1", 0)) as server:
      address = address.format(server.getsockname()[1])
      engines.check_reachable(address, "a cluster", "ask.")
    with self.assertRaisesRegex(
        ConfigError, "^Cannot reach a cluster at .*refused.* address: ask.$"
    ):
      engines.check_reachable(address, "a cluster", "ask.")

  @parameterized.parameters("auto", "local", "inproc://10.0.0.1/1/2", "tcp://scheduler")
  def test_addresses_without_a_port_are_left_to_the_client(self, address):
    engines.check_reachable(address, "a cluster", "ask.")

  @parameterized.parameters(("dask", "--dask needs Dask"), ("ray", "--ray needs Ray"))
  def test_an_engine_that_is_not_installed_says_how_to_install_it(self, name, message):
    try:
      __import__("distributed" if name == "dask" else "ray")
      self.skipTest(f"{name} is installed")
    except ImportError:
      pass
    options = dataclasses.replace(self.options, processes=False, **{name: "local"})
    with self.assertRaisesRegex(ValueError, message), engines.open_engine(options, 1):
      self.fail("the engine was opened")


if __name__ == "__main__":
  absltest.main()
