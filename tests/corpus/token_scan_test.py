"""Tests of finding the ends of documents."""

import concurrent.futures
import importlib.util
import os
import threading
import unittest

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from maxtext_olmo.corpus import token_scan
from maxtext_olmo.corpus.storage import LocalStorage
from maxtext_olmo.corpus.work import reading
from maxtext_olmo.errors import CorpusError
from tests.memory_storage import MemoryStorage


def _scan(tokens, cuts, dtype, eos_id):
  """Returns all ends, the highest id of each chunk, and the number of tokens."""
  scan = token_scan.TokenScan(np.dtype(dtype), eos_id)
  tops = []
  for chunk in np.split(np.array(tokens, dtype), sorted(cuts)):
    scan.add(chunk)
    tops.append(scan.top)
  return scan.ends.tolist(), tops, scan.count


class TokenScanTest(parameterized.TestCase):

  @settings(deadline=None, max_examples=50)
  @given(
      st.lists(st.integers(0, 5), max_size=200),
      st.lists(st.integers(0, 200), max_size=4),
      st.sampled_from(["uint8", "uint16", "uint32", "uint64", ">u2", ">u4"]),
  )
  def test_every_eos_is_found_however_the_tokens_are_cut(self, tokens, cuts, dtype):
    expected = [place for place, token in enumerate(tokens) if token == 3]
    ends, tops, count = _scan(tokens, cuts, dtype, 3)
    self.assertEqual((ends, count), (expected, len(tokens)))
    chunks = np.split(np.array(tokens), sorted(cuts))
    self.assertEqual(tops, [chunk.max(initial=0) for chunk in chunks])

  @parameterized.parameters(None, 70_000, -1)
  def test_an_eos_that_cannot_occur_is_never_found(self, eos_id):
    self.assertEqual(_scan([1, 65_535, 2], [1], "uint16", eos_id), ([], [1, 65_535], 3))

  @unittest.skipUnless(importlib.util.find_spec("numba"), "needs numba")
  @parameterized.parameters("uint8", "uint16", "uint32", "uint64")
  def test_the_compiled_loop_finds_every_eos_and_the_highest_id(self, dtype):
    self.assertTrue(token_scan.compile_now(np.dtype(dtype)))
    rng = np.random.default_rng(0)
    for size in (1, 127, 128, 129, 255, 1000, 5000):
      for most in (9, 250):  # Several in a block of compiled code, and at most one in most blocks.
        tokens = rng.integers(0, most, size)
        ends, tops, count = _scan(tokens, [size // 3], dtype, 7)
        self.assertEqual((ends, count), (np.flatnonzero(tokens == 7).tolist(), size))
        parts = tokens[: size // 3], tokens[size // 3 :]
        self.assertEqual(tops, [part.max(initial=0) for part in parts])

  def _write(self, tokens):
    path = os.path.join(self.create_tempdir().full_path, "x")
    tokens.tofile(path)
    return path

  # Nothing is compiled for big-endian tokens (">u2"), in whatever order the tests run.
  @parameterized.product(dtype=("uint8", "uint16", "uint32", "uint64", ">u2"), eos_id=(7, None))
  def test_reading_a_file_finds_what_its_tokens_hold(self, dtype, eos_id):
    if not dtype.startswith(">") and not token_scan.compile_now(np.dtype(dtype)):
      self.skipTest("needs numba")
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 90, 3_000_000 // np.dtype(dtype).itemsize).astype(dtype)
    # More than one block of compiled code, and a part of a block.
    tokens = np.tile(tokens, 3)
    path = self._write(tokens)
    start, end = 5 * tokens.itemsize, tokens.nbytes - 3 * tokens.itemsize
    for storage in (LocalStorage(), MemoryStorage({path: tokens.tobytes()})):
      scan = token_scan.TokenScan(tokens.dtype, eos_id)
      scan.read(storage, path, start, start)
      self.assertEqual((scan.count, scan.top), (0, 0))
      scan.read(storage, path, start, end)
      expected = np.flatnonzero(tokens[5:-3] == 7) if eos_id is not None else []
      np.testing.assert_array_equal(scan.ends, expected)
      self.assertEqual((scan.count, scan.top), (len(tokens) - 8, 89))

  @parameterized.parameters("uint16", ">u2")
  def test_reading_a_short_file_is_an_error_that_names_its_bytes(self, dtype):
    if not dtype.startswith(">") and not token_scan.compile_now(np.dtype(dtype)):
      self.skipTest("needs numba")
    path = self._write(np.zeros(100, np.uint16))
    scan = token_scan.TokenScan(np.dtype(dtype), 7)
    with self.assertRaisesRegex(CorpusError, "x is too short: expected bytes 20 to 220, but it"):
      scan.read(LocalStorage(), path, 20, 220)

  @unittest.skipUnless(importlib.util.find_spec("numba"), "needs numba")
  def test_compiled_reading_ends_when_the_thread_is_told_to_stop(self):
    token_scan.compile_now(np.dtype("uint16"))
    path = self._write(np.zeros(100, np.uint16))
    stop = threading.Event()
    stop.set()

    def read():
      reading.stop_with(stop)
      token_scan.TokenScan(np.dtype("uint16"), 7).read(LocalStorage(), path, 0, 200)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
      self.assertIsInstance(pool.submit(read).exception(), concurrent.futures.CancelledError)


if __name__ == "__main__":
  absltest.main()
