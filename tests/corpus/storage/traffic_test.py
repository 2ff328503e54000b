"""Tests of the counters of requests."""

import threading

from absl.testing import absltest

from maxtext_olmo.corpus.storage import traffic as traffic_lib


class TrafficTest(absltest.TestCase):

  def test_threads_count_every_request(self):
    traffic = traffic_lib.Traffic()

    def send():
      for _ in range(500):
        traffic.began()
        traffic.ended(0.01, 10)

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    counts = traffic.counts()
    self.assertEqual((counts["requests"], counts["bytes"], counts["in_flight"]), (4000, 40000, 0))

  def test_percentiles_are_near_the_latencies(self):
    traffic = traffic_lib.Traffic()
    for i in range(1, 1001):
      traffic.began()
      traffic.ended(i / 1000, 0)
    counts = traffic.counts()
    for name, expected in (("latency_p50", 0.5), ("latency_p90", 0.9), ("latency_p99", 0.99)):
      self.assertBetween(counts[name], expected / 1.25, expected * 1.25)
    self.assertEqual(traffic_lib.Traffic().counts()["latency_p99"], 0)

  def test_the_counts_of_another_process_are_added_once(self):
    here, there = traffic_lib.Traffic(), traffic_lib.Traffic()
    for seconds in (0.01, 0.02, 3.0):
      there.began()
      there.ended(seconds, 10)
      there.began()
      there.failed(retried=True, throttled=True)
      here.add(there.take())
    here.add(there.take())
    self.assertEqual(here.counts(), there.counts())
    self.assertEqual((here.counts()["requests"], here.counts()["throttled"]), (6, 3))

  def test_extreme_latencies_are_counted(self):
    traffic = traffic_lib.Traffic()
    for seconds in (0.0, 1e6):
      traffic.began()
      traffic.ended(seconds, 0)
    self.assertGreater(traffic.counts()["latency_p99"], 100)

  def test_failures_are_counted_by_kind(self):
    traffic = traffic_lib.Traffic()
    for retried, throttled in ((True, True), (True, False), (False, False)):
      traffic.began()
      traffic.failed(retried=retried, throttled=throttled)
    counts = traffic.counts()
    self.assertEqual((counts["retries"], counts["throttled"], counts["in_flight"]), (2, 1, 0))

  def test_an_outage_is_named_until_it_ends(self):
    traffic = traffic_lib.Traffic()
    self.assertEqual(traffic.outage, "")
    self.assertEqual(traffic.store_answers("gs://b"), 0)
    traffic.store_fails("gs://b", "HTTP 503")
    traffic.store_fails("gs://b", "HTTP 429")
    self.assertRegex(traffic.outage, r"^gs://b has not answered for 0 s: HTTP 429$")
    self.assertGreaterEqual(traffic.store_answers("gs://b"), 0)
    self.assertEqual(traffic.outage, "")


if __name__ == "__main__":
  absltest.main()
