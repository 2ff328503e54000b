"""Tests of `RemoteStorage` against a server on loopback."""

import multiprocessing
import os
import pickle

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.corpus import storage as storage_lib
from maxtext_olmo.corpus.storage import pace as pace_lib
from maxtext_olmo.corpus.storage import remote
from maxtext_olmo.corpus.storage import stores
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.errors import MissingFileError
from tests import object_server

STARTS_PROCESSES = True

_DATA = np.random.default_rng(0).integers(0, 256, 9 << 20, dtype=np.uint8).tobytes()


def _sharing_in_child(storage: remote.RemoteStorage) -> int:
  del storage  # It brings the number with it.
  return pace_lib.sharing()


def _read_in_child(storage: remote.RemoteStorage, url: str) -> bytes:
  return storage.read(url, 3, 5)


class RemoteTestCase(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.server = self.enter_context(
        object_server.ObjectServer({"b/x": _DATA, "b/small": b"hello", "b/empty": b""})
    )
    self.url = f"{self.server.url}/b/x"
    self.storage = remote.RemoteStorage()

  def fill(self, offsets, size=100, storage=None, urls=None):
    """Returns the ranges of `size` bytes at some offsets."""
    offsets = np.asarray(offsets, np.int64)
    count = len(offsets)
    out = np.zeros(count * size, np.uint8)
    (storage or self.storage).fill(
        urls or [self.url],
        np.zeros(count, np.int64),
        offsets,
        np.full(count, size),
        out,
        np.arange(count) * size,
    )
    return [out[i * size : (i + 1) * size].tobytes() for i in range(count)]

  def set_faults(self, *faults):
    """Lets the next requests fail in these ways."""
    coming = list(faults)
    self.server.faults = lambda number, path: coming.pop(0) if coming else ""


class ReadTest(RemoteTestCase):

  def test_it_is_a_storage(self):
    self.assertIsInstance(self.storage, storage_lib.Storage)
    self.assertIsNone(self.storage.pin([self.url], np.zeros(1, np.int64)))
    self.assertTrue(self.storage.wants_concurrency([self.url]))

  def test_whole_objects_take_one_request(self):
    self.assertEqual(self.storage.read(f"{self.server.url}/b/small"), b"hello")
    self.assertEqual(self.storage.read(f"{self.server.url}/b/empty"), b"")
    self.assertLen(self.server.requests, 2)

  def test_large_objects_are_read_in_pieces(self):
    self.assertEqual(self.storage.read(self.url), _DATA)
    pieces = list(self.storage.pieces(self.url, 5, 8 << 20, 3 << 20))
    self.assertEqual([len(piece) for piece in pieces], [3 << 20, 3 << 20, 2 << 20])
    self.assertEqual(b"".join(pieces), _DATA[5 : 5 + (8 << 20)])

  def test_sizes_and_existence(self):
    self.assertEqual(self.storage.size(self.url), len(_DATA))
    self.assertTrue(self.storage.exists(self.url))
    self.assertFalse(self.storage.exists(f"{self.server.url}/b/none"))

  def test_random_ranges_are_one_request_each(self):
    offsets = np.random.default_rng(1).permutation(200) * 40_000
    self.assertEqual(self.fill(offsets), [_DATA[at : at + 100] for at in offsets])
    counts = self.storage.traffic.counts()
    self.assertLen({*self.server.requests}, 200)
    # On a busy machine, a connection may time out.
    self.assertLen(self.server.requests, 200 + counts["retries"])
    self.assertGreater(self.server.most_in_flight, 1)
    self.assertEqual(counts["bytes"], 200 * 100)

  def test_ranges_that_touch_are_one_request(self):
    offsets = np.random.default_rng(1).permutation(200) * 100
    self.assertEqual(self.fill(offsets), [_DATA[at : at + 100] for at in offsets])
    self.assertLen(self.server.requests, 1)

  def test_s3_gcs_and_azure_read_the_same(self):
    options = stores.StoreOptions(endpoint=self.server.url, region="here", anonymous=True)
    storage = remote.RemoteStorage(options)
    for url in ("s3://b/x", "gs://b/x", "abfs://b@account.dfs.core.windows.net/x"):
      with self.subTest(url):
        self.assertEqual(self.fill([7], storage=storage, urls=[url]), [_DATA[7:107]])

  def test_a_copy_in_a_spawned_process_reads(self):
    self.fill([0])
    self.server.objects["b/x"] = _DATA[::-1]
    copy = pickle.loads(pickle.dumps(self.storage))
    with self.assertRaisesRegex(CorpusError, "replaced"):
      self.fill([0], storage=copy)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
      found = pool.apply(_read_in_child, (self.storage, self.url))
    self.assertEqual(found, _DATA[::-1][3:8])

  def test_worker_processes_know_how_many_share_the_store(self):
    self.addCleanup(pace_lib.share_with, pace_lib.sharing())
    pace_lib.share_with(32)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
      self.assertEqual(pool.apply(_sharing_in_child, (self.storage,)), 32)

  def test_a_forked_child_is_refused(self):
    self.fill([0])
    child = os.fork()
    if not child:
      try:
        self.fill([0])
      except CorpusError as error:
        os._exit(7 if "spawn" in str(error) else 1)
      os._exit(2)
    self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 7)


