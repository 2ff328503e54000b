"""Tests of the table of ranges."""

import hypothesis
import numpy as np
from absl.testing import absltest
from hypothesis import strategies as st

from maxtext_olmo.corpus.storage import range_table


class RangeTableTest(absltest.TestCase):

  @hypothesis.settings(deadline=None, max_examples=150)
  @hypothesis.given(
      st.lists(
          st.one_of(
              st.lists(st.integers(0, 40), max_size=12, unique=True),  # Adds a file.
              st.integers(0, 20),  # Drops one.
          ),
          max_size=30,
      )
  )
  def test_agrees_with_a_plain_dict(self, operations):
    table = range_table.RangeTable()
    files: dict[int, dict[int, int]] = {}
    forgotten = set()  # Keys of dropped files: an older file that also holds one may be forgotten.
    for number, operation in enumerate(operations):
      if isinstance(operation, int):
        forgotten |= {*files.pop(operation, {})}
        table.drop(operation)
      else:
        forgotten -= {*operation}
        files[number] = {key: 100 * number + i for i, key in enumerate(operation)}
        table.add(number, np.array(operation, np.uint64), 100 * number + np.arange(len(operation)))
    found, places = table.find(np.arange(41, dtype=np.uint64))
    for key in range(41):
      candidates = {number: held[key] for number, held in files.items() if key in held}
      if candidates and (key not in forgotten or found[key] >= 0):
        self.assertIn((found[key], places[key]), candidates.items())
      else:
        self.assertEqual((found[key], places[key]), (-1, -1))

  def test_a_later_place_of_a_key_replaces_an_earlier_one(self):
    table = range_table.RangeTable()
    for number in range(5):
      table.add(number, np.array([3], np.uint64), np.array([number]))
    files, places = table.find(np.array([3], np.uint64))
    self.assertEqual((files[0], places[0]), (4, 4))

  def test_entries_of_dropped_files_do_not_accumulate(self):
    table = range_table.RangeTable()
    keys = np.arange(1000, dtype=np.uint64)
    for number in range(500):
      table.add(number, keys + np.uint64(1000 * number), np.arange(1000))
      if number >= 3:
        table.drop(number - 3)
    self.assertLess(len(table), 10_000)

  def test_large_keys_and_file_numbers_are_kept_exactly(self):
    table = range_table.RangeTable()
    key = np.array([2**64 - 1], np.uint64)
    table.add(2**32, key, np.array([range_table.MAX_PLACE - 1]))
    files, places = table.find(key)
    self.assertEqual((files[0], places[0]), (2**32, range_table.MAX_PLACE - 1))


if __name__ == "__main__":
  absltest.main()
