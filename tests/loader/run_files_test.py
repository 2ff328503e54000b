"""Tests of the small files of a run."""

import os
import pathlib

from absl.testing import absltest
from etils import epath

from maxtext_olmo import errors
from maxtext_olmo.loader import run_files


class RunFilesTest(absltest.TestCase):

  def test_only_small_regular_files_are_read(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    (folder / "file").write_bytes(b"12345")
    os.mkfifo(folder / "fifo")
    (folder / "link").symlink_to(folder / "nothing")
    self.assertEqual(run_files.read(epath.Path(folder / "file")), b"12345")
    for name in ("fifo", "link", "missing", "."):
      with self.assertRaisesRegex(OSError, "missing, or not a regular file"):
        run_files.read(epath.Path(folder / name))
    with self.assertRaisesRegex(OSError, "has 5 bytes, expected at most"):
      run_files.read(epath.Path(folder / "file"), largest=4)

  def test_a_file_is_written_whole_or_stays_as_it_was(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    path = epath.Path(folder / "new" / "file")
    run_files.write(path, "one")
    run_files.write(path, "two")
    self.assertEqual(path.read_text(), "two")
    with self.assertRaisesRegex(errors.WriteError, "Cannot write .*/file/below: "):
      run_files.write(path / "below", "three")
    (folder / "directory").mkdir()
    with self.assertRaisesRegex(errors.WriteError, "Cannot write .*directory"):
      run_files.write(epath.Path(folder / "directory"), "four")
    self.assertEqual(path.read_text(), "two")
    self.assertEqual(sorted(os.listdir(folder)), ["directory", "new"])
    self.assertEqual(os.listdir(folder / "new"), ["file"])


if __name__ == "__main__":
  absltest.main()
