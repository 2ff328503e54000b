"""Rows as a dataset, and batches of rows that come one after the other."""

import json

import grain
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.grain_llm import pipeline as pipeline_lib
from maxtext_olmo.grain_llm import row_dataset
from maxtext_olmo.grain_llm import row_source
from maxtext_olmo.order import schedule as schedule_lib
from tests import workers as workers_lib

STARTS_PROCESSES = True

E = 99


def _documents(count=40):
  rng = np.random.default_rng(count)
  return [{"inputs": np.append(rng.integers(1, 90, n), E)} for n in rng.integers(1, 12, count)]


def _rows(packing, num_epochs=2, **kwargs):
  return pipeline_lib.make_grain_llm_dataset(
      0, 1, _documents(), 4, 16, True, 5, num_epochs, eod_token_id=E, packing=packing, **kwargs
  )


def _numbered(lengths):
  """A stream of rows, of which row i has so many tokens i + 1."""
  record = row_dataset.ToRecord()
  row = row_dataset.ToRow(8, "error", False, row_source.Shift(None))
  documents = [{"inputs": [i + 1] * n} for i, n in enumerate(lengths)]
  return grain.MapDataset.source(documents).map(record).map(row).to_iter_dataset()


def _batches(rows, sizes=((0, 4),), mine=None, length=8, drop_remainder=True):
  schedule = schedule_lib.BatchSchedule(sizes)
  mine = mine or {size: np.arange(size) for size in schedule.sizes}
  return row_dataset.StreamBatches(
      rows, schedule, mine, length=length, drop_remainder=drop_remainder
  )


class RowsCase(parameterized.TestCase):

  def assert_equal(self, got, expected):
    self.assertLen(got, len(expected))
    for one, other in zip(got, expected):
      self.assertEqual(set(one), set(other))
      for name, values in one.items():
        np.testing.assert_array_equal(values, other[name], err_msg=name)


class RowDatasetTest(RowsCase):

  @parameterized.parameters(None, "planned", "first_fit", "concat_then_split")
  def test_any_number_of_workers_gives_the_same_rows(self, packing):
    expected = list(_rows(packing))
    with workers_lib.started_quickly():
      for workers in (1, 2):
        opened = iter(_rows(packing).open(workers, ahead=2))
        self.assert_equal(list(opened), expected)
        opened.close()

  @parameterized.parameters(None, "planned")
  def test_rows_by_position_are_those_of_the_stream(self, packing):
    dataset = _rows(packing)
    one_by_one = list(dataset)
    together = dataset.rows.rows(np.arange(len(one_by_one)))
    self.assertFalse(dataset.rows.has(len(one_by_one)))
    self.assert_equal(
        [{name: values[i] for name, values in together.items()} for i in range(len(one_by_one))],
        one_by_one,
    )

  def test_the_state_of_rows_by_position_is_how_many_were_taken(self):
    opened = iter(_rows("planned"))
    next(opened)
    next(opened)
    self.assertEqual(opened.get_state(), {"next_index": 2})


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
  def test_it_goes_on_from_any_state_that_went_through_json(self, packing):
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
    # One that has come to its end can go back.
    iterator.set_state(states[0])
    self.assert_equal(list(iterator), batches)

  def test_a_state_of_another_kind_of_pipeline_is_refused(self):
    iterator = iter(_batches(_numbered([2] * 8)))
    for state in ({"next_index": 3}, {"step": 1}, [1, 2]):
      with self.assertRaisesRegex(errors.ResumeError, "another kind of pipeline"):
        iterator.set_state(state)
    self.assertEqual(next(iterator)["inputs"][:, 0].tolist(), [1, 2, 3, 4])


class TransformsTest(RowsCase):

  def test_a_record_has_arrays_of_its_own(self):
    tokens = np.array([1, 2, 3], np.int32)
    record = row_dataset.ToRecord().map({"inputs": tokens, "name": "left behind"})
    self.assertEqual(set(record), {"inputs", "targets"})
    record["inputs"][:] = 0
    self.assertEqual(tokens.tolist(), [1, 2, 3])

  def test_long_documents_become_pieces(self):
    record = row_dataset.ToRecord().map({"inputs": [1, 2, 3, 4, 5]})
    pieces = row_dataset.SplitDocuments(2, "split").flat_map(record)
    self.assertEqual([piece["inputs"].tolist() for piece in pieces], [[1, 2], [3, 4], [5]])
    with self.assertRaisesRegex(errors.CorpusError, "5 tokens, the row 2"):
      row_dataset.SplitDocuments(2, "error").flat_map(record)

  def test_a_row_is_cut_padded_shifted_and_numbered(self):
    shift = row_source.Shift("left", E)
    record = row_dataset.ToRecord().map({"inputs": [1, 2, E, 4, 5]})
    row = row_dataset.ToRow(7, "error", True, shift).map(record)
    self.assertEqual(row["inputs"].tolist(), [1, 2, E, 4, 5, 0, 0])
    self.assertEqual(row["targets"].tolist(), [2, E, 4, 5, 0, 0, 0])
    self.assertEqual(row["inputs_segmentation"].tolist(), [1, 1, 2, 2, 2, 0, 0])
    self.assertEqual(row["inputs_position"].tolist(), [0, 1, 0, 1, 2, 0, 0])
    cut = row_dataset.ToRow(3, "truncate", True, shift).map(record)
    self.assertEqual(cut["inputs"].tolist(), [1, 2, E])

  def test_a_packed_row_is_only_shifted(self):
    row = {
        "inputs": np.array([1, E, 2, E]),
        "targets": np.array([1, E, 2, E]),
        "inputs_segmentation": np.array([1, 1, 2, 2]),
        "targets_segmentation": np.array([1, 1, 2, 2]),
    }
    shifted = row_dataset.ShiftRow(row_source.Shift("left", E)).map(row)
    self.assertEqual(shifted["targets"].tolist(), [E, 2, E, 0])
    self.assertEqual(shifted["inputs_segmentation"].tolist(), [1, 1, 2, 2])
    self.assertEqual(row["targets"].tolist(), [1, E, 2, E])


if __name__ == "__main__":
  absltest.main()
