"""Tests of finding the ends of documents."""

import importlib.util
import unittest

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from maxtext_olmo.corpus import token_scan


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
      st.sampled_from(["uint8", "uint16", "uint32", "uint64"]),
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
  def test_the_compiled_loop_gives_the_same(self, dtype):
    rng = np.random.default_rng(0)
    cases = [(rng.integers(0, 90, size), [size // 3]) for size in (1, 255, 256, 257, 1000)]
    expected = [_scan(tokens, cuts, dtype, 7) for tokens, cuts in cases]
    self.assertTrue(token_scan.compile_now(np.dtype(dtype)))
    self.assertEqual([_scan(tokens, cuts, dtype, 7) for tokens, cuts in cases], expected)


if __name__ == "__main__":
  absltest.main()
