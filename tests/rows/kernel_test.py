"""Tests that compiled functions return the same results as NumPy and Python."""

import os
import pathlib

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from maxtext_olmo.rows import kernel
from maxtext_olmo.rows import packing
from maxtext_olmo.rows import repetition


def _repeats_somewhere(tokens, min_period, max_period, repeats):
  """Returns whether a period has a run of `repeats` times its length, by trying every place."""
  for period in range(min_period, min(max_period, len(tokens) // 3) + 1):
    run = 0
    for place in range(period, len(tokens)):
      run = run + 1 if tokens[place] == tokens[place - period] else 0
      if run >= repeats * period:
        return True
  return False


class SearchTest(parameterized.TestCase):

  @given(
      st.lists(st.integers(0, 2), max_size=60),
      st.integers(1, 3),
      st.integers(0, 6),
      st.integers(1, 6),
  )
  @settings(max_examples=200, deadline=None)
  def test_a_row_is_clean_if_a_slow_search_finds_nothing(self, tokens, low, high, repeats):
    row = np.array([*tokens, 0, 0, 0], np.uint16)
    found = kernel.is_clean(row, len(tokens), low, high, repeats)
    self.assertEqual(found, not _repeats_somewhere(tokens, low, high, repeats))

  @parameterized.parameters(2, 4)
  def test_the_compiled_search_equals_numpy_for_rows_of_real_length(self, itemsize):
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 3000, (40, 2048)).astype(f"u{itemsize}")
    for r in range(0, 40, 3):
      period, start = int(rng.integers(1, 16)), int(rng.integers(0, 1500))
      size = int(rng.integers(28, 36)) * period
      cycle = np.resize(rows[r, start : start + period], size)[: 2048 - start]
      rows[r, start : start + len(cycle)] = cycle
    search = kernel.build_search(itemsize)
    found = search(rows, *repetition.OLMO_RULE.search)
    expected = [not _repeats_somewhere(row.tolist(), *repetition.OLMO_RULE.search) for row in rows]
    self.assertEqual(found.tolist(), expected)
    self.assertIn(False, expected)


class BestFitTest(absltest.TestCase):

  @given(
      st.integers(1, 200).flatmap(
          lambda capacity: st.tuples(
              st.just(capacity), st.lists(st.integers(1, capacity), max_size=80)
          )
      ),
      st.booleans(),
  )
  @settings(max_examples=150, deadline=None)
  def test_compiled_bins_are_those_of_python(self, case, queues):
    capacity, lengths = case
    lengths = np.array(lengths, np.int64)
    compiled, plain = (np.empty(len(lengths), np.int64) for _ in range(2))
    counts = (
        kernel.build_best_fit()(lengths, capacity, queues, compiled),
        packing._best_fit(lengths, capacity, queues, plain),
    )
    self.assertEqual(counts[0], counts[1])
    self.assertEqual(compiled.tolist(), plain.tolist())

  def test_compiled_bins_of_many_documents_are_those_of_python(self):
    rng = np.random.default_rng(0)
    lengths = -np.sort(-np.minimum(rng.lognormal(6, 1.2, 5000).astype(np.int64) + 1, 8192))
    compiled, plain = (np.empty(len(lengths), np.int64) for _ in range(2))
    for queues in (False, True):
      count = kernel.build_best_fit()(lengths, 8192, queues, compiled)
      self.assertEqual(count, packing._best_fit(lengths, 8192, queues, plain))
      np.testing.assert_array_equal(compiled, plain)


class ExecuteTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.path = pathlib.Path(self.create_tempdir().full_path, "tokens")
    np.arange(100, dtype=np.uint16).tofile(self.path)
    self.file = os.open(self.path, os.O_RDONLY)
    self.addCleanup(os.close, self.file)

  def _execute(self, bounds, firsts, counts, *, source=0, descriptors=None):
    rows = len(bounds) - 1
    out = np.full((rows, 8), 99, np.uint16)
    failed, highest = kernel.build_execute(2)(
        np.array(bounds),
        np.full(len(counts), source, np.int32),
        np.array(firsts, np.int64),
        np.array(counts, np.int32),
        np.array([self.file] if descriptors is None else descriptors, np.int32),
        np.array([4]),
        out,
        np.uint16(7),
        (1, 0, 1),
        False,
        np.zeros(rows, bool),
    )
    return failed, out.tolist(), highest

  def test_parts_fill_rows_and_the_rest_is_padding(self):
    failed, out, highest = self._execute([0, 2, 2, 3], [8, 0, 48], [3, 2, 8])
    self.assertEqual(failed, -1)
    self.assertEqual(out, [[10, 11, 12, 2, 3, 7, 7, 7], [7] * 8, [50, 51, 52, 53, 54, 55, 56, 57]])
    self.assertEqual(highest, 57)

  def test_the_part_that_cannot_be_read_whole_is_named(self):
    self.assertEqual(self._execute([0, 1, 3], [0, 2, 95], [8, 3, 5])[0], 2)
    # For parts that are read together, the first.
    self.assertEqual(self._execute([0, 3], [0, 93, 96], [2, 3, 3])[0], 1)

  def test_a_file_that_is_not_open_or_does_not_exist_fails(self):
    self.assertEqual(self._execute([0, 1], [0], [3], descriptors=[-1])[0], 0)
    self.assertEqual(self._execute([0, 1], [0], [3], source=1)[0], 0)
    self.assertEqual(self._execute([0, 1], [0], [3], source=-1)[0], 0)

  def test_without_descriptors_the_tokens_that_are_there_are_checked(self):
    failed, out, highest = self._execute([0, 1], [0], [3], descriptors=[])
    self.assertEqual((failed, out, highest), (-1, [[99, 99, 99, 7, 7, 7, 7, 7]], 99))


if __name__ == "__main__":
  absltest.main()
