"""Tests of looking at rows as they are read."""

import importlib.util
import os
import pathlib
import threading

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.corpus import source as source_lib
from maxtext_olmo.corpus.storage import local as local_storage
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.rows import inspection
from maxtext_olmo.rows import repetition
from tests import distributed

STARTS_PROCESSES = True

_HAS_NUMBA = importlib.util.find_spec("numba") is not None
_LENGTH = 300


def _corpus(directory, dtype):
  """Three files of 20 windows; every fourth window repeats, and ids grow with the window."""
  rng = np.random.default_rng(0)
  rows = rng.integers(0, 200, (60, _LENGTH)).astype(dtype)
  rows[::4, 40:170] = np.tile([3, 9], 65)
  rows[:, 7] = np.arange(60) + 190
  paths = []
  for i, part in enumerate(np.split(rows, 3)):
    paths.append(str(directory / f"{i}.npy"))
    part.tofile(paths[-1])
  index = index_lib.build_index(
      [(path, "a") for path in paths], _LENGTH, tokenizer="bytes", dtype=np.dtype(dtype).name
  )
  return index, rows


class _OtherStorage(local_storage.LocalStorage):
  """Does more than read."""

  def fill(self, paths, file_ids, offsets, out):
    super().fill(paths, file_ids, offsets, out)
    out[:] = 1


class InspectorTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = pathlib.Path(self.create_tempdir().full_path)

  def _read(self, index, ids, *, ngram_filter=True, **source):
    inspector = inspection.Inspector(
        source_lib.OlmoNpyDataSource(index, **source), ngram_filter=ngram_filter
    )
    tokens = np.zeros((len(ids), _LENGTH), index.token_dtype)
    found = inspector.read(np.array(ids), tokens)
    return tokens, found, inspector.look(tokens)

  @parameterized.parameters(np.uint8, np.uint16, np.uint32, np.uint64)
  @absltest.skipUnless(_HAS_NUMBA, "numba is not installed")
  def test_what_is_found_while_reading_is_what_numpy_finds(self, dtype):
    self.assertTrue(inspection.compile_reads(dtype))
    index, rows = _corpus(self.directory, dtype)
    ids = np.random.default_rng(1).permutation(60)[:37]
    tokens, found, looked = self._read(index, ids)
    np.testing.assert_array_equal(tokens, rows[ids])
    self.assertEqual(found.highest, rows[ids].max())
    np.testing.assert_array_equal(found.clean, ids % 4 != 0)
    self.assertEqual(found.highest, looked.highest)
    np.testing.assert_array_equal(found.clean, looked.clean)

  @absltest.skipUnless(_HAS_NUMBA, "numba is not installed")
  def test_without_the_filter_only_the_highest_id_is_found(self):
    self.assertTrue(inspection.compile_reads(np.uint32))
    index, rows = _corpus(self.directory, np.uint32)
    _, found, looked = self._read(index, [4, 50], ngram_filter=False)
    self.assertEqual(found, inspection.Findings(int(rows[[4, 50]].max()), None))
    self.assertEqual(looked, found)

  @absltest.skipUnless(_HAS_NUMBA, "numba is not installed")
  def test_a_file_that_was_cut_off_is_the_same_error_as_ever(self):
    self.assertTrue(inspection.compile_reads(np.uint32))
    index, _ = _corpus(self.directory, np.uint32)
    os.truncate(self.directory / "1.npy", 5000)
    with self.assertRaisesRegex(CorpusError, "1.npy is too short"):
      self._read(index, [2, 30, 3])

  @absltest.skipUnless(_HAS_NUMBA, "numba is not installed")
  def test_more_files_than_may_be_open_are_read_without_looking(self):
    self.assertTrue(inspection.compile_reads(np.uint32))
    index, rows = _corpus(self.directory, np.uint32)
    tokens, found, _ = self._read(index, [1, 25, 45], max_open_files=2)
    self.assertIsNone(found)
    np.testing.assert_array_equal(tokens, rows[[1, 25, 45]])

  @absltest.skipUnless(_HAS_NUMBA, "numba is not installed")
  def test_a_storage_that_does_more_than_read_is_not_passed_by(self):
    self.assertTrue(inspection.compile_reads(np.uint32))
    index, _ = _corpus(self.directory, np.uint32)
    tokens, found, _ = self._read(index, [1, 25, 45], storage=_OtherStorage())
    self.assertIsNone(found)
    np.testing.assert_array_equal(tokens.view(np.uint8), 1)

  @absltest.skipUnless(_HAS_NUMBA, "numba is not installed")
  def test_threads_read_at_once(self):
    self.assertTrue(inspection.compile_reads(np.uint16))
    index, rows = _corpus(self.directory, np.uint16)
    source = source_lib.OlmoNpyDataSource(index, max_open_files=3)
    inspector = inspection.Inspector(source, ngram_filter=True)
    right = []

    def work(seed):
      rng = np.random.default_rng(seed)
      tokens = np.zeros((16, _LENGTH), np.uint16)
      for _ in range(50):
        ids = rng.integers(0, 60, 16)
        found = inspector.read(ids, tokens)
        same = np.array_equal(tokens, rows[ids]) and np.array_equal(found.clean, ids % 4 != 0)
        right.append(same and found.highest == rows[ids].max())

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    self.assertEqual(right, [True] * 200)

  def test_no_tokens_have_no_highest_id(self):
    inspector = inspection.Inspector(source_lib.OlmoNpyDataSource, ngram_filter=True)
    found = inspector.look(np.zeros((0, 8), np.uint32))
    self.assertEqual(found.highest, 0)
    self.assertEmpty(found.clean)

  def test_without_numba_numpy_looks(self):
    code = """
import sys; sys.modules["numba"] = None
import numpy as np
from maxtext_olmo.rows import inspection
assert not inspection.compile_reads(np.uint32)
found = inspection.Inspector(None, ngram_filter=True).look(np.zeros((2, 100), np.uint32))
assert found.clean.tolist() == [False, False] and found.highest == 0
"""
    done = distributed.run_python(code)
    self.assertEqual(done.returncode, 0, done.stderr)


class SearchBoundsTest(absltest.TestCase):

  def test_nothing_longer_than_the_row_is_looked_for(self):
    self.assertEqual(repetition.search_bounds(8192), (1, 13, 31))
    self.assertEqual(repetition.search_bounds(30), (1, 10, 31))
    self.assertEqual(repetition.search_bounds(0), (1, 0, 1))


if __name__ == "__main__":
  absltest.main()
