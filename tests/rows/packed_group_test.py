"""Tests of packing the documents of a group of files."""

import numpy as np
from absl.testing import absltest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from maxtext_olmo.rows import packed_group
from maxtext_olmo.rows import tie_order


def _documents(*lengths: int) -> packed_group.Documents:
  """Returns documents of one file, one after the other."""
  length = np.array(lengths, np.int64)
  first = np.cumsum(length) - length
  return packed_group.Documents(np.zeros(len(length), np.int32), first, length, 0 * length)


def _rows(table) -> list[list[int]]:
  return [part.count.tolist() for part in table.split(np.arange(table.num_rows + 1))]


class PackTest(absltest.TestCase):

  def test_long_documents_are_truncated(self):
    cut = packed_group.cut(_documents(5, 3, 12, 2), 8, "truncate")
    self.assertEqual(cut.first.tolist(), [0, 5, 8, 20])
    self.assertEqual(cut.length.tolist(), [5, 3, 8, 2])
    self.assertEqual(_rows(packed_group.pack(cut, 8, "stable")), [[8], [5, 3], [2]])

  def test_long_documents_are_split_in_place(self):
    cut = packed_group.cut(_documents(5, 3, 16, 20, 2), 8, "split")
    self.assertEqual(cut.first.tolist(), [0, 5, 8, 16, 24, 32, 40, 44])
    self.assertEqual(cut.length.tolist(), [5, 3, 8, 8, 8, 8, 4, 2])

  def test_no_documents_make_no_rows(self):
    table = packed_group.pack(packed_group.cut(_documents(), 8, "split"), 8, "avx512")
    self.assertEqual(table.num_rows, 0)

  @settings(deadline=None, max_examples=60)
  @given(
      st.lists(st.integers(1, 40), max_size=300),
      st.sampled_from(["truncate", "split"]),
      st.sampled_from(tie_order.TIES),
  )
  def test_ties_change_which_documents_are_in_a_row_but_not_their_lengths(self, given, cut, ties):
    documents = packed_group.cut(_documents(*given), 16, cut)
    table = packed_group.pack(documents, 16, ties)
    self.assertEqual(_rows(table), _rows(packed_group.pack(documents, 16, "stable")))
    self.assertTrue((table.used <= 16).all())
    expected = zip(documents.first.tolist(), documents.length.tolist())
    self.assertCountEqual(zip(table.first.tolist(), table.count.tolist()), expected)


if __name__ == "__main__":
  absltest.main()
