"""Tests of scanning many files at once."""

import io
import os
import pathlib
import threading

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.corpus import scan
from maxtext_olmo.corpus.storage import LocalStorage
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError

_U4 = np.dtype("<u4")
_LOCAL = LocalStorage()


class MapFilesTest(parameterized.TestCase):

  @parameterized.product(count=(0, 1, 7, 1000), workers=(None, 1, 3), block=(None, 1))
  def test_results_come_in_order(self, count, workers, block):
    results, errors = scan.map_files(lambda i: i * i, count, workers=workers, block=block)
    self.assertEqual(results, [i * i for i in range(count)])
    self.assertEmpty(errors)

  def test_corpus_errors_are_gathered_in_order(self):
    def fail(i: int) -> int:
      if i % 2:
        raise CorpusError(str(i))
      return i

    results, errors = scan.map_files(fail, 6, workers=3)
    self.assertEqual(results, [0, None, 2, None, 4, None])
    self.assertEqual([str(error) for error in errors], ["1", "3", "5"])
    with self.assertRaisesRegex(CorpusError, r"^Bad \(3 of 6 files\):\n  1\n  3\n  5$"):
      scan.all_or_error(results, errors, "Bad")

  def test_other_errors_stop_the_rest(self):
    called = []
    lock = threading.Lock()

    def fail(i: int) -> None:
      with lock:
        called.append(i)
      raise KeyError(i)

    with self.assertRaises(KeyError):
      scan.map_files(fail, 10_000, workers=1)
    self.assertLess(len(called), 10_000)

  def test_a_long_list_of_errors_is_shortened(self):
    text = scan.list_errors([CorpusError(str(i)) for i in range(13)])
    self.assertEqual(text.splitlines()[-1], "  … and 3 more")
    self.assertLen(text.splitlines(), 11)

  def test_workers_must_be_positive(self):
    with self.assertRaisesRegex(ConfigError, "workers must be at least 1, got 0"):
      scan.map_files(lambda i: i, 1, workers=0)


class ScanTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)

  def test_a_raw_file_is_all_tokens(self):
    path = self.dir / "x.npy"
    path.write_bytes(b"x" * 14)
    self.assertEqual(
        scan.scan_file(str(path), _U4, _LOCAL), scan.FileInfo(14, data_offset=0, n_tokens=3)
    )

  def test_an_empty_file_has_no_tokens(self):
    path = self.dir / "x.npy"
    path.touch()
    self.assertEqual(
        scan.scan_file(str(path), _U4, _LOCAL), scan.FileInfo(0, data_offset=0, n_tokens=0)
    )

  def test_a_header_is_recognised(self):
    path = self.dir / "x.npy"
    np.save(path, np.arange(9, dtype=np.uint32))
    self.assertEqual(
        scan.scan_file(str(path), _U4, _LOCAL), scan.FileInfo(164, data_offset=128, n_tokens=9)
    )

  def test_a_header_longer_than_the_first_read_is_recognised(self):
    stream = io.BytesIO()
    np.save(stream, np.arange(2, dtype=np.uint32))
    header = stream.getvalue()[10:128].rstrip() + b" " * 3000 + b"\n"
    path = self.dir / "x.npy"
    path.write_bytes(
        b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + stream.getvalue()[128:]
    )
    self.assertEqual(np.load(path).tolist(), [0, 1])
    info = scan.scan_file(str(path), _U4, _LOCAL)
    self.assertEqual((info.data_offset, info.n_tokens), (10 + len(header), 2))

  @parameterized.parameters(True, False)
  def test_all_files_that_cannot_be_used_are_named(self, progress):
    (self.dir / "a").write_bytes(b"abcd")
    np.save(self.dir / "b.npy", np.zeros(3))
    full = [str(self.dir / name) for name in ("a", "b.npy", "c")]
    with self.assertRaisesRegex(
        CorpusError,
        r"^Token files cannot be indexed \(2 of 3 files\):\n.*b\.npy has a .*float64.*\n.*/c: No"
        r" such file",
    ):
      scan.scan_files([*full], _U4, _LOCAL, workers=None, progress=progress)

  def test_urls_are_not_local_files(self):
    with self.assertRaisesRegex(
        CorpusError, "^gs://b/x is a URL, but LocalStorage reads local files only"
    ):
      scan.scan_file("gs://b/x", _U4, _LOCAL)

  def test_a_directory_is_not_a_token_file(self):
    with self.assertRaisesRegex(CorpusError, "is not a regular file"):
      scan.scan_file(str(self.dir), _U4, _LOCAL)


class ShortReadsTest(parameterized.TestCase):

  def test_a_header_is_found_even_if_each_read_returns_one_byte(self):
    path = os.path.join(self.create_tempdir().full_path, "x.npy")
    np.save(path, np.arange(9, dtype=np.uint32))
    original = os.preadv
    self.addCleanup(setattr, os, "preadv", original)
    os.preadv = lambda fd, buffers, *args: original(fd, [buffers[0][:1]], *args)
    self.assertEqual(scan.scan_file(path, _U4, LocalStorage()), scan.FileInfo(164, 128, 9))

  def test_a_header_with_a_damaged_beginning_is_an_error(self):
    path = pathlib.Path(self.create_tempdir().full_path, "x.npy")
    np.save(path, np.arange(9, dtype=np.uint32))
    path.write_bytes(b"x" + path.read_bytes()[1:])
    with self.assertRaisesRegex(CorpusError, "contains a .npy header, but does not begin with one"):
      scan.scan_file(str(path), _U4, LocalStorage())
    self.assertEqual(scan.scan_file(str(path), np.dtype("u1"), LocalStorage()).n_tokens, 164)

  @parameterized.parameters(4, 5)
  def test_a_file_truncated_within_the_magic_is_an_error(self, size):
    path = self.create_tempfile("x.npy", content=b"\x93NUMPY"[:size], mode="wb").full_path
    with self.assertRaisesRegex(CorpusError, "ends within the magic of a .npy file"):
      scan.scan_file(path, np.dtype("u1"), LocalStorage())


if __name__ == "__main__":
  absltest.main()
