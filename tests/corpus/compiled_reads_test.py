"""Tests of reads in one compiled call."""

import os
import pathlib
import threading

import numpy as np
from absl.testing import absltest

from maxtext_olmo.corpus import compiled_reads
from maxtext_olmo.corpus.storage import local as local_storage
from maxtext_olmo.errors import CorpusError
from tests import distributed

STARTS_PROCESSES = True


class CompiledReadsTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    try:
      import numba  # noqa: F401
    except ImportError:
      raise absltest.SkipTest("numba (extra [fast]) is not installed") from None
    compiled_reads.READ_ROWS.wait()

  def setUp(self):
    super().setUp()
    self.assertIsNotNone(compiled_reads.READ_ROWS.get(0))
    self.directory = pathlib.Path(self.create_tempdir().full_path)
    self.paths, self.contents = [], []
    for i in range(5):
      content = np.random.default_rng(i).integers(0, 256, 1000, np.uint8)
      path = self.directory / str(i)
      content.tofile(path)
      self.paths.append(str(path))
      self.contents.append(content)

  def _ranges(self, count, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 5, count), rng.integers(0, 900, count)

  def test_rows_hold_their_ranges(self):
    disk = local_storage.LocalStorage()
    for seed in range(20):
      files, offsets = self._ranges(33, seed)
      out = np.zeros((33, 100), np.uint8)
      self.assertTrue(disk._fill_compiled(self.paths, files, offsets, out))
      for row, f, o in zip(out, files, offsets):
        np.testing.assert_array_equal(row, self.contents[f][o : o + 100])

  def test_a_short_file_is_the_same_error_as_ever(self):
    files, offsets = np.array([1, 2, 3]), np.array([0, 950, 0])
    with self.assertRaisesRegex(CorpusError, "2 is too short: bytes 950 to 1050 were expected"):
      local_storage.LocalStorage().fill(self.paths, files, offsets, np.zeros((3, 100), np.uint8))

  def test_offsets_beyond_4_gib_are_read(self):
    path = self.directory / "large"
    with open(path, "wb") as file:
      os.truncate(file.fileno(), 5 << 30)
      os.pwrite(file.fileno(), b"tail", (5 << 30) - 4)
    with open(path, "r+b") as file:
      os.pwrite(file.fileno(), b"tail", (5 << 30) - 4)
    out = np.zeros((2, 4), np.uint8)
    local_storage.LocalStorage().fill(
        [str(path)], np.array([0, 0]), np.array([(5 << 30) - 4, 0]), out
    )
    self.assertEqual(out[0].tobytes(), b"tail")

  def test_more_files_than_may_be_open_are_read_one_after_the_other(self):
    disk = local_storage.LocalStorage(max_open_files=2)
    files, offsets = self._ranges(20)
    out = np.zeros((20, 50), np.uint8)
    self.assertFalse(disk._fill_compiled(self.paths, files, offsets, out))
    disk.fill(self.paths, files, offsets, out)
    for row, f, o in zip(out, files, offsets):
      np.testing.assert_array_equal(row, self.contents[f][o : o + 50])

  def test_threads_read_at_once(self):
    disk = local_storage.LocalStorage(max_open_files=5)
    wrong = []

    def work(seed):
      for i in range(50):
        files, offsets = self._ranges(16, 100 * seed + i)
        out = np.zeros((16, 64), np.uint8)
        disk.fill(self.paths, files, offsets, out)
        wrong.extend(
            1
            for row, f, o in zip(out, files, offsets)
            if not np.array_equal(row, self.contents[f][o : o + 64])
        )

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    self.assertEmpty(wrong)

  def test_without_numba_python_reads(self):
    code = (
        "import sys; sys.modules['numba'] = None\n"
        "from maxtext_olmo.corpus import compiled_reads\n"
        "assert not compiled_reads.READ_ROWS.wait()\n"
        "assert compiled_reads.READ_ROWS.get(1 << 40) is None\n"
    )
    done = distributed.run_python(code)
    self.assertEqual(done.returncode, 0, done.stderr)


if __name__ == "__main__":
  absltest.main()
