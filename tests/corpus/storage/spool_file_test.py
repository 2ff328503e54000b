"""Tests of the files of a spool."""

import os

import hypothesis
import numpy as np
from absl.testing import absltest
from hypothesis import strategies as st

from maxtext_olmo.corpus.storage import spool_file
from maxtext_olmo.errors import CorpusError
from tests.corpus.storage import spool_test


class SpoolFileTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = self.create_tempdir().full_path

  @hypothesis.settings(deadline=None, max_examples=40)
  @hypothesis.given(st.lists(st.lists(st.integers(0, 99), max_size=600, unique=True), max_size=3))
  def test_what_was_appended_is_read(self, groups):
    writer = spool_file.SpoolWriter(self.directory, 1 << 20)
    everything = [number for group in groups for number in group]
    places = [
        writer.append(spool_test.names_of(group, 50), *spool_test.data_of(group, 50))
        for group in groups
    ]
    size = writer.finish()
    self.assertEqual(os.path.getsize(writer.final_path), size)
    names, found, read_size = spool_file.read_table(writer.final_path)
    self.assertEqual(read_size, size)
    np.testing.assert_array_equal(names, spool_test.names_of(everything, 50))
    np.testing.assert_array_equal(found, np.concatenate([np.zeros(0, np.int64), *places]))
    for number, name, place in zip(everything, names, found.tolist()):
      out = bytearray(50)
      self.assertTrue(spool_file.read_range(writer.file, place, name.tobytes(), memoryview(out)))
      self.assertEqual(out, spool_test.data_of([number], 50)[0].tobytes())

  def test_room_is_exact(self):
    writer = spool_file.SpoolWriter(self.directory, 1000)
    names, (data, places) = spool_test.names_of([1, 2, 3], 100), spool_test.data_of([1, 2, 3], 100)
    writer.append(names, data, places)
    used = 1000 - writer.room
    self.assertEqual(writer.finish(), used)

  def test_it_has_its_full_size_while_it_is_written(self):
    writer = spool_file.SpoolWriter(self.directory, 12345)
    self.assertEqual(os.path.getsize(writer.path), 12345)
    self.assertFalse(os.path.exists(writer.final_path))
    writer.discard()
    self.assertEmpty(os.listdir(self.directory))

  def test_only_files_of_dead_writers_are_abandoned(self):
    writer = spool_file.SpoolWriter(self.directory, 100)
    self.assertFalse(spool_file.is_abandoned(writer.path))
    path = writer.path
    del writer
    self.assertTrue(spool_file.is_abandoned(path))
    self.assertFalse(spool_file.is_abandoned(path + "x"))

  def test_a_file_that_may_not_be_written_is_not_abandoned(self):
    path = os.path.join(self.create_tempdir().full_path, "other.part")
    with open(path, "wb"):
      os.chmod(path, 0o444)
    user = os.geteuid()
    if not user:
      os.seteuid(65534)  # Root may write any file.
    try:
      self.assertFalse(spool_file.is_abandoned(path))
    finally:
      os.seteuid(user)

  def test_other_files_are_refused(self):
    path = os.path.join(self.directory, "a")
    for content in (b"", b"x" * 10, b"x" * 1000, b"spool v1" + bytes(16)):
      with open(path, "wb") as file:
        file.write(content)
      if content.startswith(b"spool v1"):
        continue  # A complete file without ranges, but for its checksum.
      with self.assertRaises(CorpusError):
        spool_file.read_table(path)

  def test_a_fifo_is_refused_and_not_waited_for(self):
    path = os.path.join(self.directory, "fifo")
    os.mkfifo(path)
    with self.assertRaisesRegex(CorpusError, "not a regular file"):
      spool_file.read_table(path)
    self.assertTrue(spool_file.is_abandoned(path))

  def test_names_and_keys_differ_in_every_part(self):
    digests = np.array([spool_file.file_digest(p, v) for p, v in ("ab", "ac", "bb")], np.uint64)
    parts = [(f, o, s) for f in range(3) for o in (0, 1, 2**40) for s in (1, 2, 4096)]
    sources, offsets, sizes = np.array(parts, np.int64).T
    names = spool_file.make_names(digests, sources, offsets, sizes)
    self.assertLen(np.unique(names, axis=0), len(parts))
    self.assertLen(np.unique(spool_file.keys_of(names)), len(parts))

  def test_keys_of_neighbouring_ranges_do_not_collide(self):
    digests = np.array([spool_file.file_digest("a", "b")], np.uint64)
    numbers = np.arange(300_000)
    names = spool_file.make_names(digests, 0 * numbers, 32768 * numbers, 0 * numbers + 32768)
    self.assertLen(np.unique(spool_file.keys_of(names)), len(numbers))


if __name__ == "__main__":
  absltest.main()
