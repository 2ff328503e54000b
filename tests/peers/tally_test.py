"""Tests that differences from OLMo-core are counted and raised."""

import numpy as np
from absl.testing import absltest

from tests.peers import tally


class TallyTest(absltest.TestCase):

  def test_a_row_differs_if_one_of_its_arrays_does(self):
    ours = np.arange(6).reshape(3, 2)
    theirs = ours.copy()
    theirs[2, 0] = 7
    lengths = [[1], [1, 1], [2]]
    before = tally.total("rows"), tally.total("differing rows")
    tally.compare_rows("rows", (ours, ours), (lengths, lengths))
    with self.assertRaisesRegex(AssertionError, r"row 2 of a batch differs: \[4 5\] and \[7 5\]"):
      tally.compare_rows("rows", (ours, theirs), (lengths, lengths))
    with self.assertRaisesRegex(AssertionError, "row 1"):
      tally.compare_rows("rows", (ours, ours), (lengths, [[1], [2], [2]]))
    found = tally.total("rows"), tally.total("differing rows")
    self.assertEqual((found[0] - before[0], found[1] - before[1]), (9, 2))

  def test_missing_rows_are_a_difference(self):
    with self.assertRaisesRegex(AssertionError, "2 rows, but OLMo-core has 1"):
      tally.compare_rows("missing", ([1, 2], [1]))

  def test_the_table_has_all_kinds_and_their_sum(self):
    tally.case("values")
    tally.compare("values", "a", "a")
    with self.assertRaisesRegex(AssertionError, "b, but OLMo-core has c"):
      tally.compare("values", "b", "c")
    rows = {row[0]: row[1:] for row in tally.rows()}
    self.assertEqual(rows["values"], ("1", "0", "0", "2", "1"))
    self.assertEqual(rows["all"][0], f"{tally.total('cases'):,}")


if __name__ == "__main__":
  absltest.main()