class FaultTest(RemoteTestCase):

  @parameterized.parameters("503", "429", "500", "cut", "reset", "stall", "hang")
  def test_passing_faults_are_survived(self, fault):
    self.set_faults(fault)
    self.assertEqual(self.fill([50_000], 40_000), [_DATA[50_000:90_000]])
    self.assertEqual(self.storage.traffic.counts()["retries"], 1)

  def test_a_cut_body_without_an_etag_is_survived(self):
    self.server.sends_etags = False
    self.set_faults("cut", "cut")
    self.assertEqual(self.fill([50_000], 40_000), [_DATA[50_000:90_000]])

  @parameterized.parameters(
      ("403", CorpusError, r"access is denied \(HTTP 403 Broken .on purpose.\)\. Check the cred"),
      ("401", CorpusError, "access is denied .HTTP 401"),
      ("404", MissingFileError, "does not exist"),
      ("412", CorpusError, "ETag is not the expected one"),
      ("416", CorpusError, "ends before this range"),
      ("301", CorpusError, "olmo_storage_region"),
      ("400", CorpusError, "HTTP 400 Broken"),
      ("ignore_range", CorpusError, "ignored the requested range"),
  )
  def test_lasting_faults_are_errors_that_name_object_and_range(self, fault, kind, message):
    self.set_faults(fault, fault)
    with self.assertRaisesRegex(kind, f"bytes 500 to 600 of {self.url}: .*{message}"):
      self.fill([500])

  def test_a_range_past_the_end_is_an_error(self):
    with self.assertRaisesRegex(CorpusError, f"too short: .* it ends at byte {len(_DATA)}"):
      self.fill([len(_DATA) - 50])
    with self.assertRaisesRegex(CorpusError, "ends before this range"):
      self.fill([len(_DATA) + 50])

  def test_a_host_that_never_answered_is_given_up_soon(self):
    storage = remote.RemoteStorage(stores.StoreOptions(first_patience=0.5))
    with self.assertRaisesRegex(CorpusError, "cannot be reached.*Gave up after"):
      storage.read("http://127.0.0.1:1/x", 0, 8)

  def test_an_outage_of_a_store_that_has_answered_is_waited_for(self):
    storage = remote.RemoteStorage(stores.StoreOptions(first_patience=0.1))
    self.fill([0], storage=storage)
    self.set_faults(*["503"] * 4)
    self.assertEqual(self.fill([0], storage=storage), [_DATA[:100]])
    self.assertEqual(storage.traffic.counts()["throttled"], 4)

  @parameterized.parameters(True, False)
  def test_an_outage_at_the_start_is_waited_for_if_the_index_has_the_etag(self, has_etag):
    storage = remote.RemoteStorage(stores.StoreOptions(first_patience=0.1))
    storage.expect(self.url, len(_DATA), self.server.etag("b/x") if has_etag else None)
    storage = pickle.loads(pickle.dumps(storage))  # As in a worker process.
    self.set_faults(*["503"] * 4)
    if has_etag:
      self.assertEqual(self.fill([0], storage=storage), [_DATA[:100]])
    else:
      with self.assertRaisesRegex(CorpusError, "Gave up after"):
        self.fill([0], storage=storage)


class ReplacedTest(RemoteTestCase):

  @parameterized.parameters((True, True), (True, False), (False, True))
  def test_a_replaced_object_is_never_read(self, sends_etags, checks_if_match):
    self.server.sends_etags, self.server.checks_if_match = sends_etags, checks_if_match
    self.fill([0])
    changed = b"!" + _DATA[1:] if sends_etags else _DATA[1:]
    self.server.objects["b/x"] = changed
    with self.assertRaisesRegex(CorpusError, "was replaced or changed"):
      self.fill([4000])

  def test_the_index_decides_what_is_expected(self):
    self.storage.expect(self.url, len(_DATA) + 1)
    with self.assertRaisesRegex(CorpusError, f"expected an object of {len(_DATA) + 1} bytes"):
      self.fill([0])
    self.storage.expect(self.url, len(_DATA), '"other"')
    with self.assertRaisesRegex(CorpusError, "ETag"):
      self.fill([0])
    self.storage.expect(self.url, len(_DATA), self.server.etag("b/x"))
    self.assertEqual(self.fill([0]), [_DATA[:100]])

  @parameterized.parameters(True, False)
  def test_ranges_of_an_object_that_is_not_the_expected_one_are_not_read(self, checks_if_match):
    self.server.checks_if_match = checks_if_match
    self.storage.expect(self.url, len(_DATA), self.server.etag("b/x"))
    copy = pickle.loads(pickle.dumps(self.storage))  # As in a worker process.
    for storage in (self.storage, copy):
      self.server.objects["b/x"] = _DATA
      self.assertEqual(storage.read(self.url, 5, 10), _DATA[5:15])
      self.server.objects["b/x"] = _DATA[::-1]
      with self.assertRaisesRegex(CorpusError, f"bytes 5 to 15 of {self.url}.*was replaced"):
        storage.read(self.url, 5, 10)
      with self.assertRaisesRegex(CorpusError, "was replaced"):
        list(storage.pieces(self.url, 0, len(_DATA), 3 << 20))

  def test_ranges_of_an_object_of_another_size_are_not_read(self):
    self.storage.expect(self.url, len(_DATA) + 1)
    with self.assertRaisesRegex(CorpusError, f"expected an object of {len(_DATA) + 1} bytes"):
      self.storage.read(self.url, 5, 10)

  def test_reading_whole_objects_sees_the_new_one(self):
    small = f"{self.server.url}/b/small"
    self.assertEqual(self.storage.read(small), b"hello")
    self.storage.expect(small, 5, self.server.etag("b/small"))
    self.server.objects["b/small"] = b"bye"
    self.assertEqual(self.storage.read(small), b"bye")


if __name__ == "__main__":
  absltest.main()
