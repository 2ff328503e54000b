"""Each engine gives, bit for bit, what one thread gives."""

import socket
import unittest

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.corpus.work import engines
from maxtext_olmo.corpus.work.options import WorkOptions
from maxtext_olmo.errors import ConfigError
from tests.corpus.work import sample_work
from tests.fleet import cases

STARTS_PROCESSES = True


class EnginesTest(cases.FleetTestCase):

  def _check_all(self, options, works="all"):
    self.assertEqual(self.run_job(self.job(works, options)), self.expected(works))
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
    self._check_all({"ray": "local"}, "sum")

  @unittest.skipUnless(cases.HAS_RAY, "needs Ray")
  def test_a_running_ray_cluster(self):
    with cases.ray_head() as address:
      # Each work starts new workers, which takes seconds.
      self._check_all({"ray": "auto"}, ["sum", "verify", "stats", "make"])
      self._check_tokenizer_threads({"ray": address})

  @parameterized.parameters({"processes": True}, {"dask": "local"})
  def test_a_worker_tokenizes_in_its_own_thread(self, **options):
    if "dask" in options and not cases.HAS_DASK:
      self.skipTest("needs Dask")
    self._check_tokenizer_threads({**options, "workers": 2})

  def _check_tokenizer_threads(self, options):
    shares = self.run_job(self.job("share", options))["found"]
    self.assertGreater(min(shares), 0.5)

  @parameterized.parameters(
      ("ray", "", "a Ray cluster at '{}': .*--ray auto"),
      ("dask", "tcp://", "the Dask scheduler at '{}': .*the scheduler prints it"),
  )
  def test_a_wrong_address_is_refused_at_once(self, engine, scheme, message):
    if not {"ray": cases.HAS_RAY, "dask": cases.HAS_DASK}[engine]:
      self.skipTest(f"needs {engine}")
    with socket.socket() as unused:
      unused.bind(("127.0.0.1", 0))
      address = f"{scheme}127.0.0.1:{unused.getsockname()[1]}"  # Bound, but nothing listens.
      options = WorkOptions(results=self.results, **{engine: address})
      with (
          self.assertRaisesRegex(ConfigError, message.format(address)) as caught,
          engines.open_engine(options, 1),
      ):
        self.fail("the engine was opened")
    # The client of the cluster, which tries again for a long time, was not asked.
    self.assertIsInstance(caught.exception.__cause__, ConnectionRefusedError)

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
