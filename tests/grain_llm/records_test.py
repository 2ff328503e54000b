"""Records of tokens → rows."""

import copy

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from maxtext_olmo import errors
from maxtext_olmo.grain_llm import records as records_lib

E = 99


def _row(record, length=7, *, left=True, eod=E):
  row = records_lib.padded(records_lib.record_of(record), length)
  row = records_lib.shifted(row, shift_target=left, eod_token_id=eod)
  return {name: values.tolist() for name, values in records_lib.segmented(row, eod).items()}


class RowTest(parameterized.TestCase):

  def test_the_worked_row_shifted_left(self):
    row = _row({"inputs": [1, 2, E, 4, 5]})
    self.assertEqual(row["inputs"], [1, 2, E, 4, 5, 0, 0])
    self.assertEqual(row["targets"], [2, E, 4, 5, 0, 0, 0])
    self.assertEqual(row["inputs_segmentation"], [1, 1, 2, 2, 2, 0, 0])
    self.assertEqual(row["targets_segmentation"], [1, 1, 2, 2, 0, 0, 0])
    self.assertEqual(row["inputs_position"], [0, 1, 0, 1, 2, 0, 0])
    self.assertEqual(row["targets_position"], row["inputs_position"])

  def test_the_worked_row_shifted_right(self):
    row = _row({"inputs": [1, 2, E, 4, 5]}, left=False)
    self.assertEqual(row["inputs"], [E, 1, 2, E, 4, 5, 0])
    self.assertEqual(row["targets"], [1, 2, E, 4, 5, 0, 0])
    self.assertEqual(row["inputs_segmentation"], [1, 1, 1, 2, 2, 0, 0])
    self.assertEqual(row["targets_segmentation"], [1, 1, 1, 2, 2, 0, 0])
    self.assertEqual(row["inputs_position"], [0, 1, 2, 0, 1, 0, 0])

  def test_a_row_may_open_with_eod_and_two_in_a_row_make_a_document_of_one(self):
    row = _row({"inputs": [E, 1, E, E, 2]})
    self.assertEqual(row["inputs_segmentation"], [1, 1, 2, 3, 3, 0, 0])
    self.assertEqual(row["inputs_position"], [0, 1, 0, 0, 1, 0, 0])

  def test_padding_is_told_by_its_segment_where_eod_is_the_padding_id(self):
    row = _row({"inputs": [1, 2, 0, 4, 5]}, eod=0)
    self.assertEqual(row["inputs_segmentation"], [1, 1, 2, 2, 2, 0, 0])
    self.assertEqual(row["targets_segmentation"], [1, 1, 2, 2, 0, 0, 0])
    self.assertEqual(row["inputs_position"], [0, 1, 0, 1, 2, 0, 0])
    right = _row({"inputs": [1, 2, 0, 4, 5]}, eod=0, left=False)
    self.assertEqual(right["inputs"], [0, 1, 2, 0, 4, 5, 0])
    self.assertEqual(right["inputs_segmentation"], [1, 1, 1, 2, 2, 0, 0])

  def test_an_empty_document_is_a_row_of_padding(self):
    for left in (True, False):
      row = _row({"inputs": []}, left=left)
      for name in ("inputs_segmentation", "targets_segmentation", "inputs_position"):
        self.assertEqual(row[name], [0] * 7)

  def test_what_a_record_masks_is_not_scored(self):
    row = _row({"inputs": [1, 2, 3, 4], "targets_segmentation": [0, 0, 1, 1]})
    self.assertEqual(row["targets"], [2, 3, 4, 0, 0, 0, 0])
    self.assertEqual(row["targets_segmentation"], [0, 1, 1, 0, 0, 0, 0])
    self.assertEqual(row["inputs_segmentation"], [1, 1, 1, 1, 0, 0, 0])

  def test_targets_of_a_records_own_stay(self):
    record = records_lib.record_of({"inputs": [1, 2], "targets": [8, 9], "other": "text"})
    self.assertEqual(set(record), {"inputs", "targets"})
    self.assertEqual(record["targets"].tolist(), [8, 9])

  @settings(deadline=None, max_examples=50)
  @given(st.lists(st.integers(0, 5), max_size=9), st.booleans(), st.integers(1, 4))
  def test_nothing_changes_its_input(self, ids, left, length):
    record = {"inputs": np.array(ids, np.int32), "targets": np.array(ids, np.int32)}
    before = copy.deepcopy(record)
    normal = records_lib.record_of(record)
    pieces = records_lib.fit(normal, length, "split")
    self.assertEqual([i for piece in pieces for i in piece["inputs"].tolist()], ids)
    for piece in pieces:
      whole = records_lib.padded(piece, length)
      kept = copy.deepcopy(whole)
      moved = records_lib.shifted(whole, shift_target=left, eod_token_id=3)
      records_lib.segmented(moved, 3)
      records_lib.AddEndOfDocument(3, length).map(whole)
      for name in kept:
        np.testing.assert_array_equal(whole[name], kept[name])
    for name in before:
      np.testing.assert_array_equal(record[name], before[name])
    for values in normal.values():
      values += 1
    np.testing.assert_array_equal(record["inputs"], before["inputs"])

  def test_a_batch_of_rows_is_the_rows(self):
    rows = [
        records_lib.padded(records_lib.record_of({"inputs": ids}), 6) for ids in ([1, E, 2], [E, 3])
    ]
    batch = records_lib.stack(rows, 3, 6)
    self.assertEqual(batch["inputs"].tolist(), [[1, E, 2, 0, 0, 0], [E, 3, 0, 0, 0, 0], [0] * 6])
    shifted = records_lib.segmented(
        records_lib.shifted(batch, shift_target=False, eod_token_id=E), E
    )
    for number, row in enumerate(rows):
      alone = records_lib.segmented(records_lib.shifted(row, shift_target=False, eod_token_id=E), E)
      for name, values in alone.items():
        np.testing.assert_array_equal(shifted[name][number], values, err_msg=name)

  def test_rows_of_other_lengths_are_padded_to_the_longest_or_refused(self):
    rows = [
        records_lib.padded(records_lib.record_of({"inputs": ids}), None) for ids in ([1, 2, 3], [4])
    ]
    self.assertEqual(records_lib.stack(rows, 2, None)["inputs"].tolist(), [[1, 2, 3], [4, 0, 0]])
    with self.assertRaisesRegex(errors.CorpusError, "3 tokens, expected 2"):
      records_lib.stack(rows, 2, 2)


