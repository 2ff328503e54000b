"""Tests of batches and slices of streams of rows."""

import json

import grain
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.grain_llm import pipeline as pipeline_lib
from maxtext_olmo.grain_llm import records as records_lib
from maxtext_olmo.grain_llm import row_batches
from maxtext_olmo.grain_llm import streams
from maxtext_olmo.order import schedule as schedule_lib

E = 99


def _documents(count=40):
  rng = np.random.default_rng(count)
  return [{"inputs": np.append(rng.integers(1, 90, n), E)} for n in rng.integers(1, 12, count)]


def _rows(packing, num_epochs=2, **kwargs):
  return pipeline_lib.make_grain_llm_dataset(
      0, 1, _documents(), 4, 16, True, 5, num_epochs, eod_token_id=E, packing=packing, **kwargs
  )


def _numbered(lengths):
  """Returns a stream of rows; row i has `lengths[i]` tokens, each i + 1."""
  records = [records_lib.record_of({"inputs": [i + 1] * n}) for i, n in enumerate(lengths)]
  rows = [records_lib.padded(record, None) for record in records]
  return grain.MapDataset.source(rows).to_iter_dataset()


def _batches(rows, sizes=((0, 4),), mine=None, length=8, drop_remainder=True):
  schedule = schedule_lib.BatchSchedule(sizes)
  mine = mine or {size: np.arange(size) for size in schedule.sizes}
  batching = row_batches.Batching(schedule, mine, length, drop_remainder)
  return streams.StreamBatches(rows, batching)


class RowsCase(parameterized.TestCase):

  def assert_equal(self, got, expected):
    self.assertLen(got, len(expected))
    for one, other in zip(got, expected):
      self.assertEqual(set(one), set(other))
      for name, values in one.items():
        np.testing.assert_array_equal(values, other[name], err_msg=name)


class StreamBatchesTest(RowsCase):

  def test_each_step_takes_the_rows_of_its_size(self):
    found = [b["inputs"][:, 0].tolist() for b in _batches(_numbered([2] * 9), ((0, 2), (2, 4)))]
    self.assertEqual(found, [[1, 2], [3, 4], [5, 6, 7, 8]])

  def test_a_host_keeps_its_rows_of_each_batch(self):
    mine = {4: np.array([1, 3])}
    found = [b["inputs"][:, 0].tolist() for b in _batches(_numbered([2] * 8), mine=mine)]
    self.assertEqual(found, [[2, 4], [6, 8]])

  def test_the_last_batch_is_dropped_or_filled_up_with_padding(self):
    self.assertLen(list(_batches(_numbered([2] * 6))), 1)
    iterator = iter(_batches(_numbered([2] * 6), drop_remainder=False))
    _, last = next(iterator), next(iterator)
    self.assertEqual(last["inputs"][:, 0].tolist(), [5, 6, 0, 0])
    self.assertEqual(last["inputs_segmentation"][:, 0].tolist(), [1, 1, 0, 0])
    for _ in range(2):
      with self.assertRaises(StopIteration):
        next(iterator)

  def test_without_a_length_all_hosts_pad_to_the_longest_row_of_the_whole_batch(self):
    for mine in ({4: np.array([0, 1])}, {4: np.array([2, 3])}):
      (batch,) = _batches(_numbered([1, 2, 7, 3]), mine=mine, length=None)
      self.assertEqual(batch["inputs"].shape, (2, 7))

  @parameterized.parameters("first_fit", "best_fit", "concat_then_split")
  def test_it_resumes_from_any_state_that_went_through_json(self, packing):
    def make():
      return iter(_batches(_rows(packing, long_documents="split").open(), length=16))

    iterator = make()
    states, batches = [], []
    while True:
      states.append(json.loads(json.dumps(iterator.get_state())))
      try:
        batches.append(next(iterator))
      except StopIteration:
        break
    self.assertGreater(len(batches), 5)
    for step, state in enumerate(states):
      self.assertEqual(state["step"], step)
      resumed = make()
      resumed.set_state(state)
      self.assertEqual(json.loads(json.dumps(resumed.get_state())), state)
      self.assert_equal(list(resumed), batches[step:])
    # An iterator at its end can go back.
    iterator.set_state(states[0])
    self.assert_equal(list(iterator), batches)

  def test_a_state_of_another_kind_of_pipeline_is_refused(self):
    iterator = iter(_batches(_numbered([2] * 8)))
    for state in ({"next_index": 3}, {"step": 1}, [1, 2]):
      with self.assertRaisesRegex(errors.ResumeError, "another kind of pipeline"):
        iterator.set_state(state)
    self.assertEqual(next(iterator)["inputs"][:, 0].tolist(), [1, 2, 3, 4])

  def test_the_element_spec_is_that_of_the_first_batch(self):
    batches = _batches(_numbered([2] * 9), ((0, 2), (2, 4)))
    spec = grain.experimental.get_element_spec(batches)
    first = next(iter(batches))
    self.assertEqual(
        {name: (value.shape, value.dtype) for name, value in spec.items()},
        {name: (value.shape, value.dtype) for name, value in first.items()},
    )


class SlicedStreamTest(RowsCase):

  def test_a_slice_of_a_slice(self):
    rows = streams.SlicedStream(_numbered([2] * 20), slice(1, 18, 2))
    rows.set_slice(slice(1, None, 3))
    found = [int(row["inputs"][0]) for row in rows]
    self.assertEqual(found, list(range(1, 21))[1:18:2][1::3])

  def test_places_count_from_the_first_row(self):
    for sl in (slice(-3, None), slice(0, -1), slice(None, None, -1)):
      with self.assertRaisesRegex(errors.ConfigError, "count from the first row"):
        streams.SlicedStream(_numbered([2]), sl)

  def test_a_state_of_another_kind_of_pipeline_is_refused(self):
    iterator = iter(streams.SlicedStream(_numbered([2] * 8), slice(4)))
    with self.assertRaisesRegex(errors.ResumeError, "another kind of pipeline"):
      iterator.set_state({"step": 1, "rows": {}})


if __name__ == "__main__":
  absltest.main()
