"""Tests of what a process knows of the files in a spool."""

import concurrent.futures
import os
import threading
import time
from unittest import mock

import numpy as np
from absl.testing import absltest

from maxtext_olmo.corpus.storage import spool_file
from maxtext_olmo.corpus.storage import spool_index
from tests.corpus.storage import spool_test


class SpoolIndexTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = self.create_tempdir().full_path
    self.index = spool_index.SpoolIndex(self.directory)

  def _write(self, numbers):
    """Writes a complete file, as another process does, and returns its path."""
    writer = spool_file.SpoolWriter(self.directory, 1 << 20)
    writer.append(spool_test.names_of(numbers), *spool_test.data_of(numbers))
    writer.finish()
    return writer.final_path

  def _find(self, numbers):
    return [n for n, f in zip(numbers, self.index.find(spool_test.names_of(numbers))[0]) if f >= 0]

  def _later(self):
    time.sleep(0.15)  # Longer than between two listings.

  def test_files_of_others_are_found(self):
    self._write([1, 2])
    self.assertEqual(self._find([1, 2, 3]), [1, 2])
    self._later()
    self._write([3])
    self.assertEqual(self._find([1, 2, 3]), [1, 2, 3])
    self.assertGreater(self.index.used_bytes, 3000)

  def test_threads_that_search_at_once_all_find_what_is_there(self):
    numbers = list(range(100))
    for number in numbers:
      self._write([number])
    together = threading.Barrier(8)

    def find(_):
      together.wait()
      return self._find(numbers)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
      for found in pool.map(find, range(8)):
        self.assertEqual(found, numbers)

  def test_deleted_files_are_forgotten_with_the_next_listing(self):
    path = self._write([1])
    self.assertEqual(self._find([1]), [1])
    os.unlink(path)
    self._later()
    self._find([2])
    self.assertEqual(self._find([1]), [])
    self.assertEqual(self.index.used_bytes, 0)

  def test_an_unchanged_directory_is_not_listed_again(self):
    self._write([1])
    self._later()
    self._find([1, 2])
    listed = []
    original = os.listdir
    os.listdir = lambda path: listed.append(path) or original(path)
    try:
      self._later()
      self._find([2])
    finally:
      os.listdir = original
    self.assertEmpty(listed)

  def test_a_file_being_written_is_found_at_once_and_survives_a_listing(self):
    writer = spool_file.SpoolWriter(self.directory, 1 << 20)
    number = self.index.begin(writer)
    names = spool_test.names_of([5])
    self.index.add(number, names, writer.append(names, *spool_test.data_of([5])))
    self._write([6])
    self.assertEqual(self._find([5, 6]), [5, 6])
    self.assertIsNone(self.index.path(number))
    self.assertIs(self.index.open(number), writer.file)
    self.index.finish(number, writer.finish())
    self.assertEqual(self.index.path(number), writer.final_path)
    self._later()
    self._find([7])
    self.assertEqual(self._find([5, 6]), [5, 6])

  def test_a_file_that_is_finished_during_a_listing_is_not_forgotten(self):
    writer = spool_file.SpoolWriter(self.directory, 1 << 20)
    number = self.index.begin(writer)
    names = spool_test.names_of([5])
    self.index.add(number, names, writer.append(names, *spool_test.data_of([5])))
    plain = os.listdir

    def listdir(path):
      listed = plain(path)
      self.index.finish(number, writer.finish())
      return listed

    with mock.patch.object(os, "listdir", listdir):
      self.assertEqual(self._find([5, 6]), [5])
    self.assertEqual(self.index.path(number), writer.final_path)
    self.assertGreater(self.index.written_bytes([number]), 0)

  def test_only_complete_files_of_this_process_count_as_written(self):
    self._write([1])
    other = int(self.index.find(spool_test.names_of([1]))[0][0])
    writer = spool_file.SpoolWriter(self.directory, 1 << 20)
    own = self.index.begin(writer)
    self.assertEqual(self.index.written_bytes([own, other]), 0)
    size = writer.finish()
    self.index.finish(own, size)
    self.assertEqual(self.index.written_bytes([own, other]), size)
    self.assertEqual(self.index.written_bytes([other]), 0)
    self.index.forget(own)
    self.assertEqual(self.index.written_bytes([own, other]), 0)

  def test_few_files_are_open_at_a_time(self):
    for number in range(80):
      self._write([number])
    files, _ = self.index.find(spool_test.names_of(range(80)))
    before = len(os.listdir("/proc/self/fd"))
    for number in files.tolist():
      self.assertIsNotNone(self.index.open(number))
    self.assertLessEqual(len(os.listdir("/proc/self/fd")) - before, 65)
    self.index.close()
    self.assertLessEqual(len(os.listdir("/proc/self/fd")), before)

  def test_opening_a_deleted_file_forgets_it(self):
    path = self._write([1])
    number = int(self.index.find(spool_test.names_of([1]))[0][0])
    os.unlink(path)
    self.assertIsNone(self.index.open(number))
    self.assertEqual(self._find([1]), [])

  def test_a_damaged_file_is_deleted(self):
    path = self._write([1])
    number = int(self.index.find(spool_test.names_of([1]))[0][0])
    with self.assertLogs(level="WARNING"):
      self.index.delete_damaged(number)
    self.assertFalse(os.path.exists(path))
    self.assertEqual(np.count_nonzero(self.index.find(spool_test.names_of([1]))[0] >= 0), 0)


if __name__ == "__main__":
  absltest.main()