class FitTest(parameterized.TestCase):

  def test_long_documents_are_cut_divided_or_refused(self):
    record = records_lib.record_of(
        {"inputs": [1, 2, 3, 4, 5], "targets_segmentation": [0, 1, 1, 1, 1]}
    )
    self.assertEqual(
        [piece["inputs"].tolist() for piece in records_lib.fit(record, 2, "split")],
        [[1, 2], [3, 4], [5]],
    )
    (cut,) = records_lib.fit(record, 2, "truncate")
    self.assertEqual(cut["targets_segmentation"].tolist(), [0, 1])
    with self.assertRaisesRegex(errors.CorpusError, "5 tokens, the row 2.*truncate.*split"):
      records_lib.fit(record, 2, "error")

  @parameterized.parameters(
      ([1, 2], None, [1, 2, E]),
      ([1, E], None, [1, E]),
      ([], None, [E]),
      ([1, 2], 3, [1, 2, E]),
      ([1, 2, 3], 3, [1, 2, 3]),
      ([1, 2, 3, 4], 3, [1, 2, 3]),
  )
  def test_an_eod_is_added_where_there_is_none_and_room_for_it(self, ids, max_length, expected):
    made = records_lib.AddEndOfDocument(E, max_length).map({"inputs": ids})
    self.assertEqual(made["inputs"].tolist(), expected)
    self.assertEqual(made["targets"].tolist(), expected)

  def test_tokens_may_lie_in_another_column(self):
    made = records_lib.TokenFeatures("ids").map({"ids": [3, 4], "text": "x"})
    self.assertEqual(made["inputs"].tolist(), [3, 4])
    with self.assertRaisesRegex(errors.CorpusError, "no 'words', only"):
      records_lib.TokenFeatures("words").map({"ids": [3]})

  @parameterized.parameters(
      ({"tokens": [1]}, "needs token ids under 'inputs'"),
      ([1, 2], "needs token ids under 'inputs'"),
      ({"inputs": [[1]]}, "list of integers"),
      ({"inputs": [1.5]}, "list of integers"),
      ({"inputs": [1 << 31]}, "does not fit int32"),
      ({"inputs": [1], "targets": [1, 2]}, "one length"),
  )
  def test_a_record_that_is_none_says_why(self, record, message):
    with self.assertRaisesRegex(errors.CorpusError, message):
      records_lib.record_of(record)


if __name__ == "__main__":
  absltest.main()
