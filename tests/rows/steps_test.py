"""Tests of the step dataset."""

import importlib.util
import pickle
import sys
from unittest import mock

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.corpus import source as source_lib
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.order import stream as stream_lib
from maxtext_olmo.rows import batch as batch_lib
from maxtext_olmo.rows import crew
from maxtext_olmo.rows import inspection
from maxtext_olmo.rows import repetition
from maxtext_olmo.rows import steps
from tests import corpora


class _Arrays:
  """A step dataset whose elements are the six arrays."""

  def __init__(self, dataset, content):
    self.dataset = dataset
    self._content = content

  def __len__(self):
    return len(self.dataset)

  def __getitem__(self, index):
    return steps.to_arrays(self.dataset[index], self._content)

  def instance_ids(self, step):
    return self.dataset.instance_ids(step)


class StepDatasetTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    path, self.rows = corpora.write_corpus(self.create_tempdir().full_path)
    self.index = index_lib.load_index(path)
    self.source = source_lib.OlmoNpyDataSource(self.index)
    self.stream = stream_lib.train_stream(self.index, order="feistel", seed=1)
    self.schedule = schedule_lib.BatchSchedule.constant(10)

  def _dataset(self, rows=None, **arguments):
    values = {"stream": self.stream, "schedule": self.schedule, **arguments}
    stream, schedule = values.pop("stream"), values.pop("schedule")
    if rows is None:
      rows = {size: np.arange(size) for size in schedule.sizes}
    dataset = steps.StepDataset(self.source, stream, schedule, rows, **values)
    return _Arrays(dataset, values.get("content", steps.Content()))

  def test_element_k_is_global_batch_k_by_the_definition(self):
    dataset = self._dataset()
    order = self.stream.order
    for step in (0, 3, 12, 40):
      expected = self.rows[order.at(np.arange(10 * step, 10 * step + 10))]
      np.testing.assert_array_equal(dataset[step]["inputs"], expected)

  def test_a_host_holds_its_rows_of_the_same_batch(self):
    rows = np.array([2, 3, 7])
    whole, part = self._dataset(), self._dataset({10: rows})
    for step in (0, 12):
      for name, array in part[step].items():
        np.testing.assert_array_equal(array, whole[step][name][rows])

  def test_a_later_first_step_shifts_the_elements(self):
    np.testing.assert_array_equal(
        self._dataset(first_step=5)[2]["inputs"], self._dataset()[7]["inputs"]
    )

  @parameterized.product(ngram_filter=(False, True), document_eos_id=(None, 0))
  def test_batches_equal_the_record_level_transforms(self, ngram_filter, document_eos_id):
    content = steps.Content(ngram_filter=ngram_filter, document_eos_id=document_eos_id)
    dataset = self._dataset(content=content)
    shift = batch_lib.ShiftToInputsTargets(eos_id=document_eos_id)
    for step in (0, 1):
      records = [self.source[i] for i in dataset.instance_ids(step)]
      if ngram_filter:
        records = [repetition.NgramFilterTransform().map(record) for record in records]
      records = [shift.map(record) for record in records]
      for name, array in dataset[step].items():
        np.testing.assert_array_equal(array, np.stack([record[name] for record in records]))

  def test_a_row_that_the_filter_rejects_takes_no_loss(self):
    path = self.create_tempdir().full_path
    tokens = np.concatenate([np.full(100, 7), np.arange(300) % 97]).astype("<u2")
    tokens.tofile(f"{path}/a.npy")
    index = index_lib.build_index(
        [(f"{path}/a.npy", "a")], 100, tokenizer="t", dtype="uint16", base=path
    )
    stream = stream_lib.train_stream(index, order="sequential", seed=0)
    dataset = steps.StepDataset(
        source_lib.OlmoNpyDataSource(index),
        stream,
        schedule_lib.BatchSchedule.constant(4),
        {4: np.arange(4)},
    )
    self.assertEqual(dataset[0]["flags"].tolist(), [steps.MASKED] + 3 * [steps.TRAINED])
    batch = steps.to_arrays(dataset[0], steps.Content())
    self.assertEqual(batch["targets_segmentation"].sum(axis=1).tolist(), [0, 99, 99, 99])
    self.assertTrue((batch["inputs"][0] == 7).all())

  def test_rows_that_are_loaded_but_not_trained_on_are_padding(self):
    dataset = self._dataset({10: np.arange(12)})
    batch = dataset[1]
    np.testing.assert_array_equal(batch["inputs"][:10], self._dataset()[1]["inputs"])
    for array in batch.values():
      self.assertEqual(array.shape, (12, 8))
      self.assertFalse(array[10:].any())
    self.assertEqual(dataset.instance_ids(1)[10:].tolist(), [-1, -1])

  def test_a_finite_stream_ends_with_a_padded_batch_and_each_instance_once(self):
    stream = stream_lib.train_stream(self.index, order="feistel", seed=1, num_epochs=1)
    dataset = self._dataset(stream=stream)
    self.assertLen(dataset, -(-len(self.rows) // 10))
    ids = np.concatenate([dataset.instance_ids(step) for step in range(len(dataset))])
    self.assertEqual(sorted(ids[ids >= 0].tolist()), list(range(len(self.rows))))
    self.assertEqual((ids < 0).sum(), -len(self.rows) % 10)
    self.assertFalse(dataset[len(dataset) - 1]["inputs_segmentation"][-1].any())
    with self.assertRaisesRegex(errors.OrderError, "lies outside the stream"):
      dataset[len(dataset)]
    self.assertEmpty(self._dataset(stream=stream, first_step=len(dataset)))

  def test_a_host_whose_rows_are_all_padding_reads_nothing(self):
    stream = stream_lib.train_stream(self.index, order="feistel", seed=1, num_epochs=1)
    dataset = self._dataset({10: np.array([8, 9])}, stream=stream)
    self.assertFalse(any(array.any() for array in dataset[len(dataset) - 1].values()))

  def test_an_endless_stream_is_as_long_as_grain_counts(self):
    self.assertLen(self._dataset(), sys.maxsize)

  def test_the_batch_size_may_change_between_steps(self):
    schedule = schedule_lib.BatchSchedule(((0, 4), (3, 8)))
    dataset = self._dataset(schedule=schedule)
    got = np.concatenate([dataset[step]["inputs"] for step in range(6)])
    self.assertEqual([dataset[step]["inputs"].shape[0] for step in range(6)], [4, 4, 4, 8, 8, 8])
    np.testing.assert_array_equal(got, self.rows[self.stream.order.at(np.arange(36))])

  def test_a_token_outside_the_vocabulary_names_file_byte_step_and_row(self):
    dataset = self._dataset(content=steps.Content(vocab_size=99))
    with self.assertRaises(errors.CorpusError) as caught:
      for step in range(20):
        dataset[step]
    message = str(caught.exception)
    self.assertRegex(
        message, r"Token id 99 at step \d+, row \d, column \d is outside the vocabulary of 99"
    )
    self.assertRegex(message, r"part-00\d\.npy, byte \d+")
    self.assertIn("maxtext-olmo verify", message)

  def test_a_batch_that_is_held_keeps_its_tokens_while_others_are_made(self):
    dataset = self._dataset().dataset
    held = [dataset[step]["tokens"][2:4, 1:] for step in range(12)]
    copies = [part.copy() for part in held]
    for step in range(40):
      dataset[step]
    for part, copy in zip(held, copies):
      np.testing.assert_array_equal(part, copy)

  def test_memory_is_used_again_once_nobody_holds_it(self):
    dataset = self._dataset().dataset
    addresses = {dataset[step]["tokens"].ctypes.data for step in range(50)}
    self.assertLen(addresses, 1)
    self.assertEqual(addresses.pop() % 4096, 0)

  def test_it_says_what_a_batch_took(self):
    order, read, filtered, size, reads = self._dataset().dataset[0]["cost"].tolist()
    self.assertGreater(min(order, read, filtered), 0)
    self.assertEqual((size, reads), (10 * 8 * 2, 10))

  def test_it_survives_pickling(self):
    dataset = self._dataset().dataset
    dataset[0]
    np.testing.assert_array_equal(
        pickle.loads(pickle.dumps(dataset))[4]["tokens"], dataset[4]["tokens"]
    )

  def test_a_slice_is_a_dataset(self):
    dataset = self._dataset().dataset
    np.testing.assert_array_equal(dataset[3:][1]["tokens"], dataset[4]["tokens"])


@absltest.skipUnless(importlib.util.find_spec("numba"), "numba is not installed")
class CompiledStepDatasetTest(StepDatasetTest):
  """All of it once more, where rows are looked at as they are read."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    if not inspection.compile_reads(np.uint16):
      raise AssertionError("The compiled reads are not to be had.")


class SharedStepDatasetTest(CompiledStepDatasetTest):
  """And where several threads read a batch together."""

  def setUp(self):
    super().setUp()
    self.enter_context(mock.patch.object(crew, "_FEWEST_BYTES", 0))
    self.enter_context(mock.patch.object(crew, "threads_beside", return_value=3))

  def test_helpers_took_part(self):
    tokens = np.zeros((10, self.index.sequence_length), self.index.token_dtype)
    self.assertEqual(self._dataset().dataset._read(0, tokens).threads, 3)


if __name__ == "__main__":
  absltest.main()
