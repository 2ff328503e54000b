"""Tests of packed rows; `tests/loader/olmo_packed_test.py` compares them with OLMo-core."""

import pickle

import numpy as np
from absl.testing import absltest

import maxtext_olmo
from maxtext_olmo.corpus import document_spans
from maxtext_olmo.rows import packed
from maxtext_olmo.rows import packed_plan
from maxtext_olmo.rows import row_source
from maxtext_olmo.rows import segments


class PackedRowsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    folder = self.create_tempdir().full_path
    # Documents of 5, 3, 12 and 2 tokens, and a tail that belongs to none.
    tokens = np.full(25, 7, np.uint16)
    tokens[[4, 7, 19, 21]] = 0
    tokens.tofile(f"{folder}/part.npy")
    index = maxtext_olmo.build_index(
        [("part.npy", "label")], 4, tokenizer="none", base=folder, dtype="uint16"
    )
    boundaries = document_spans.BoundaryRule("eos", 0)
    rule = packed_plan.PackingRule(8, 1, "truncate", "stable", boundaries)
    self.plan = packed_plan.build_plan(index, f"{folder}/plan", rule)
    self.rows = packed.PackedRows(self.plan, pad_id=9)

  def test_it_is_a_row_source(self):
    self.assertIsInstance(self.rows, row_source.RowSource)
    self.assertEqual((self.rows.row_length, self.rows.pad_id), (8, 9))
    self.assertTrue(self.rows.filter_sees_padding and self.rows.segments_cover_padding)
    self.assertEqual(self.rows.segment_rule, segments.SegmentRule())
    self.assertEqual(self.rows.fingerprint, self.plan.fingerprint)

  def test_rows_are_the_same_in_each_epoch(self):
    self.assertEqual([self.rows.num_rows(epoch) for epoch in (0, 7)], [3, 3])
    for epoch in (0, 7):
      parts = self.rows.parts(epoch, np.array([1, 0, 2]))
      self.assertEqual(parts.bounds.tolist(), [0, 2, 3, 4])
      self.assertEqual(parts.first.tolist(), [0, 5, 8, 20])
      self.assertEqual(parts.count.tolist(), [5, 3, 8, 2])

  def test_rows_are_found_by_their_tokens(self):
    self.assertEqual(self.rows.rows_of(0, 0, 4, 5).tolist(), [0, 1])
    self.assertEqual(self.rows.rows_of(1, 0, 16, 3).tolist(), [])  # The truncated end.

  def test_it_survives_pickling(self):
    again = pickle.loads(pickle.dumps(self.rows))
    self.assertEqual(again.parts(0, np.array([2])).first.tolist(), [20])


if __name__ == "__main__":
  absltest.main()
