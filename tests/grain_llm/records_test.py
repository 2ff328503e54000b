"""Tests of turning records of tokens into rows."""

import collections
import copy

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

E = 99


def _row(record, length=7, *, left=True, eod=E, long_documents="error"):
  row = records_lib.to_row(
      records_lib.record_of(record),
      length=length,
      long_documents=long_documents,
      pad=True,
      shift="left" if left else "right",
      eod_token_id=eod,
  )
  return {name: values.tolist() for name, values in row.items()}


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

  def test_padding_is_identified_by_its_segment_even_if_eod_has_its_id(self):
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

  def test_the_targets_of_a_record_are_kept(self):
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
      moved = records_lib.shifted(whole, "left" if left else "right", 3)
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
    for direction in ("left", "right", None):
      shifted = records_lib.shifted(batch, direction, E)
      for number, row in enumerate(rows):
        for name, values in records_lib.shifted(row, direction, E).items():
          np.testing.assert_array_equal(shifted[name][number], values, err_msg=name)

  def test_an_eod_among_inputs_that_a_record_masks_opens_no_document(self):
    row = _row({"inputs": [1, E, 3, E, 5], "inputs_segmentation": [1, 0, 1, 1, 1]})
    self.assertEqual(row["inputs_segmentation"], [1, 0, 1, 2, 2, 0, 0])
    self.assertEqual(row["inputs_position"], [0, 0, 2, 0, 1, 0, 0])

  def test_a_long_document_is_truncated_on_request(self):
    self.assertEqual(_row({"inputs": [1, 2, 3]}, 2, long_documents="truncate")["inputs"], [1, 2])

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
    with self.assertRaisesRegex(errors.CorpusError, "5 tokens, but a row holds 2.*truncate.*split"):
      records_lib.SplitDocuments(2, "error").flat_map(record)

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

  def test_tokens_may_be_in_another_column(self):
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
      ({"inputs": [1], "targets": [1, 2]}, "equal lengths"),
  )
  def test_an_invalid_record_says_why(self, record, message):
    with self.assertRaisesRegex(errors.CorpusError, message):
      records_lib.record_of(record)


class PackStreamTest(parameterized.TestCase):

  def rows(self, documents, name, length=8, bins=2, masks=()):
    stream = grain.MapDataset.source(
        [records_lib.record_of(d) for d in documents]
    ).to_iter_dataset()
    return list(
        records_lib.pack_stream(
            stream, name, length=length, bins=bins, shuffle=False, seed=0, masks=masks
        )
    )

  @parameterized.parameters(*packing.STREAMING)
  def test_the_example_of_the_packing_module(self, name):
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
