"""Tests of counting token ids."""

import os

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from maxtext_olmo.corpus import token_counts
from maxtext_olmo.corpus import token_scan
from maxtext_olmo.corpus import token_scan_kernel
from maxtext_olmo.corpus.storage import LocalStorage


class TokenCountsTest(parameterized.TestCase):

  @settings(deadline=None, max_examples=50)
  @given(st.lists(st.lists(st.integers(0, 40), max_size=30), max_size=5), st.integers(0, 5))
  def test_counts_and_ends_of_chunks_are_those_of_all_tokens(self, chunks, eos):
    counts = token_counts.TokenCounts(np.dtype("uint16"), eos)
    for chunk in chunks:
      counts.add(np.array(chunk, np.uint16))
    every = np.array([token for chunk in chunks for token in chunk], np.int64)
    np.testing.assert_array_equal(counts.ids, np.bincount(every))
    np.testing.assert_array_equal(counts.ends, np.flatnonzero(every == eos))
    self.assertEqual((counts.count, counts.outside), (len(every), 0))

  @parameterized.parameters("uint8", "uint16", "uint32", "uint64")
  def test_every_dtype_is_counted(self, dtype):
    tokens = np.array([0, np.iinfo(np.uint8).max, 3, 3], dtype)
    counts = token_counts.TokenCounts(np.dtype(dtype))
    counts.add(tokens)
    self.assertEqual(counts.ids[[0, 3, 255]].tolist(), [1, 2, 1])
    self.assertLen(counts.ids, 256)
    self.assertEmpty(counts.ends)

  @parameterized.parameters("uint8", "uint16", "uint32", "uint64")
  def test_the_compiled_loop_finds_what_numpy_finds(self, dtype):
    count_tokens = token_scan_kernel.build(np.dtype(dtype)).count_tokens
    counts = np.zeros(50, np.uint32)
    expected = np.zeros(50, np.int64)
    for size in (0, 1, 1001, 30_000):
      tokens = np.random.default_rng(size).integers(0, 50, size).astype(dtype)
      count_tokens(tokens, counts)
      expected += np.bincount(tokens.astype(np.int64), minlength=50)
      np.testing.assert_array_equal(counts, expected)

  @parameterized.parameters("uint32", "uint64")
  def test_ids_that_no_tokenizer_has_are_counted_together(self, dtype):
    counts = token_counts.TokenCounts(np.dtype(dtype))
    counts.add(np.array([7, np.iinfo(dtype).max, token_counts.MOST_IDS, 7], dtype))
    self.assertEqual(counts.outside, 2)
    self.assertEqual(counts.ids.tolist(), [0] * 7 + [2])

  # Nothing is compiled for big-endian tokens, in whatever order the tests run.
  @parameterized.product(dtype=("uint32", ">u4"), eos=(3, None))
  def test_reading_a_file_counts_its_tokens_whatever_ids_it_holds(self, dtype, eos):
    if dtype == "uint32":
      self.assertTrue(token_scan.compile_now(np.dtype(dtype)))
    tokens = np.random.default_rng(0).integers(0, 50, 2_500_000).astype(dtype)
    tokens[1_500_000] = token_counts.MOST_IDS + 5
    path = os.path.join(self.create_tempdir().full_path, "x")
    tokens.tofile(path)
    counts = token_counts.TokenCounts(np.dtype(dtype), eos)
    counts.read(LocalStorage(), path, 4, tokens.nbytes)
    expected = np.bincount(tokens[1:][tokens[1:] < 50])
    np.testing.assert_array_equal(counts.ids, expected)
    self.assertEqual((counts.count, counts.outside), (len(tokens) - 1, 1))
    self.assertLen(counts.ends, 0 if eos is None else expected[3])


if __name__ == "__main__":
  absltest.main()
