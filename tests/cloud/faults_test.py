"""Faults between the reader and the store: nothing is lost, nothing is wrong, nothing hangs.

Each test reads batches through a proxy that injects a fault and compares them with those of the
disk. The hang detection of `tests/run.py` ends a run that stops.
"""

import os
import re
import threading
import time

import jax
from absl.testing import absltest
from absl.testing import parameterized

import maxtext_olmo
from maxtext_olmo import errors
from maxtext_olmo.corpus import storage as storage_lib
from maxtext_olmo.corpus.storage import stores
from tests.cloud import cases
from tests.loader import cases as loader_cases

STARTS_PROCESSES = True

_STEPS = 30
_OUTAGE_SECONDS = 30.0
_FAULTS = (
    ("latency_50_ms", {"latency": 0.05}, ""),
    ("latency_200_ms", {"latency": 0.2}, ""),
    ("one_percent_503", {"status": {503: 0.01}}, "503"),
    ("five_percent_429", {"status": {429: 0.05}}, "429"),
    ("resets", {"reset": 0.02}, "reset"),
    ("cut_bodies", {"cut": 0.02}, "cut"),
    ("cut_bodies_without_etag", {"cut": 0.02, "no_etag": True}, "cut"),
    ("stalled_bodies", {"stall": 0.004}, "stall"),
    ("no_answer", {"silent": 0.004}, "silent"),
    ("bandwidth", {"bandwidth": 3e6}, ""),
    (
        "all_at_once",
        {"latency": 0.02, "status": {503: 0.01, 429: 0.01}, "reset": 0.01, "cut": 0.02},
        "cut",
    ),
)
# These differ little from others, and are left to `make test-cloud-long`.
_MORE_FAULTS = (
    ("one_percent_500", {"status": {500: 0.01}}, "500"),
    ("stalled_bodies_without_etag", {"stall": 0.004, "no_etag": True}, "stall"),
)


def setUpModule():
  jax.config.update("jax_num_cpu_devices", 1)
  loader_cases.compile_fast()


