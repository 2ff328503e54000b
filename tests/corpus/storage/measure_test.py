"""Tests of measuring an object store."""

from absl.testing import absltest

from maxtext_olmo.corpus.storage import measure
from maxtext_olmo.corpus.storage import remote
from maxtext_olmo.errors import ConfigError
from tests import object_server


class MeasureTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.server = self.enter_context(
        object_server.ObjectServer({"b/x": bytes(100_000), "b/y": bytes(50), "b/empty": b""})
    )
    self.paths = [f"{self.server.url}/b/x", f"{self.server.url}/b/y"]

  def measure(self, paths=None, **options):
    return measure.measure(
        remote.RemoteStorage(), paths or self.paths, **{"read_bytes": 1000, **options}
    )

  def test_reads_are_bounded_and_counted(self):
    found = self.measure(max_requests=200)
    reads = sum(rate.reads for rate in found.rates)
    self.assertLessEqual(reads, 200)
    self.assertEqual(found.requests, reads + found.large.reads + len(self.paths))
    self.assertEqual(found.requests, len(self.server.requests))
    self.assertEqual(found.rates[0].parallelism, 1)
    self.assertGreater(found.best.reads_per_second, 0)
    self.assertEqual(found.retries, 0)

  def test_time_is_bounded(self):
    self.server.latency = 0.05
    found = self.measure(max_requests=10**6, max_seconds=0.5)
    # Each degree of parallelism is tried once, however late it is.
    self.assertLess(sum(rate.reads for rate in found.rates), 2000)
    self.assertGreaterEqual(found.rates[0].median, 0.05)
    self.assertGreaterEqual(found.first, 0.05)

  def test_ranges_lie_in_objects_that_are_long_enough(self):
    self.measure(max_requests=60)
    for _, path, bounds in self.server.requests:
      if bounds:
        first, last = map(int, bounds.removeprefix("bytes=").split("-"))
        self.assertLess(last, 100_000 if path.endswith("x") else 50)
        self.assertIn(last - first + 1, (1000, 100_000))

  def test_a_read_is_no_longer_than_the_largest_object(self):
    found = self.measure(read_bytes=10**9, max_requests=30)
    self.assertEqual(found.read_bytes, 100_000)

  def test_failures_are_counted(self):
    self.server.faults = lambda number, path: "503" if number == 10 else ""
    self.assertEqual(self.measure(max_requests=40).retries, 1)

  def test_impossible_measurements_are_refused(self):
    with self.assertRaisesRegex(ConfigError, "All objects are empty"):
      self.measure([f"{self.server.url}/b/empty"])
    with self.assertRaisesRegex(ConfigError, "must be positive"):
      self.measure(max_requests=0)


if __name__ == "__main__":
  absltest.main()
