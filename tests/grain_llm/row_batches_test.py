import grain
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import given
from hypothesis import strategies as st

from maxtext_olmo.grain_llm import records as records_lib
from maxtext_olmo.grain_llm import row_batches
from maxtext_olmo.grain_llm import rows_by_position
from maxtext_olmo.order import permutations
from maxtext_olmo.order import schedule
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


def _steps(source, size=4, mine=None, length=4, drop_remainder=False, num_steps=None):
  mine = {size: np.arange(size) if mine is None else mine}
  batching = row_batches.Batching(
      schedule.BatchSchedule.constant(size), mine, length, drop_remainder
  )
  return row_batches.RowBatches(source, batching, num_steps)


def _first(batch):
  return batch["inputs"][:, 0].tolist()


class RowBatchesTest(parameterized.TestCase):

  def test_the_rows_of_a_step_are_those_from_its_start_on(self):
    ramped = schedule.BatchSchedule(((0, 2), (3, 4)))
    mine = {size: np.arange(size) for size in ramped.sizes}
    batching = row_batches.Batching(ramped, mine, 4, False)
    dataset = row_batches.RowBatches(_map_rows(30), batching)
    found = [_first(dataset[step]) for step in range(5)]
    self.assertEqual(found, [[1, 2], [3, 4], [5, 6], [7, 8, 9, 10], [11, 12, 13, 14]])

  def test_the_last_batch_is_filled_up_or_dropped(self):
    source = _map_rows(10)
    filled = _steps(source)
    self.assertLen(filled, 3)
    self.assertEqual(_first(filled[2]), [9, 10, 0, 0])
    self.assertEqual(filled[2]["inputs_segmentation"][:, 0].tolist(), [1, 1, 0, 0])
    self.assertLen(_steps(source, drop_remainder=True), 2)
    self.assertEqual(filled[3], {})

  def test_hosts_take_their_rows_of_a_batch(self):
    whole = _steps(_map_rows(10))
    for mine in (np.array([0, 1]), np.array([1, 3])):
      part = _steps(_map_rows(10), mine=mine)
      for step in range(3):
        for name, values in part[step].items():
          np.testing.assert_array_equal(values, whole[step][name][mine])

  def test_rows_past_the_size_of_a_batch_are_padding(self):
    dataset = _steps(_map_rows(10), 3, mine=np.arange(4))
    self.assertEqual([_first(dataset[step]) for step in range(2)], [[1, 2, 3, 0], [4, 5, 6, 0]])
    self.assertEqual(dataset[0]["targets_segmentation"][:, 0].tolist(), [1, 1, 1, 0])

  def test_a_host_may_give_nothing_but_padding(self):
    batch = _steps(_map_rows(1), num_steps=2)[1]
    self.assertEqual(batch["inputs"].shape, (4, 4))
    self.assertFalse(batch["inputs_segmentation"].any())

  def test_an_element_past_an_unknown_end_is_an_empty_dict(self):
    source = _planned([3, 5, 8, 2, 7, 1])
    dataset = _steps(source, 2, length=8)
    self.assertIsNone(source.num_rows)
    found = []
    while batch := dataset[len(found)]:
      found.append(batch)
    self.assertLen(found, -(-source.plan.count(1) // 2))
    self.assertLen(dataset, len(found))

  def test_endless_rows_have_no_last_step(self):
    dataset = _steps(_map_rows(10, epochs=None))
    self.assertEqual(_first(dataset[10**6]), [1, 2, 3, 4])

  def test_rows_of_other_lengths_are_padded_to_the_longest(self):
    sources = [_map_rows(4, length=3), _map_rows(4, 101, length=5)]
    batch = _steps(rows_by_position.MixedRecords(sources, (1, 1)), length=None)[0]
    self.assertEqual(batch["inputs"].shape, (4, 5))
    self.assertEqual(sorted(_first(batch)), [1, 2, 101, 102])

  def test_a_slice_of_it_is_a_dataset(self):
    part = _steps(_map_rows(10))[1:]
    self.assertEqual(_first(part[0]), [5, 6, 7, 8])


class StepsOfTest(absltest.TestCase):

  @given(
      sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3),
      count=st.integers(0, 100),
      drop=st.booleans(),
  )
  def test_steps_of_counts_the_steps_that_use_up_the_rows(self, sizes, count, drop):
    stages = schedule.BatchSchedule(tuple((4 * i, size) for i, size in enumerate(sizes)))
    steps = row_batches.steps_of(stages, count, drop)
    if drop:
      self.assertLessEqual(stages.start(steps), count)
      self.assertGreater(stages.start(steps + 1), count)
    else:
      self.assertGreaterEqual(stages.start(steps), count)
      self.assertTrue(steps == 0 or stages.start(steps - 1) < count)

  def test_steps_before_an_anchor_are_done(self):
    anchored = schedule.BatchSchedule.constant(4).anchored(5, 17)
    self.assertEqual(row_batches.steps_of(anchored, 17, False), 5)
    self.assertEqual(row_batches.steps_of(anchored, 18, False), 6)
    self.assertEqual(row_batches.steps_of(anchored, 18, True), 5)


if __name__ == "__main__":
  absltest.main()
