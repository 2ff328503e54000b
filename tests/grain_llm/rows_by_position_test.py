"""Tests of rows by position, and of mixtures and batches of them."""

import pickle

import grain
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.grain_llm import records as records_lib
from maxtext_olmo.grain_llm import rows_by_position
from maxtext_olmo.order import permutations
from maxtext_olmo.rows import planned


def _map_rows(count, first=1, epochs=1, length=4):
  records = [
      records_lib.padded(records_lib.record_of({"inputs": [first + i] * 2}), length)
      for i in range(count)
  ]
  order = permutations.SequentialOrder(num_instances=count, seed=0)
  return rows_by_position.MapRows(
      rows_by_position.OrderedDataset(grain.MapDataset.source(records), order, epochs), count
  )


def _planned(lengths, epochs=1, number=0):
  records = [{"inputs": np.arange(n) + 100 * i + 1000 * number} for i, n in enumerate(lengths)]
  parts = rows_by_position.RecordParts(grain.MapDataset.source(records))
  order = permutations.FeistelOrder(num_instances=len(lengths), seed=number)
  plan = planned.PackingPlan(parts.lengths, order, identity="t", row_length=8, window=4)
  return rows_by_position.PlannedRecords(parts, plan, 8, num_epochs=epochs, shift=None)


def _first(batch):
  return batch["inputs"][:, 0].tolist()


def _first_of_rows(rows):
  return np.array([row["inputs"][0] for row in rows])


class RowSourceTest(parameterized.TestCase):

  def test_rows_are_elements_and_those_past_the_end_are_empty(self):
    for source in (_map_rows(3), _planned([3, 5, 8, 2, 7, 1])):
      rows = source.rows(np.arange(3))
      for position, row in enumerate(rows):
        for name, values in source[position].items():
          np.testing.assert_array_equal(row[name], values)
      self.assertEqual(source[10**6], {})


class MixedRowsTest(parameterized.TestCase):

  def mix(self, *sources, weights=(2, 1), repeat=False):
    return rows_by_position.MixedRecords(sources, weights, repeat=repeat)

  def test_rows_of_the_members_come_in_their_order(self):
    mixed = self.mix(_map_rows(8), _map_rows(5, 101))
    self.assertEqual(mixed.num_rows, 12)
    found = _first_of_rows(mixed.rows(np.arange(12)))
    self.assertEqual(found[found < 100].tolist(), list(range(1, 9)))
    self.assertEqual(found[found > 100].tolist(), [101, 102, 103, 104])

  def test_it_ends_with_its_first_member_or_with_its_last(self):
    stop = self.mix(_map_rows(3), _map_rows(30, 101), weights=(1, 1))
    self.assertEqual(stop.num_rows, 6)
    again = self.mix(_map_rows(3), _map_rows(30, 101), weights=(1, 1), repeat=True)
    self.assertEqual(again.num_rows, 60)
    found = _first_of_rows(again.rows(np.arange(60)))
    self.assertEqual(found[found < 100].tolist(), [1, 2, 3] * 10)

  def test_endless_members(self):
    both = self.mix(_map_rows(3, epochs=None), _map_rows(4, 101, epochs=None))
    self.assertTrue(both.endless)
    self.assertIsNone(both.num_rows)
    self.assertTrue(both.has(10**9))
    one = self.mix(_map_rows(3, epochs=None), _map_rows(4, 101))
    self.assertFalse(one.endless)
    self.assertTrue(self.mix(_map_rows(3, epochs=None), _map_rows(4, 101), repeat=True).endless)
    self.assertEqual(both.epoch_rows, 11)

  def test_members_that_have_not_been_counted(self):
    mixed = self.mix(_planned([3, 5, 8, 2], 1), _planned([4, 4, 9, 1], 2, 1))
    self.assertIsNone(mixed.num_rows)
    self.assertTrue(mixed.has(0))
    self.assertIsNone(mixed.epoch_rows)
    self.assertFalse(mixed.settle(5))
    self.assertTrue(mixed.settle(1000))
    self.assertIsNotNone(mixed.num_rows)
    mixed.count_ahead(0)
    mixed.close()

  def test_it_survives_pickling(self):
    mixed = self.mix(_planned([3, 5, 8, 2], 1), _planned([4, 4, 9, 1], 2, 1))
    again = pickle.loads(pickle.dumps(mixed))
    for position in range(3):
      for name, values in mixed[position].items():
        np.testing.assert_array_equal(again[position][name], values)


if __name__ == "__main__":
  absltest.main()
