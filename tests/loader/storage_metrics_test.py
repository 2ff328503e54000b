"""Tests of what is reported about stores and spools."""

import types

import numpy as np
from absl.testing import absltest

from maxtext_olmo.corpus import storage as storage_lib
from maxtext_olmo.corpus.storage import remote
from maxtext_olmo.corpus.storage import spool as spool_lib
from maxtext_olmo.corpus.storage import spooled
from maxtext_olmo.loader import storage_metrics
from tests import object_server


class StorageMetricsTest(absltest.TestCase):

  def test_local_files_and_records_report_nothing(self):
    for storage in (None, storage_lib.LocalStorage(), storage_lib.open_storage()):
      self.assertEqual(storage_metrics.storage_metrics(storage), {})
      self.assertEqual(storage_metrics.describe_store(storage), "")

  def test_requests_and_the_spool_are_counted(self):
    with object_server.ObjectServer({"b/a": bytes(1000)}) as server:
      storage = spooled.SpooledStorage(
          remote.RemoteStorage(), spool_lib.Spool(self.create_tempdir().full_path, 1 << 30)
      )
      self.addCleanup(storage.close)
      self.assertEqual(storage_metrics.describe_store(storage), "")
      zero, sizes = np.zeros(1, np.int64), np.array([100])
      for _ in range(2):
        storage.fill([f"{server.url}/b/a"], zero, zero, sizes, np.zeros(100, np.uint8), zero)
        storage.flush()
    found = storage_metrics.storage_metrics(storage)
    self.assertEqual((found["store_requests"], found["store_bytes"]), (1, 100))
    self.assertEqual((found["spool_hits"], found["spool_misses"]), (1, 1))
    self.assertGreater(found["spool_bytes"], 100)
    self.assertGreater(found["store_latency_p50"], 0)
    self.assertTrue(all(isinstance(value, (int, float)) for value in found.values()))
    self.assertRegex(
        storage_metrics.describe_store(storage),
        r"^Requests to the store take \d+ ms \(median\) .* 0\.0 % of 1 requests .* 0 are in",
    )

  def test_a_store_that_does_not_answer_is_named(self):
    traffic = remote.RemoteStorage().traffic
    traffic.store_fails("gs://bucket", "HTTP 503")
    self.assertRegex(
        storage_metrics.describe_store(types.SimpleNamespace(traffic=traffic)),
        r"^gs://bucket has not answered for \d+ s: HTTP 503\.$",
    )


if __name__ == "__main__":
  absltest.main()
