"""Workers, drivers and whole clusters are killed; what was finished is never done again."""

import os
import signal
import unittest

from absl.testing import absltest

from tests.corpus.work import sample_work
from tests.fleet import cases

STARTS_PROCESSES = True


class KillTest(cases.FleetTestCase):

  def setUp(self):
    super().setUp()
    self.key = self.pieces[12].key  # In the middle of the work.

  def _check(self, found, most_calls):
    """Checks the values, and that no more items were done twice than were in hand."""
    self.assertEqual(found["values"], self.expected("sum")["values"])
    self.assertEmpty(found["failures"])
    self.assertLessEqual(sum(sample_work.calls(self.trace).values()), most_calls)

  def _kill_worker(self, options):
    job = self.job("sum", options, waiting=[self.key])
    process = self.start(job)
    os.kill(self.wait_for_item(self.key), signal.SIGKILL)
    self.let_items_end()
    self._check(self.finish(process, job), len(self.pieces) + 6)
    self.assertGreaterEqual(sample_work.calls(self.trace)[self.key], 2)

  def _kill_driver(self, options, then, kill):
    """Kills in the middle of the work, and completes it with other options."""
    process = self.start(self.job("sum", options, waiting=[self.key]))
    worker = self.wait_for_item(self.key)
    # The items that others can do while one waits: all but the last ones, which are in hand.
    before = sample_work.wait_for(lambda: len(f := self.finished()) >= 8 and f, "8 results")
    kill(process)
    process.wait()
    done = self.finished()
    self.assertContainsSubset(before, done)
    self.let_items_end()
    found = self.run_job(self.job("sum", then, waiting=[self.key]))
    calls = sample_work.calls(self.trace)
    self.assertEqual({key: calls[key] for key in done}, dict.fromkeys(done, 1))
    self.assertGreaterEqual(found["reused"], len(done))
    self._check(found, len(self.pieces) + 8)
    return worker

  def test_a_process_is_killed(self):
    self._kill_worker({"processes": True, "workers": 2})

  @unittest.skipUnless(cases.HAS_DASK, "needs Dask")
  def test_a_dask_worker_is_killed(self):
    self._kill_worker({"dask": self.dask_cluster().address})

  @unittest.skipUnless(cases.HAS_RAY, "needs Ray")
  def test_a_ray_worker_is_killed(self):
    self._kill_worker({"ray": "local"})

  def test_a_driver_of_threads_is_killed_and_processes_complete(self):
    then = {"processes": True, "workers": 3}
    self._kill_driver({"workers": 2}, then, lambda process: process.kill())

  def test_a_driver_of_processes_is_killed_and_takes_its_workers_along(self):
    options = {"processes": True, "workers": 2}
    worker = self._kill_driver(options, {"workers": 1}, lambda process: process.kill())
    sample_work.wait_for(lambda: not cases.is_running(worker), "the end of the worker")

  @unittest.skipUnless(cases.HAS_DASK, "needs Dask")
  def test_a_driver_of_dask_is_killed_and_another_completes(self):
    address = self.dask_cluster().address
    self._kill_driver({"dask": address}, {"dask": address}, lambda process: process.kill())

  @unittest.skipUnless(cases.HAS_RAY, "needs Ray")
  def test_driver_and_workers_of_ray_are_killed_and_threads_complete(self):
    self._kill_driver({"ray": "local"}, {"workers": 3}, cases.kill_group)

  @unittest.skipUnless(cases.HAS_DASK, "needs Dask")
  def test_the_scheduler_of_dask_is_killed_and_processes_complete(self):
    cluster = self.dask_cluster()

    def kill_scheduler(process):
      cases.kill_group(cluster.processes[0])
      self.assertNotEqual(process.wait(), 0)

    then = {"processes": True, "workers": 2}
    self._kill_driver({"dask": cluster.address}, then, kill_scheduler)

  @unittest.skipUnless(cases.HAS_DASK, "needs Dask")
  def test_driver_scheduler_and_workers_of_dask_are_killed_and_threads_complete(self):
    cluster = self.dask_cluster()

    def kill_all(process):
      cluster.kill()
      process.kill()

    self._kill_driver({"dask": cluster.address}, {"workers": 3}, kill_all)

  def test_all_processes_are_killed_and_a_part_each_completes(self):
    process = self.start(self.job("sum", {"processes": True, "workers": 2}, waiting=[self.key]))
    self.wait_for_item(self.key)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    self.let_items_end()
    for part in range(2):
      self.run_job(self.job("sum", {"part": [part, 2], "workers": 1}, waiting=[self.key]))
    self._check(
        self.run_job(self.job("sum", {"merge": True}, waiting=[self.key])), len(self.pieces) + 6
    )


if __name__ == "__main__":
  absltest.main()
