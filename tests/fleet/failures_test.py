"""Items that fail for ever, items that kill their workers, and full disks."""

import pathlib
import subprocess
import unittest

from absl.testing import absltest
from absl.testing import parameterized

from tests.corpus.work import sample_work
from tests.fleet import cases

STARTS_PROCESSES = True


class FailuresTest(cases.FleetTestCase):

  def _engine(self, name):
    if name == "dask":
      if not cases.HAS_DASK:
        self.skipTest("needs Dask")
      return {"dask": self.dask_cluster().address}
    if name == "ray":
      if not cases.HAS_RAY:
        self.skipTest("needs Ray")
      return {"ray": "local"}
    return {"workers": 2, "processes": name == "processes"}

  @parameterized.parameters("threads", "processes", "dask", "ray")
  def test_an_item_that_fails_for_ever_is_tried_once_and_reported_each_time(self, name):
    options, key = self._engine(name), self.pieces[5].key
    for _ in range(2):
      found = self.run_job(self.job("sum", options, failing=[key]))
      self.assertEqual(found["failures"], [[key, f"{key} fails on purpose."]])
      self.assertLen(found["values"], len(self.pieces) - 1)
    self.assertEqual(sample_work.calls(self.trace), {piece.key: 1 for piece in self.pieces})
    pathlib.Path(self.trace, "fixed").touch()
    found = self.run_job(self.job("sum", {**options, "retry_failed": True}, failing=[key]))
    self.assertEmpty(found["failures"])
    self.assertEqual(sample_work.calls(self.trace)[key], 2)

  @parameterized.parameters("processes", "dask", "ray")
  def test_an_item_that_kills_its_workers_fails_and_the_others_are_done(self, name):
    options, key = self._engine(name), self.pieces[5].key
    found = self.run_job(self.job("sum", options, killing=[key]))
    self.assertEqual([failed for failed, _ in found["failures"]], [key])
    self.assertLen(found["values"], len(self.pieces) - 1)
    self.assertLess(sample_work.calls(self.trace)[key], 8)

  @parameterized.parameters("threads", "processes", "dask", "ray")
  def test_a_full_disk_stops_the_run_and_loses_nothing(self, name):
    options = self._engine(name)
    pathlib.Path(self.results).mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", self.results]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
      raise unittest.SkipTest("only root can mount a small file system")
    self.addCleanup(subprocess.run, ["umount", "--lazy", self.results], check=True)
    job = self.job("sum", options)
    process = self.start(job)
    process.wait()
    log = pathlib.Path(job["output"] + ".log").read_text()
    self.assertNotEqual(process.returncode, 0)
    self.assertRegex(log, "WriteError: Cannot write .*No space left on device.*Free some space")
    done = self.finished()
    self.assertNotEmpty(done)
    subprocess.run(["mount", "-o", "remount,size=4m", self.results], check=True)
    found = self.run_job(job)
    # Workers of a cluster may have finished items after the driver had ended.
    self.assertGreaterEqual(found["reused"], len(done))
    self.assertLen(found["values"], len(self.pieces))
    calls = sample_work.calls(self.trace)
    self.assertEqual({calls[key] for key in done}, {1})
    self.assertLen(self.finished(), len(self.pieces))


if __name__ == "__main__":
  absltest.main()