class FaultsTest(cases.BucketCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.expected = None

  def setUp(self):
    super().setUp()
    if self.expected is None:
      type(self).expected = self.local_batches(_STEPS)
    self.remote_path = self.remote_index()
    self.proxy.counts(reset=True)

  def retries(self, iterator):
    """Returns the number of requests that were repeated, as the metrics tell."""
    return iterator.metrics()["store_retries"]

  @parameterized.named_parameters(*_FAULTS, *(_MORE_FAULTS if cases.LONG else ()))
  def test_batches_are_those_of_the_disk(self, faults, counted):
    if faults.get("no_etag"):  # Such a server never sends one.
      self.proxy.set(no_etag=True)
      self.remote_path = self.remote_index()
    self.proxy.set(**faults, seed=7)
    iterator = self.make(self.remote_path)
    self.assert_equal_batches(loader_cases.take(iterator, _STEPS), self.expected)
    counts = self.proxy.counts()
    if counted:
      self.assertGreater(counts.faults.get(counted, 0), 0)
      self.assertGreater(self.retries(iterator), 0)
    elif not counts.faults:
      self.assertEqual(self.retries(iterator), 0)

  @parameterized.parameters("503", "refuse", "silent")
  def test_an_outage_is_reported_and_outlasted(self, outage):
    iterator = self.make(self.remote_path)
    got = loader_cases.take(iterator, 2)
    self.proxy.set(outage=outage)
    end = threading.Timer(_OUTAGE_SECONDS, self.proxy.heal)
    end.start()
    self.addCleanup(end.join)
    with self.assertLogs("absl", "WARNING") as logs:
      got += loader_cases.take(iterator, _STEPS - 2)
    self.assert_equal_batches(got, self.expected)
    self.assertGreater(self.retries(iterator), 0)
    store = re.escape(self.proxy.url)
    self.assertRegex("\n".join(logs.output), rf"{store} has not answered for \d+ s: .*retried")

  def test_a_store_that_asks_for_fewer_requests_gets_fewer(self):
    iterator = self.make(self.remote_path)
    loader_cases.take(iterator, 1)
    self.proxy.set(outage="503")
    self.proxy.counts(reset=True)
    end = threading.Timer(2.0, self.proxy.heal)
    end.start()
    loader_cases.take(iterator, _STEPS - 1)
    end.join()
    refused = self.proxy.counts().faults["503"]
    # Requests in flight are at most a few batches; each is repeated ever more rarely.
    self.assertLess(refused, 10 * 6 * cases.BATCH)

  def test_a_trainer_that_waits_for_a_slow_store_is_told_so(self):
    iterator = self.make(self.remote_path, olmo_prefetch_batches=0, olmo_device_prefetch=0)
    self.proxy.set(latency=0.3)
    with self.assertLogs("absl", "WARNING") as logs:
      while not any("The trainer waits for data" in line for line in logs.output):
        loader_cases.take(iterator, 1)
    (warning,) = (line for line in logs.output if "The trainer waits for data" in line)
    self.assertRegex(warning, r"cost of a batch is read .*Requests to the store take \d{3} ms")

  def test_a_replaced_object_stops_the_run_with_an_error_that_names_it(self):
    iterator = self.make(self.remote_path)
    got = loader_cases.take(iterator, 2)
    self.assert_equal_batches(got, self.expected[:2])
    index = maxtext_olmo.load_index(self.index_path)
    replaced = index.resolve(0)
    with open(replaced, "rb") as file:
      content = file.read()
    before = os.stat(replaced)
    self.addCleanup(self.restore, replaced, content, before)
    with open(replaced, "wb") as file:  # The same size, but other tokens.
      file.write(content[::-1])
    os.utime(replaced, (1, 1))
    with self.assertRaisesRegex(errors.CorpusError, r"part-000\.npy.*(replaced|changed)"):
      loader_cases.take(iterator, _STEPS)

  def restore(self, path, content, before):
    with open(path, "wb") as file:
      file.write(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

  @parameterized.parameters(
      (403, "access is denied"), (404, "does not exist"), (412, "replaced|ETag"), (416, "ends")
  )
  def test_an_error_that_does_not_pass_names_object_range_and_remedy(self, status, words):
    self.proxy.set(status={status: 1.0}, only="part-001.npy")
    iterator = self.make(self.remote_path)
    with self.assertRaisesRegex(errors.CorpusError, words) as caught:
      loader_cases.take(iterator, _STEPS)
    self.assertRegex(
        str(caught.exception), r"bytes \d+ to \d+ of http://[\w.:]+/bucket/data/part-001"
    )

  def test_an_ignored_range_is_an_error(self):
    self.proxy.set(whole=True, only=".npy")
    iterator = self.make(self.remote_path)
    with self.assertRaisesRegex(errors.CorpusError, "ignored the requested range"):
      loader_cases.take(iterator, 1)

  def test_a_server_that_was_never_there_is_reported(self):
    self.proxy.set(outage="refuse")
    impatient = storage_lib.open_storage(stores.StoreOptions(first_patience=2.0))
    with self.assertRaisesRegex(errors.CorpusError, "(?s)Gave up after|cannot be reached"):
      maxtext_olmo.load_index(f"{self.proxy.url}/bucket/none.json", storage=impatient)

  def test_no_request_is_sent_that_is_not_needed(self):
    # At most 256 requests are in flight, and some batches are prefetched; all are in one epoch.
    steps, ahead = 16, 256 // cases.BATCH + 8
    iterator = self.make(self.remote_path)
    self.proxy.counts(reset=True)
    loader_cases.take(iterator, steps)
    counts = self.proxy.counts()
    self.assertLen(counts.ranges, len(counts.reads(".npy")))  # No HEAD, no listing.
    needed = self.make(self.index_path).host_batches()
    index = maxtext_olmo.load_index(self.index_path)
    wanted = []
    for step in range(steps + ahead):
      parts = needed.parts(step)
      for file, first in zip(parts.source, parts.first):
        wanted.append((index.files[file].path, int(first) // cases.LENGTH))
    # Rows of a batch that touch are joined into one request.
    row_bytes = 2 * cases.LENGTH
    got = []
    for request, count in counts.ranges.items():
      _, path, bounds = request.split()
      start, last = map(int, bounds.split("-"))
      self.assertEqual((start % row_bytes, (last + 1) % row_bytes), (0, 0))
      rows = range(start // row_bytes, (last + 1) // row_bytes)
      got += count * [(os.path.basename(path), row) for row in rows]
    self.assertLen(set(got), len(got))  # Nothing twice,
    self.assertEmpty(set(got) - set(wanted))  # nothing in vain,
    self.assertEmpty(set(wanted[: steps * cases.BATCH]) - set(got))  # and all that is needed.

  def test_many_requests_are_in_flight_from_the_first_step_on(self):
    iterator = self.make(self.remote_path, olmo_prefetch_batches=0, olmo_device_prefetch=0)
    self.proxy.counts(reset=True)
    self.proxy.set(outage="silent")  # All requests stay in flight.
    first = threading.Thread(target=next, args=(iterator,))
    first.start()
    # Rows that touch are joined, so a batch may take fewer requests than rows.
    while self.proxy.counts().most_in_flight < cases.BATCH // 2:
      time.sleep(0.01)
    self.proxy.heal()
    first.join()


if __name__ == "__main__":
  absltest.main()
