"""Tests of a storage that reads through a spool."""

import concurrent.futures
import os
import pathlib
import pickle
import threading
import time
from unittest import mock

import hypothesis
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import strategies as st

from maxtext_olmo import errors
from maxtext_olmo.corpus.storage import base
from maxtext_olmo.corpus.storage import spool as spool_lib
from maxtext_olmo.corpus.storage import spooled
from tests.corpus.storage import counting_storage

_PATHS = ("s3://bucket/a", "s3://bucket/b")
_LIMIT = 32 << 20


def _files():
  rng = np.random.default_rng(0)
  return {path: rng.integers(0, 256, 5000, np.uint8).tobytes() for path in _PATHS}


class SpooledStorageTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = self.create_tempdir().full_path
    self.store = counting_storage.CountingStorage(_files())
    self.spooled = self._open()

  def _open(self, limit=_LIMIT):
    opened = spooled.SpooledStorage(self.store, spool_lib.Spool(self.directory, limit))
    self.addCleanup(opened.close)
    return opened

  def _ranges(self, ranges):
    table = np.array(ranges, np.int64).reshape(-1, 3)
    return _PATHS, *table.T

  def _read(self, ranges, storage=None):
    """Reads (source, offset, size) ranges and checks them."""
    paths, sources, offsets, sizes = self._ranges(ranges)
    places = np.cumsum(sizes) - sizes
    out = np.zeros(sizes.sum(), np.uint8)
    (storage or self.spooled).fill(paths, sources, offsets, sizes, out, places)
    expected = [self.store.files[paths[s]][o : o + n] for s, o, n in ranges]
    self.assertEqual(out.tobytes(), b"".join(expected))

  def _stage(self, ranges, step=0, storage=None):
    return (storage or self.spooled).stage(*self._ranges(ranges), step)

  def test_it_is_a_storage(self):
    self.assertIsInstance(self.spooled, base.Storage)

  def test_what_was_staged_is_read_without_a_request(self):
    ranges = [(0, 0, 100), (1, 50, 200), (0, 4000, 1000)]
    self.assertTrue(self._stage(ranges))
    self.assertEqual(self.store.total, 3)
    self._read(ranges)
    self.assertEqual(self.store.total, 3)
    self.assertEqual((self.spooled.hits, self.spooled.misses), (3, 0))

  def test_what_is_there_is_not_staged_again(self):
    self._stage([(0, 0, 100), (1, 0, 100)])
    self._stage([(0, 0, 100), (1, 0, 100), (1, 100, 100)])
    self.assertEqual(self.store.total, 3)

  def test_a_range_that_occurs_twice_is_requested_once(self):
    self._stage([(0, 0, 100), (0, 0, 100)])
    self.assertEqual(self.store.total, 1)
    self._read([(0, 0, 100), (0, 0, 100)])
    self.assertEqual(self.store.total, 1)

  def test_what_was_read_directly_is_kept(self):
    self._read([(0, 0, 100), (1, 0, 100)])
    self.spooled.flush()
    self._read([(1, 0, 100), (0, 0, 100)])
    self.assertEqual(self.store.total, 2)
    self.assertEqual((self.spooled.hits, self.spooled.misses), (2, 2))

  def test_a_later_run_makes_no_request_for_what_is_there(self):
    self._stage([(0, 0, 100)])
    self._read([(1, 0, 100)])
    self.spooled.close()
    again = self._open()
    self._read([(0, 0, 100), (1, 0, 100)], again)
    self.assertEqual(self.store.total, 2)

  def test_a_replaced_file_is_read_again(self):
    self._stage([(0, 0, 100)])
    self.spooled.close()
    self.store.versions["s3://bucket/a"] = "v2"
    self.store.files["s3://bucket/a"] = bytes(5000)
    self._read([(0, 0, 100)], self._open())
    self.assertEqual(self.store.total, 2)

  def test_files_whose_version_is_unknown_are_not_kept(self):
    self.store.versions = dict.fromkeys(_PATHS)
    ranges = [(0, 0, 100), (1, 0, 100)]
    self._read(ranges)
    self.spooled.flush()
    self._stage(ranges)
    self._stage([(0, 100, 100)])
    self._read(ranges)
    self.assertEqual(self.store.total, 4)

  def test_versions_that_are_not_known_are_asked_for_once(self):
    self.store.versions = dict.fromkeys(_PATHS)
    asked, plain = [], self.store.size

    def learn(path):
      asked.append(path)
      self.store.versions[path] = "v1"
      return plain(path)

    self.store.size = learn
    self._stage([(0, 0, 100), (0, 100, 100)])
    self._stage([(0, 200, 100), (1, 0, 100)])
    self._read([(0, 100, 100), (0, 0, 100), (1, 0, 100)])
    self.assertEqual(self.store.total, 4)
    self.assertCountEqual(asked, _PATHS)

  def test_a_range_that_is_being_staged_is_waited_for_and_not_requested_again(self):
    self.store.working.clear()
    stager = threading.Thread(target=self._stage, args=([(0, 0, 100), (1, 0, 100)],))
    stager.start()
    while self.store.in_flight < 2:
      pass
    reader = threading.Thread(target=self._read, args=([(1, 0, 100)],))
    reader.start()
    self.store.working.set()
    reader.join()
    stager.join()
    self.assertEqual(self.store.total, 2)

  @parameterized.parameters(range(1, 8))
  def test_a_range_that_is_read_and_staged_at_once_is_requested_once(self, moment):
    """The read begins when staging releases the lock for the nth time."""
    readers, releases = [], []

    class Condition(threading.Condition):

      def __exit__(condition, *args):
        super().__exit__(*args)
        if threading.current_thread() is threading.main_thread():
          releases.append(condition)
          if len(releases) == moment:
            begin_to_read()

    def begin_to_read():
      self.store.working.clear()
      readers.append(threading.Thread(target=self._read, args=([(0, 0, 100)], storage)))
      readers[0].start()
      end = time.monotonic() + 0.2  # It may wait for the lock.
      while not self.store.in_flight and time.monotonic() < end:
        time.sleep(0.001)
      self.store.working.set()

    with mock.patch.object(threading, "Condition", Condition):
      storage = self._open()
    self.assertTrue(self._stage([(0, 0, 100)], 0, storage))
    for reader in readers:
      reader.join()
    self.assertEqual(self.store.total, 1)

  def _stage_in_two_threads(self, stopped):
    """Stages ranges, the second ones while the first ones are being fetched.

    Args:
      stopped: Whether the second call is told to stop while it waits.

    Returns:
      What the second call returns, and how many ranges were requested before the first ended.
    """
    self.store.working.clear()
    stop = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
      first = pool.submit(self._stage, [(0, 0, 100)])
      while not self.store.in_flight:
        pass
      ranges = self._ranges([(0, 0, 100), (1, 0, 100)])
      second = pool.submit(self.spooled.stage, *ranges, 1, stop.is_set)
      concurrent.futures.wait([second], timeout=0.2)
      requested = self.store.total
      if stopped:
        stop.set()
      self.store.working.set()
      self.assertTrue(first.result())
      return second.result(), requested

  def test_two_threads_fetch_ranges_one_after_the_other_and_only_once(self):
    self.assertEqual(self._stage_in_two_threads(stopped=False), (True, 1))
    self.assertEqual(self.store.total, 2)
    self._read([(0, 0, 100), (1, 0, 100)])
    self.assertEqual(self.store.total, 2)

  def test_a_thread_that_stops_while_it_waits_for_another_requests_nothing(self):
    self.assertEqual(self._stage_in_two_threads(stopped=True), (False, 1))
    self.assertEqual(self.store.total, 1)

  def test_if_staging_fails_the_reader_reads_by_itself(self):
    self.store.working.clear()
    self.store.fails = True
    stager = threading.Thread(
        target=lambda: self.assertRaises(errors.CorpusError, self._stage, [(0, 0, 100)])
    )
    stager.start()
    while not self.store.in_flight:
      pass
    reader = threading.Thread(
        target=lambda: self.assertRaises(errors.CorpusError, self._read, [(0, 0, 100)])
    )
    reader.start()
    self.store.working.set()
    stager.join()
    reader.join()
    self.assertEqual(self.store.total, 2)
    self.store.fails = False
    self._read([(0, 0, 100)])

  def test_errors_of_the_store_reach_the_reader(self):
    self.store.fails = True
    with self.assertRaisesRegex(errors.CorpusError, "broken"):
      self._read([(0, 0, 100)])

  def test_nothing_is_requested_for_a_full_spool(self):
    storage = self._open(limit=1 << 20)
    self.store.files["s3://bucket/a"] = bytes(2 << 20)
    staged = 0
    while self._stage([(0, 4000 * staged, 4000)], staged, storage):
      staged += 1
    self.assertGreater(staged, 100)
    self.assertEqual(self.store.total, staged)
    storage.spool.release(50)
    self.assertTrue(self._stage([(0, 4000 * staged, 4000)], staged, storage))

  def test_scattered_ranges_of_a_full_spool_are_copied_and_not_requested(self):
    storage = self._open(limit=1 << 20)
    self.store.files["s3://bucket/a"] = bytes(2 << 20)
    staged = 0
    while self._stage([(0, 4000 * staged, 4000)], staged, storage):
      staged += 1
    storage.spool.release()
    self.assertTrue(self._stage([(0, 4000 * staged, 4000)], staged, storage))
    total = self.store.total
    # One range of every file: too few to keep all files for.
    scattered = [(0, 4000 * n, 4000) for n in range(staged // 2, staged, 9)]
    for i in range(0, len(scattered), 3):
      self.assertTrue(self._stage(scattered[i : i + 3], staged + 1, storage))
    self._read(scattered, storage)
    self.assertEqual(self.store.total, total)

  def test_a_spool_that_is_off_changes_nothing(self):
    path = os.path.join(self.directory, "file")
    pathlib.Path(path).write_text("")
    off = spooled.SpooledStorage(self.store, spool_lib.Spool(path, _LIMIT))
    self._read([(0, 0, 100), (1, 7, 13)], off)
    self.assertFalse(self._stage([(0, 0, 100)], 0, off))
    self._read([(0, 0, 100)], off)
    off.close()

  def test_copies_share_the_spool(self):
    self._stage([(0, 0, 100)])
    self.spooled.flush()
    copy = pickle.loads(pickle.dumps(self.spooled))
    self.addCleanup(copy.close)
    self._read([(0, 0, 100)], copy)
    self.assertEqual(copy.storage.total, 0)

  @hypothesis.settings(deadline=None, max_examples=60)
  @hypothesis.given(st.data())
  def test_reads_equal_those_of_the_store_whatever_was_staged(self, data):
    ranges = st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 30), st.integers(0, 30)).map(
            lambda r: (r[0], 100 * r[1], 40 * r[2])
        ),
        max_size=12,
    )
    for _ in range(data.draw(st.integers(0, 4))):
      some = data.draw(ranges)
      if data.draw(st.booleans()):
        self._stage(some)
      else:
        self._read(some)
      if data.draw(st.booleans()):
        self.spooled.flush()


if __name__ == "__main__":
  absltest.main()
