"""Packing documents into rows."""

import collections

import grain
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from maxtext_olmo import errors
from maxtext_olmo.grain_llm import records as records_lib
from maxtext_olmo.rows import packing


class BestFitTest(absltest.TestCase):

  @settings(deadline=None, max_examples=100)
  @given(st.integers(1, 30).flatmap(lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c)))))
  def test_every_piece_is_in_one_bin_and_no_bin_is_overfull(self, case):
    capacity, lengths = case
    bins, count = packing.best_fit(np.array(lengths, np.int64), capacity)
    self.assertLen(bins, len(lengths))
    used = np.bincount(bins, weights=lengths, minlength=count) if lengths else np.zeros(0)
    self.assertLen(used, count)
    self.assertTrue((used <= capacity).all() and (used > 0).all())
    # Best fit never opens a bin while two half-empty ones could be one.
    self.assertLessEqual((used <= capacity / 2).sum(), 1)

  def test_each_piece_goes_where_the_least_room_is_left(self):
    # Bins of 6 and 5 are open when the 3 and the 2 come: 5 + 3 and 6 + 2 fill them.
    bins, count = packing.best_fit(np.array([5, 3, 6, 2]), 8)
    self.assertEqual(count, 2)
    self.assertEqual(bins[0], bins[1])
    self.assertEqual(bins[2], bins[3])

  def test_bins_are_the_same_once_it_is_compiled(self):
    rng = np.random.default_rng(0)
    cases = [rng.integers(1, 300, size) for size in (0, 1, 50, 400)]
    before = [packing.best_fit(lengths, 299) for lengths in cases]
    if not packing.compile_best_fit():
      self.skipTest("numba is not installed")
    for lengths, (bins, count) in zip(cases, before):
      again, same = packing.best_fit(lengths, 299)
      self.assertEqual(same, count)
      np.testing.assert_array_equal(again, bins)

  def test_a_piece_longer_than_a_bin_is_an_error(self):
    for wrong in (9, 0):
      with self.assertRaisesRegex(errors.ConfigError, "Pieces of 1 to 8"):
        packing.best_fit(np.array([wrong]), 8)


class PackStreamTest(parameterized.TestCase):

  def rows(self, documents, name, length=8, bins=2, masks=()):
    stream = grain.MapDataset.source(
        [records_lib.record_of(d) for d in documents]
    ).to_iter_dataset()
    return list(
        packing.pack_stream(
            stream, name, length=length, bins=bins, shuffle=False, seed=0, masks=masks
        )
    )

  @parameterized.parameters(*packing.STREAMING)
  def test_the_example_of_the_module(self, name):
    rows = self.rows([{"inputs": [n] * n} for n in (5, 3, 6, 2)], name)
    self.assertEqual(
        [row["inputs"].tolist() for row in rows], [[5] * 5 + [3] * 3, [6] * 6 + [2] * 2]
    )
    self.assertEqual(rows[0]["inputs_segmentation"].tolist(), [1] * 5 + [2] * 3)
    self.assertEqual(rows[0]["inputs_position"].tolist(), [0, 1, 2, 3, 4, 0, 1, 2])

  @parameterized.parameters(*packing.STREAMING)
  def test_no_token_is_lost_or_doubled_and_segments_and_positions_are_right(self, name):
    @settings(deadline=None, max_examples=20, database=None)
    @given(st.lists(st.integers(0, 8), min_size=1, max_size=20), st.integers(1, 4))
    def check(lengths, bins):
      documents, number = [], 1
      for length in lengths:
        documents.append({"inputs": np.arange(number, number + length)})
        number += length
      found = collections.Counter()
      for row in self.rows(documents, name, bins=bins):
        used = row["inputs_segmentation"] != 0
        self.assertFalse((np.diff(used.astype(int)) > 0).any(), "padding before tokens")
        found.update(row["inputs"][used].tolist())
        np.testing.assert_array_equal(row["inputs"], row["targets"])
        for segment in range(1, row["inputs_segmentation"].max() + 1):
          here = np.flatnonzero(row["inputs_segmentation"] == segment)
          self.assertTrue(len(here) and (np.diff(here) == 1).all(), "a segment is contiguous")
          self.assertTrue((np.diff(row["inputs"][here]) == 1).all(), "and of one document")
          self.assertEqual(row["inputs_position"][here].tolist(), list(range(len(here))))
      self.assertEqual(found, collections.Counter(range(1, number)))

    check()

  def test_an_unknown_choice_for_long_documents_names_the_known_ones(self):
    with self.assertRaisesRegex(errors.ConfigError, "'wrap' is unknown.*error, truncate, split"):
      packing.check_long_documents("wrap")

  def test_an_empty_document_takes_no_segment(self):
    (row,) = self.rows([{"inputs": []}, {"inputs": [1, 2]}, {"inputs": []}], "first_fit")
    self.assertEqual(row["inputs_segmentation"].tolist(), [1, 1] + [0] * 6)

  @parameterized.parameters(*packing.STREAMING)
  def test_what_records_mask_stays_masked(self, name):
    documents = [
        {"inputs": [1, 2, 3], "targets_segmentation": [0, 1, 1]},
        {"inputs": [4, 5], "targets_segmentation": [0, 1]},
    ]
    (row,) = self.rows(documents, name, length=5, masks=("targets",))
    self.assertEqual(row["targets_segmentation"].tolist(), [0, 1, 1, 0, 2])
    self.assertEqual(row["inputs_segmentation"].tolist(), [1, 1, 1, 2, 2])


if __name__ == "__main__":
  absltest.main()
