"""Tests of readers: the results do not depend on how parts are read."""

import os
import pathlib
import threading

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import given
from hypothesis import settings

from maxtext_olmo import errors
from maxtext_olmo.corpus import storage as storage_lib
from maxtext_olmo.corpus import token_files
from maxtext_olmo.rows import parts as parts_lib
from maxtext_olmo.rows import reader as reader_lib
from tests import memory_storage
from tests.rows import tables

_LENGTH = 300
_SIZES = (2000, 700, 1300)
_OFFSETS = (0, 128, 0)  # The second file has a header.
_CHECKS = [
    reader_lib.Checks(5, ngram_filter, sees_padding)
    for ngram_filter in (False, True)
    for sees_padding in (False, True)
]


def _write(directory, dtype, storage=None):
  """Writes files with some repeated ids; returns them as `TokenFiles`."""
  rng = np.random.default_rng(0)
  contents, paths = [], []
  for i, (size, offset) in enumerate(zip(_SIZES, _OFFSETS)):
    tokens = rng.integers(0, 250, size).astype(dtype)
    tokens[100:200] = 9
    tokens[400:500] = np.resize([3, 4, 6], 100)
    path = pathlib.Path(directory, f"{i}.npy")
    path.write_bytes(b"h" * offset + tokens.tobytes())
    contents.append(tokens)
    paths.append(str(path))
  files = token_files.TokenFiles(
      tuple(paths),
      np.array(_OFFSETS, np.int64),
      np.dtype(dtype),
      storage_lib.LocalStorage() if storage is None else storage,
  )
  return files, contents


def _by_hand(contents, parts, pad_id, dtype):
  """Returns the rows of a table, copied one part at a time."""
  out = np.full((parts.num_rows, _LENGTH), pad_id, dtype)
  lines = zip(parts.row, parts.column, parts.source, parts.first, parts.count)
  for row, column, source, first, count in lines:
    out[row, column : column + count] = contents[source][first : first + count]
  return out


# Neighbours in a row, neighbours over the end of a row, padding, a padding row, and a full row.
_ROWS = [
    [(0, 10, 5), (0, 15, 20), (0, 35, 3), (1, 0, 7)],
    [(0, 90, 120)],
    [],
    [(2, 0, 300)],
    [(2, 300, 150), (2, 450, 150)],
    [(1, 400, 100), (0, 400, 100), (2, 400, 100)],
    [(1, 699, 1)],
]


class FileReaderTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = self.create_tempdir().full_path

  def _with_numpy(self, files, parts, checks):
    """Reads through the storage and checks with NumPy."""
    out = np.full((parts.num_rows, _LENGTH), 77, files.dtype)
    reader_lib.FileReader(files).filler(parts, out)(slice(None))
    return out, reader_lib._check_with_numpy(parts.used, out, checks)

  def _compiled(self, files, parts, checks):
    self.assertTrue(reader_lib.compile_reads(files.dtype))
    out = np.full((parts.num_rows, _LENGTH), 78, files.dtype)
    return out, reader_lib.FileReader(files).read(parts, out, checks)

  def _compare(self, files, contents, parts, checks):
    out, found = self._compiled(files, parts, checks)
    twin, expected = self._with_numpy(files, parts, checks)
    np.testing.assert_array_equal(out, _by_hand(contents, parts, checks.pad_id, files.dtype))
    np.testing.assert_array_equal(out, twin)
    self.assertEqual(found.highest, expected.highest)
    np.testing.assert_array_equal(found.clean, expected.clean)
    self.assertTrue(checks.ngram_filter or found.clean.all())
    return found

  @parameterized.product(dtype=("uint8", "uint16", "uint32", "uint64"), checks=_CHECKS)
  def test_the_kernel_and_numpy_give_the_same_results(self, dtype, checks):
    files, contents = _write(self.directory, dtype)
    self._compare(files, contents, parts_lib.Parts.of_rows(_ROWS), checks)

  def test_the_kernel_and_numpy_agree_for_any_parts(self):
    files, contents = _write(self.directory, "uint16")

    @given(tables.rows(max_first=600, max_count=60))
    @settings(max_examples=60, deadline=None)
    def check(rows):
      for checks in _CHECKS:
        self._compare(files, contents, parts_lib.Parts.of_rows(rows), checks)

    check()

  def test_the_filter_treats_padding_as_tokens_only_on_request(self):
    files, contents = _write(self.directory, "uint16")
    parts = parts_lib.Parts.of_rows([[(0, 0, 60)], [(0, 90, 120)], []])
    found = self._compare(files, contents, parts, reader_lib.Checks(0, True, False))
    self.assertEqual(found.clean.tolist(), [True, False, True])
    # 240 consecutive padding ids are a repetition, but a row without tokens is a padding row.
    found = self._compare(files, contents, parts, reader_lib.Checks(0, True, True))
    self.assertEqual(found.clean.tolist(), [False, False, True])

  @parameterized.parameters("uint8", "uint16", "uint32", "uint64")
  def test_the_highest_id_is_that_of_the_tokens_and_not_of_the_padding(self, dtype):
    files, contents = _write(self.directory, dtype)
    parts = parts_lib.Parts.of_rows([[(0, 100, 50)], []])
    found = self._compare(files, contents, parts, reader_lib.Checks(pad_id=255))
    self.assertEqual(found.highest, 9)

  def test_the_highest_id_may_be_the_highest_of_64_bits(self):
    path = pathlib.Path(self.directory, "tokens")
    np.array([1, 2**64 - 1], np.uint64).tofile(path)
    storage = storage_lib.LocalStorage()
    files = token_files.TokenFiles((str(path),), np.zeros(1, np.int64), np.dtype("uint64"), storage)
    parts = parts_lib.Parts.of_rows([[(0, 0, 2)]])
    for _, found in (
        self._compiled(files, parts, reader_lib.Checks()),
        self._with_numpy(files, parts, reader_lib.Checks()),
    ):
      self.assertEqual(found.highest, 2**64 - 1)

  def test_a_table_without_rows_can_be_read(self):
    files, _ = _write(self.directory, "uint16")
    for read in (self._compiled, self._with_numpy):
      out, found = read(files, parts_lib.Parts.of_rows([]), reader_lib.Checks(0, True))
      self.assertEqual(out.shape, (0, _LENGTH))
      self.assertEqual((found.highest, found.clean.tolist()), (0, []))

  @parameterized.parameters(True, False)
  def test_a_truncated_file_is_an_error_with_file_bytes_expected_and_found(self, compiled):
    files, _ = _write(self.directory, "uint32")
    parts = parts_lib.Parts.of_rows([[(0, 0, 9)], [(1, 10, 20), (1, 500, 150)], [(2, 0, 300)]])
    read = self._compiled if compiled else self._with_numpy
    read(files, parts, reader_lib.Checks())
    os.truncate(files.paths[1], 128 + 4 * 600)
    with self.assertRaises(errors.CorpusError) as caught:
      read(files, parts, reader_lib.Checks())
    message = str(caught.exception)
    self.assertIn(files.paths[1], message)
    self.assertIn(f"expected bytes {128 + 4 * 500} to {128 + 4 * 650}", message)
    self.assertIn(f"ends at byte {128 + 4 * 600}", message)
    self.assertIn("build the index again", message)

  def test_a_missing_file_is_an_error_that_names_it(self):
    files, _ = _write(self.directory, "uint16")
    os.unlink(files.paths[2])
    with self.assertRaisesRegex(errors.CorpusError, r"2\.npy: No such file"):
      self._compiled(files, parts_lib.Parts.of_rows([[(2, 0, 9)]]), reader_lib.Checks())

  @parameterized.parameters("memory", "one_open_file")
  def test_a_storage_without_descriptors_gives_the_same(self, kind):
    files, contents = _write(self.directory, "uint16")
    if kind == "memory":
      stored = {path: pathlib.Path(path).read_bytes() for path in files.paths}
      storage = memory_storage.MemoryStorage(stored)
      for path in files.paths:
        os.unlink(path)
    else:
      storage = storage_lib.LocalStorage(max_open_files=1)
    other = token_files.TokenFiles(files.paths, files.data_offsets, files.dtype, storage)
    for checks in _CHECKS:
      self._compare(other, contents, parts_lib.Parts.of_rows(_ROWS), checks)

  def test_a_filler_reads_some_of_the_parts(self):
    files, contents = _write(self.directory, "uint16")
    parts = parts_lib.Parts.of_rows(_ROWS)
    out = np.full((parts.num_rows, _LENGTH), 5, np.uint16)
    fill = reader_lib.FileReader(files).filler(parts, out)
    for i in reversed(range(len(parts.source))):
      fill(slice(i, i + 1))
    np.testing.assert_array_equal(out, _by_hand(contents, parts, 5, np.uint16))

  def test_threads_may_share_a_reader_even_while_files_are_closed(self):
    files, contents = _write(self.directory, "uint16", storage_lib.LocalStorage(max_open_files=2))
    self.assertTrue(reader_lib.compile_reads(np.uint16))
    reader = reader_lib.FileReader(files)
    right = []

    def work(seed):
      rng = np.random.default_rng(seed)
      out = np.zeros((4, _LENGTH), np.uint16)
      for _ in range(50):
        rows = [[(int(rng.integers(3)), int(rng.integers(400)), 300)] for _ in range(4)]
        parts = parts_lib.Parts.of_rows(rows)
        reader.read(parts, out, reader_lib.Checks(0, True))
        right.append(np.array_equal(out, _by_hand(contents, parts, 0, np.uint16)))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    self.assertEqual(right, [True] * 200)

  def test_a_token_is_named_by_file_and_byte(self):
    files, _ = _write(self.directory, "uint32")
    self.assertEndsWith(reader_lib.FileReader(files).where(1, 10), "1.npy, byte 168")


class RecordReaderTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(0)
    self.records = [{"inputs": rng.integers(0, 99, size)} for size in (40, 7, 300)]

  @parameterized.parameters("int32", "uint32", "uint16")
  def test_parts_of_records_fill_rows(self, dtype):
    reader = reader_lib.RecordReader(self.records, np.dtype(dtype))
    parts = parts_lib.Parts.of_rows([[(0, 3, 20), (1, 0, 7)], [], [(2, 0, 300)]])
    out = np.empty((3, _LENGTH), reader.dtype)
    found = reader.read(parts, out, reader_lib.Checks(5, True))
    contents = [record["inputs"] for record in self.records]
    np.testing.assert_array_equal(out, _by_hand(contents, parts, 5, dtype))
    highest = max(contents[0][3:23].max(), contents[1].max(), contents[2].max())
    self.assertEqual(found.highest, highest)
    self.assertEqual(found.clean.tolist(), [True, True, True])
    self.assertEqual(reader.where(2, 5), "record 2, token 5")
    self.assertFalse(reader.wants_concurrency)

  def test_an_id_that_a_batch_cannot_hold_is_an_error(self):
    for dtype, tokens in (("int32", [1, 2**32 + 5]), ("uint16", [-1, 3])):
      reader = reader_lib.RecordReader([{"inputs": np.array(tokens)}], np.dtype(dtype))
      parts = parts_lib.Parts.of_rows([[(0, 0, 2)]])
      with self.assertRaisesRegex(errors.CorpusError, f"do not fit {dtype}"):
        reader.read(parts, np.empty((1, 2), dtype), reader_lib.Checks())

  @parameterized.parameters(True, False)
  def test_a_negative_id_is_above_every_vocabulary(self, compiled):
    parts = parts_lib.Parts.of_rows([[(0, 0, 3)]])
    out = np.array([[1, -1, 2, 9]], np.int32)
    if compiled:
      self.assertTrue(reader_lib.compile_reads(np.int32))
      found = reader_lib.check_rows(parts, out, reader_lib.Checks())
    else:
      found = reader_lib._check_with_numpy(parts.used, out, reader_lib.Checks())
    self.assertEqual(found.highest, 2**32 - 1)

  @parameterized.parameters(1, 6)
  def test_a_record_that_has_become_shorter_is_an_error(self, size):
    reader = reader_lib.RecordReader([{"inputs": np.ones(size, np.int64)}])
    parts = parts_lib.Parts.of_rows([[(0, 0, 7)]])
    with self.assertRaisesRegex(
        errors.CorpusError, rf"Record 0 .* expected tokens 0 to 7, .* has {size}"
    ):
      reader.read(parts, np.zeros((1, 8), np.int32), reader_lib.Checks())


if __name__ == "__main__":
  absltest.main()
