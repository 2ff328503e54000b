"""Rows at positions."""

import pickle

import grain
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.grain_llm import mixed_rows
from maxtext_olmo.grain_llm import records as records_lib
from maxtext_olmo.grain_llm import row_source
from maxtext_olmo.order import permutations
from maxtext_olmo.rows import planned


def _map_rows(count, first=1, epochs=1):
  records = [
      records_lib.padded(records_lib.record_of({"inputs": [first + i] * 2}), 4)
      for i in range(count)
  ]
  order = permutations.SequentialOrder(num_instances=count, seed=0)
  return row_source.MapRows(
      row_source.OrderedDataset(grain.MapDataset.source(records), order, epochs), count, 4
  )


def _planned(lengths, epochs, number=0):
  records = [{"inputs": np.arange(n) + 100 * i + 1000 * number} for i, n in enumerate(lengths)]
  parts = row_source.RecordParts(grain.MapDataset.source(records))
  order = permutations.FeistelOrder(num_instances=len(lengths), seed=number)
  plan = planned.PackingPlan(parts.lengths, order, identity="t", row_length=8, window=4)
  return row_source.PlannedRows(parts, plan, 8, num_epochs=epochs, shift=row_source.Shift(None))


class MixedRowsTest(parameterized.TestCase):

  def mix(self, *sources, weights=(2, 1), repeat=False):
    return mixed_rows.MixedRows(sources, weights, repeat=repeat)

  def test_rows_of_the_members_come_in_their_order(self):
    mixed = self.mix(_map_rows(8), _map_rows(5, 101))
    self.assertEqual(mixed.num_rows, 12)
    found = mixed.rows(np.arange(12))["inputs"][:, 0]
    self.assertEqual(found[found < 100].tolist(), list(range(1, 9)))
    self.assertEqual(found[found > 100].tolist(), [101, 102, 103, 104])

  def test_it_ends_with_its_first_member_or_with_its_last(self):
    stop = self.mix(_map_rows(3), _map_rows(30, 101), weights=(1, 1))
    self.assertEqual(stop.num_rows, 6)
    again = self.mix(_map_rows(3), _map_rows(30, 101), weights=(1, 1), repeat=True)
    self.assertEqual(again.num_rows, 60)
    found = again.rows(np.arange(60))["inputs"][:, 0]
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
    for name, values in mixed.rows(np.arange(3)).items():
      np.testing.assert_array_equal(again.rows(np.arange(3))[name], values)


if __name__ == "__main__":
  absltest.main()
