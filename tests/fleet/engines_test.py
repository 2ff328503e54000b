"""Each engine gives, bit for bit, what one thread gives."""

import socket
import unittest

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.corpus.work import ray_engine
from maxtext_olmo.errors import ConfigError
from tests.corpus.work import sample_work
from tests.fleet import cases

STARTS_PROCESSES = True


class EnginesTest(cases.FleetTestCase):

  def _check_all(self, options, works=("all",)):
    for work in works:
      self.assertEqual(self.run_job(self.job(work, options)), self.expected(work))
    self.assertEqual(sample_work.calls(self.trace), {piece.key: 1 for piece in self.pieces})

  @parameterized.parameters({"workers": 3}, {"processes": True, "workers": 2})
  def test_this_machine(self, **options):
    self._check_all(options)

  @unittest.skipUnless(cases.HAS_DASK, "needs Dask")
  def test_a_local_dask_cluster(self):
    self._check_all({"dask": "local", "workers": 2})

  @unittest.skipUnless(cases.HAS_DASK, "needs Dask")
  def test_a_dask_scheduler(self):
    self._check_all({"dask": self.dask_cluster().address})

  @unittest.skipUnless(cases.HAS_RAY, "needs Ray")
  def test_ray(self):
    # Each work starts a Ray cluster of its own, which takes seconds.
    self._check_all({"ray": "local"}, ("sum", "documents"))

  @unittest.skipUnless(cases.HAS_RAY, "needs Ray")
  def test_a_wrong_address_of_ray_is_refused_at_once(self):
    with socket.socket() as unused:
      unused.bind(("127.0.0.1", 0))
      address = f"127.0.0.1:{unused.getsockname()[1]}"  # Bound, but nothing listens.
      with (
          self.assertRaisesRegex(ConfigError, f"a Ray cluster at '{address}': .*--ray auto"),
          ray_engine.open_ray(address),
      ):
        self.fail("the engine was opened")

  def test_parts_without_an_engine(self):
    jobs = [self.job("sum", {"part": [i, 3], "workers": 1}) for i in range(3)]
    for process, job in [(self.start(job), job) for job in jobs]:
      self.finish(process, job)
    merged = self.run_job(self.job("sum", {"merge": True}))
    self.assertEqual(merged["values"], self.expected("sum")["values"])
    self.assertEqual(merged["reused"], len(self.pieces))
    self.assertEqual(sample_work.calls(self.trace), {piece.key: 1 for piece in self.pieces})


if __name__ == "__main__":
  absltest.main()
