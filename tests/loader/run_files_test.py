"""Tests of reading the small files of a run."""

import os
import pathlib

from absl.testing import absltest
from etils import epath

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
    with self.assertRaisesRegex(OSError, "has 5 bytes, far more"):
      run_files.read(epath.Path(folder / "file"), largest=4)


if __name__ == "__main__":
  absltest.main()
