"""Tests of atomic files."""

import os
import pathlib
import stat

from absl.testing import absltest

from maxtext_olmo import atomic


class AtomicTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)

  def test_a_file_takes_its_name_only_when_it_is_whole(self):
    path = self.dir / "x"
    with atomic.atomic_writer(path) as file:
      file.write(b"ab")
      self.assertFalse(path.exists())
    self.assertEqual(path.read_bytes(), b"ab")
    self.assertEqual(os.listdir(self.dir), ["x"])

  def test_an_error_leaves_the_old_file_and_nothing_else(self):
    path = self.dir / "x"
    path.write_text("old")
    with self.assertRaisesRegex(RuntimeError, "broken off"), atomic.atomic_writer(path) as file:
      file.write(b"new")
      raise RuntimeError("broken off")
    self.assertEqual(path.read_text(), "old")
    self.assertEqual(os.listdir(self.dir), ["x"])

  def test_text_is_written_as_utf8_and_replaces(self):
    path = self.dir / "x"
    atomic.write_atomically(path, b"old")
    atomic.write_atomically(path, "ä")
    self.assertEqual(path.read_bytes(), "ä".encode())

  def test_others_may_read_the_file_as_the_umask_says(self):
    before = os.umask(0o022)
    self.addCleanup(os.umask, before)
    atomic.write_atomically(self.dir / "x", "")
    self.assertEqual(stat.S_IMODE((self.dir / "x").stat().st_mode), 0o644)


if __name__ == "__main__":
  absltest.main()
