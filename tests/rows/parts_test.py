"""Tests of the table of parts."""

import doctest
import itertools

import numpy as np
from absl.testing import absltest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from maxtext_olmo.rows import parts as parts_lib
from tests.rows import tables


def _as_lists(parts):
  """Returns a table as the lists it was made from."""
  flat = list(zip(parts.source.tolist(), parts.first.tolist(), parts.count.tolist()))
  bounds = parts.bounds.tolist()
  return [flat[low:high] for low, high in zip(bounds, bounds[1:])]


class PartsTest(absltest.TestCase):

  def test_the_examples_of_the_module_run(self):
    found = doctest.testmod(parts_lib)
    self.assertEqual(found.failed, 0)
    self.assertGreater(found.attempted, 0)

  def test_the_table_of_the_docstring(self):
    parts = parts_lib.Parts.of_rows([[(3, 16, 8)], [(0, 5, 3), (2, 0, 4)], []])
    self.assertEqual(parts.num_rows, 3)
    self.assertEqual(parts.bounds.tolist(), [0, 1, 3, 3])
    self.assertEqual(parts.source.tolist(), [3, 0, 2])
    self.assertEqual(parts.first.tolist(), [16, 5, 0])
    self.assertEqual(parts.count.tolist(), [8, 3, 4])

  @given(tables.rows())
  @settings(max_examples=50, deadline=None)
  def test_row_column_segment_and_used_follow_from_the_table(self, rows):
    parts = parts_lib.Parts.of_rows(rows)
    expected = []
    for number, row in enumerate(rows):
      column = 0
      for segment, (_, _, count) in enumerate(row, 1):
        expected.append((number, column, segment))
        column += count
    found = zip(parts.row.tolist(), parts.column.tolist(), parts.segment.tolist())
    self.assertEqual(list(found), expected)
    self.assertEqual(parts.used.tolist(), [sum(count for _, _, count in row) for row in rows])
    self.assertEqual(parts.num_rows, len(rows))
    self.assertEqual(_as_lists(parts), rows)

  @given(tables.rows())
  @settings(max_examples=30, deadline=None)
  def test_dtypes_are_those_of_the_design(self, rows):
    for parts in (
        parts_lib.Parts.of_rows(rows),
        parts_lib.Parts.of_rows(rows).take(np.array([-1], np.int64)),
        parts_lib.join([parts_lib.Parts.of_rows(rows)], [np.arange(len(rows))], len(rows) + 1),
    ):
      self.assertEqual(parts.bounds.dtype, np.int64)
      self.assertEqual(parts.source.dtype, np.int32)
      self.assertEqual(parts.first.dtype, np.int64)
      self.assertEqual(parts.count.dtype, np.int32)
      self.assertEqual(parts.used.dtype, np.int64)

  @given(tables.rows(), st.data())
  @settings(max_examples=50, deadline=None)
  def test_split_gives_the_same_rows_as_views(self, rows, data):
    parts = parts_lib.Parts.of_rows(rows)
    ends = sorted(data.draw(st.lists(st.integers(0, len(rows)), min_size=1, max_size=4)))
    split = parts.split(np.array(ends))
    self.assertLen(split, len(ends) - 1)
    for table, (start, stop) in zip(split, itertools.pairwise(ends)):
      self.assertEqual(_as_lists(table), rows[start:stop])
      self.assertEqual(table.used.tolist(), parts.used[start:stop].tolist())
      for name in ("source", "first", "count"):
        view = getattr(table, name)
        self.assertTrue(not view.size or np.shares_memory(view, getattr(parts, name)))

  @given(tables.rows(), st.data())
  @settings(max_examples=50, deadline=None)
  def test_take_gives_rows_in_any_order_and_padding_for_minus_one(self, rows, data):
    parts = parts_lib.Parts.of_rows(rows)
    wanted = data.draw(st.lists(st.integers(-1, len(rows) - 1), max_size=8))
    taken = parts.take(np.array(wanted, np.int64))
    self.assertEqual(_as_lists(taken), [rows[i] if i >= 0 else [] for i in wanted])

  @given(st.lists(tables.rows(max_rows=4), max_size=4), st.integers(0, 3), st.randoms())
  @settings(max_examples=50, deadline=None)
  def test_join_puts_each_row_in_its_place_and_padding_elsewhere(self, members, extra, random):
    num_rows = sum(map(len, members)) + extra
    free = list(range(num_rows))
    random.shuffle(free)
    expected = [[] for _ in range(num_rows)]
    places = []
    for rows in members:
      here = [free.pop() for _ in rows]
      places.append(np.array(here, np.int64))
      for place, row in zip(here, rows):
        expected[place] = row
    joined = parts_lib.join([parts_lib.Parts.of_rows(rows) for rows in members], places, num_rows)
    self.assertEqual(_as_lists(joined), expected)

  def test_one_per_row(self):
    parts = parts_lib.Parts.one_per_row(np.array([4, 5]), np.array([2**40, 7]), np.array([3, 8]))
    self.assertEqual(_as_lists(parts), [[(4, 2**40, 3)], [(5, 7, 8)]])
    self.assertEqual(parts.used.tolist(), [3, 8])

  def test_a_row_of_two_parts_next_to_a_padding_row_is_not_one_part_each(self):
    parts = parts_lib.Parts.of_rows([[(0, 0, 2), (0, 9, 3)], []])
    self.assertEqual(parts.used.tolist(), [5, 0])

  def test_places_far_into_a_file_do_not_wrap(self):
    parts = parts_lib.Parts.of_rows([[(0, 2**40, 2**31 - 1), (1, 2**41, 2**31 - 1)]])
    self.assertEqual(parts.used.tolist(), [2 * (2**31 - 1)])
    self.assertEqual(parts.column.tolist(), [0, 2**31 - 1])


if __name__ == "__main__":
  absltest.main()
