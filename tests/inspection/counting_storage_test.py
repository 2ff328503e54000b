"""Tests of the storage that counts."""

import numpy as np
from absl.testing import absltest

from maxtext_olmo import errors
from maxtext_olmo.corpus import storage as storage_lib
from maxtext_olmo.inspection import counting_storage


class CountingStorageTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.paths = ("/data/a.npy", "gs://bucket/b.npy")
    self.storage = counting_storage.CountingStorage(dict.fromkeys(self.paths, 100))

  def fill(self, sources, offsets, sizes):
    sources, offsets, sizes = map(np.array, (sources, offsets, sizes))
    out = np.full(int(sizes.sum()), 7, np.uint8)
    self.storage.fill(self.paths, sources, offsets, sizes, out, np.cumsum(sizes) - sizes)
    return out

  def test_it_is_a_storage_and_reads_nothing(self):
    self.assertIsInstance(self.storage, storage_lib.Storage)
    self.assertEqual(set(self.fill([0, 1], [0, 0], [4, 4]).tolist()), {7})
    for read in (self.storage.read, self.storage.pieces):
      with self.assertRaisesRegex(errors.CorpusError, "has no bytes"):
        read(self.paths[0])

  def test_ranges_of_files_are_reads_and_ranges_of_objects_are_joined(self):
    self.fill([0, 0, 1, 1, 1], [0, 8, 0, 8, 32], [8, 8, 8, 8, 8])
    self.assertEqual((self.storage.reads, self.storage.requests), (2, 2))
    self.assertEqual(self.storage.bytes, 40)

  def test_sizes_are_counted_and_objects_without_an_etag_are_noted(self):
    self.assertEqual(self.storage.size(self.paths[0]), 100)
    self.assertEqual(self.storage.sizes_asked, 1)
    self.storage.expect(self.paths[1], 100, '"tag"')
    self.assertEmpty(self.storage.unversioned)
    self.storage.expect(self.paths[1], 100)
    self.assertEqual(self.storage.unversioned, {self.paths[1]})

  def test_only_urls_want_concurrency(self):
    self.assertFalse(self.storage.wants_concurrency(self.paths[:1]))
    self.assertTrue(self.storage.wants_concurrency(self.paths))
    self.assertIsNone(self.storage.pin(self.paths, np.array([0])))
    self.assertTrue(self.storage.exists(self.paths[0]))
    self.assertFalse(self.storage.exists("/data/c.npy"))


if __name__ == "__main__":
  absltest.main()
