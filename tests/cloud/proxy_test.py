"""Tests of the proxy that injects faults, with plain HTTP requests."""

import http.client
import os
import pathlib
import time

from absl.testing import absltest

from tests.cloud import proxy
from tests.cloud import servers

STARTS_PROCESSES = True

_CONTENT = os.urandom(100_000)


@servers.needs("nginx")
class ProxyTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    directory = pathlib.Path(self.create_tempdir().full_path)
    (directory / "bucket").mkdir()
    (directory / "bucket" / "a.npy").write_bytes(_CONTENT)
    nginx = self.enter_context(servers.start_nginx(directory))
    self.proxy = self.enter_context(proxy.start(nginx.port))

  def get(self, path="/bucket/a.npy", method="GET", timeout=30, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", self.proxy.port, timeout=timeout)
    try:
      connection.request(method, path, headers=headers)
      answer = connection.getresponse()
      return answer, answer.read()
    finally:
      connection.close()

  def test_answers_are_those_of_the_server(self):
    answer, body = self.get(Range="bytes=10-19")
    self.assertEqual((answer.status, body), (206, _CONTENT[10:20]))
    self.assertEqual(self.get()[1], _CONTENT)
    answer, body = self.get(method="HEAD")
    self.assertEqual((answer.getheader("Content-Length"), body), ("100000", b""))
    self.assertEqual(self.get("/bucket/none")[0].status, 404)
    self.assertEqual(self.get(**{"If-Match": '"other"'})[0].status, 412)

  def test_requests_are_counted_by_object_and_range(self):
    for _ in range(2):
      self.get(Range="bytes=10-19")
    self.get(method="HEAD", Authorization="x")
    counts = self.proxy.counts(reset=True)
    self.assertEqual(counts.ranges, {"GET /bucket/a.npy 10-19": 2, "HEAD /bucket/a.npy -": 1})
    self.assertEqual((counts.total, counts.signed, counts.most_in_flight), (3, 1, 1))
    self.assertEqual(counts.objects, {"/bucket/a.npy": 3})
    self.assertLen(counts.reads(".npy"), 1)
    self.assertEqual(self.proxy.counts().total, 0)

  def test_latency_holds_requests_back(self):
    self.proxy.set(latency=0.2)
    began = time.monotonic()
    self.get()
    self.assertGreaterEqual(time.monotonic() - began, 0.2)

  def test_a_share_of_the_requests_is_refused(self):
    self.proxy.set(status={503: 0.3, 429: 0.3})
    found = [self.get()[0].status for _ in range(60)]
    self.assertEqual(set(found), {200, 503, 429})
    self.assertEqual(self.proxy.counts().faults["503"], found.count(503))

  def test_connections_are_reset(self):
    self.proxy.set(reset=1.0)
    with self.assertRaises(ConnectionResetError):
      self.get()

  def test_bodies_are_cut(self):
    self.proxy.set(cut=1.0)
    with self.assertRaises(http.client.IncompleteRead):
      self.get()

  def test_bodies_and_answers_stall(self):
    for fault in ("stall", "silent"):
      self.proxy.heal()
      self.proxy.set(**{fault: 1.0})
      with self.assertRaises(TimeoutError):
        self.get(timeout=0.3)

  def test_etags_are_removed_and_ranges_ignored(self):
    self.assertIsNotNone(self.get()[0].getheader("ETag"))
    self.proxy.set(no_etag=True, whole=True)
    answer, body = self.get(Range="bytes=10-19")
    self.assertIsNone(answer.getheader("ETag"))
    self.assertEqual((answer.status, len(body)), (200, len(_CONTENT)))

  def test_bandwidth_is_limited(self):
    self.proxy.set(bandwidth=200_000)
    began = time.monotonic()
    self.assertEqual(self.get()[1], _CONTENT)
    self.assertGreaterEqual(time.monotonic() - began, 0.4)

  def test_an_outage_lasts_until_it_is_ended_and_concerns_only_some_objects(self):
    with self.proxy.with_faults(outage="503", only=".npy"):
      self.assertEqual(self.get()[0].status, 503)
      self.assertEqual(self.get("/bucket/none")[0].status, 404)
    self.assertEqual(self.get()[0].status, 200)
    with self.proxy.with_faults(outage="refuse"), self.assertRaises(ConnectionResetError):
      self.get()


if __name__ == "__main__":
  absltest.main()
