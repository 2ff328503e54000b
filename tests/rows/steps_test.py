"""Tests of the step dataset."""

import os
import pickle
import sys

import grain
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from maxtext_olmo import errors
from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.corpus import token_files
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.order import stream as stream_lib
from maxtext_olmo.rows import batch as batch_lib
from maxtext_olmo.rows import content as content_lib
from maxtext_olmo.rows import parts as parts_lib
from maxtext_olmo.rows import reader as reader_lib
from maxtext_olmo.rows import repetition
from maxtext_olmo.rows import row_sequence
from maxtext_olmo.rows import segments
from maxtext_olmo.rows import steps
from maxtext_olmo.rows import windows
from tests import corpora
from tests.rows import document_corpus
from tests.rows import slow_storage

_AFTER_EOS = segments.SegmentRule("after_eos", 0)


class _SmallBlocks(windows.WindowRows):
  """Windows whose parts are requested for few rows at once."""

  block_rows = 24


class PairRows:
  """A row source written from the protocol alone: row r is 3 tokens of file 0 and 2 of file 1.

  Args:
    count: The number of rows.
    mask_paths: The files of loss masks.
    parts: Makes the parts of a row, to test wrong ones.
  """

  row_length = 6
  pad_id = 9
  segment_rule = segments.SegmentRule("part")
  filter_sees_padding = False
  block_rows = 16
  fingerprint = "pairs"

  def __init__(self, count=20, mask_paths=None, parts=None):
    self.count = count
    self.mask_paths = mask_paths
    self._parts = parts or (lambda row: [(0, 3 * row, 3), (1, 2 * row, 2)])

  def num_rows(self, epoch):
    del epoch
    return self.count

  def parts(self, epoch, rows):
    del epoch
    return parts_lib.Parts.of_rows([self._parts(row) for row in rows.tolist()])


def _whole(schedule):
  return {size: np.arange(size) for size in schedule.sizes}


class WindowStepsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    path, self.rows = corpora.write_corpus(self.create_tempdir().full_path)
    self.index = index_lib.load_index(path)
    self.schedule = schedule_lib.BatchSchedule.constant(10)
    self.stream = self._stream()

  def _stream(self, num_epochs=None, order="feistel"):
    return stream_lib.train_stream(self.index, order=order, seed=1, num_epochs=num_epochs)

  def _dataset(self, rows=None, *, source=None, stream=None, schedule=None, storage=None, **kwargs):
    schedule = schedule or self.schedule
    files = token_files.TokenFiles.of_index(self.index, storage=storage)
    dataset = steps.StepDataset(
        source or windows.WindowRows(self.index),
        reader_lib.FileReader(files),
        stream or self.stream,
        schedule,
        _whole(schedule) if rows is None else rows,
        **kwargs,
    )
    self.addCleanup(dataset.close)
    return dataset

  def test_element_k_is_global_batch_k_by_the_definition(self):
    dataset = self._dataset()
    for step in (0, 3, 12, 40):
      expected = self.rows[self.stream.order.at(np.arange(10 * step, 10 * step + 10))]
      np.testing.assert_array_equal(dataset[step]["tokens"], expected)

  def test_element_k_is_global_batch_k_for_any_schedule_host_and_first_step(self):
    @given(
        sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4),
        lengths=st.lists(st.integers(1, 5), min_size=4, max_size=4),
        first_step=st.integers(0, 9),
        host=st.sampled_from([(0, 1), (0, 2), (1, 2), (2, 3)]),
        extra=st.integers(0, 3),
        num_epochs=st.sampled_from([None, 1]),
    )
    @settings(max_examples=20, deadline=None)
    def check(sizes, lengths, first_step, host, extra, num_epochs):
      firsts = np.cumsum([0, *lengths]).tolist()
      schedule = schedule_lib.BatchSchedule(tuple(zip(firsts, sizes)))
      # Rows past the size of a batch are loaded, and are padding.
      mine = {size: np.arange(host[0], size + extra, host[1]) for size in schedule.sizes}
      stream = self._stream(num_epochs)
      dataset = self._dataset(
          mine,
          source=_SmallBlocks(self.index),
          stream=stream,
          schedule=schedule,
          first_step=first_step,
      )
      for index in (0, 1, 2, 3, 7, 4, 12):
        if index >= len(dataset):
          continue
        step = first_step + index
        held = mine[schedule.size(step)]
        positions = schedule.start(step) + held
        real = held < schedule.size(step)
        if num_epochs:
          real &= positions < len(self.rows)
        numbers = np.full(len(held), -1)
        numbers[real] = stream.instance_ids(positions[real])
        np.testing.assert_array_equal(dataset.row_numbers(step), numbers)
        batch = dataset[index]
        self.assertEqual(batch["tokens"].shape, (len(held), 8))
        np.testing.assert_array_equal(batch["tokens"][real], self.rows[numbers[real]])
        np.testing.assert_array_equal(batch["used"], np.where(real, 8, 0))

    check()

  def test_a_host_holds_its_rows_of_the_same_batch(self):
    rows = np.array([2, 3, 7])
    whole, part = self._dataset(), self._dataset({10: rows})
    for step in (0, 12):
      for name in ("tokens", "used", "trained"):
        np.testing.assert_array_equal(part[step][name], whole[step][name][rows])

  def test_the_batch_size_may_change_inside_a_block(self):
    schedule = schedule_lib.BatchSchedule(((0, 4), (3, 8)))
    for source in (windows.WindowRows(self.index), _SmallBlocks(self.index)):
      dataset = self._dataset(schedule=schedule, source=source)
      sizes = [len(dataset[step]["tokens"]) for step in range(6)]
      self.assertEqual(sizes, [4, 4, 4, 8, 8, 8])
      got = np.concatenate([dataset[step]["tokens"] for step in range(6)])
      np.testing.assert_array_equal(got, self.rows[self.stream.order.at(np.arange(36))])

  @parameterized.product(ngram_filter=(False, True), rule=(segments.SegmentRule(), _AFTER_EOS))
  def test_batches_equal_the_record_level_transforms(self, ngram_filter, rule):
    dataset = self._dataset(
        source=windows.WindowRows(self.index, rule),
        content=content_lib.Content(ngram_filter=ngram_filter),
    )
    shift = batch_lib.ShiftToInputsTargets(eos_id=None if rule.begins == "nowhere" else 0)
    for step in (0, 1):
      records = [{"tokens": self.rows[i]} for i in dataset.row_numbers(step)]
      if ngram_filter:
        records = [repetition.NgramFilterTransform().map(record) for record in records]
      records = [shift.map(record) for record in records]
      for name, array in batch_lib.to_arrays(dataset[step]).items():
        np.testing.assert_array_equal(array, np.stack([record[name] for record in records]))

  def test_only_what_is_needed_is_in_a_batch(self):
    always = {"tokens", "used", "trained", "cost"}
    self.assertEqual(set(self._dataset()[0]), always)
    dataset = self._dataset(source=windows.WindowRows(self.index, _AFTER_EOS))
    self.assertEqual(set(dataset[0]), {*always, "starts"})

  def test_a_row_that_the_filter_rejects_takes_no_loss(self):
    path = self.create_tempdir().full_path
    tokens = np.concatenate([np.full(100, 7), np.arange(300) % 97]).astype("<u2")
    tokens.tofile(f"{path}/a.npy")
    self.index = index_lib.build_index(
        [(f"{path}/a.npy", "a")], 100, tokenizer="t", dtype="uint16", base=path
    )
    schedule = schedule_lib.BatchSchedule.constant(4)
    arguments = {"stream": self._stream(order="sequential"), "schedule": schedule}
    batch = self._dataset(**arguments)[0]
    self.assertEqual(batch["trained"].tolist(), [False, True, True, True])
    arrays = batch_lib.to_arrays(batch)
    self.assertEqual(arrays["targets_segmentation"].sum(axis=1).tolist(), [0, 99, 99, 99])
    self.assertTrue((arrays["inputs"][0] == 7).all())
    unfiltered = self._dataset(content=content_lib.Content(ngram_filter=False), **arguments)[0]
    self.assertTrue(unfiltered["trained"].all())

  def test_rows_that_are_loaded_but_not_trained_on_are_padding(self):
    dataset = self._dataset({10: np.arange(12)})
    batch = batch_lib.to_arrays(dataset[1])
    np.testing.assert_array_equal(batch["inputs"][:10], self._dataset()[1]["tokens"])
    for array in batch.values():
      self.assertEqual(array.shape, (12, 8))
      self.assertFalse(array[10:].any())
    self.assertEqual(dataset.row_numbers(1)[10:].tolist(), [-1, -1])

  def test_a_finite_stream_ends_with_a_padded_batch_and_each_instance_once(self):
    stream = self._stream(num_epochs=1)
    dataset = self._dataset(stream=stream)
    self.assertLen(dataset, -(-len(self.rows) // 10))
    ids = np.concatenate([dataset.row_numbers(step) for step in range(len(dataset))])
    self.assertEqual(sorted(ids[ids >= 0].tolist()), list(range(len(self.rows))))
    self.assertEqual((ids < 0).sum(), -len(self.rows) % 10)
    last = batch_lib.to_arrays(dataset[len(dataset) - 1])
    self.assertFalse(any(array[-1].any() for array in last.values()))
    empty = self._dataset(stream=stream, first_step=len(dataset))
    self.assertEmpty(empty)
    last = f"is outside the stream, which ends with step {len(dataset) - 1}"
    with self.assertRaisesRegex(errors.OrderError, last):
      empty[0]

  def test_it_repeats_and_has_an_element_spec_as_datasets_of_grain_do(self):
    dataset = self._dataset(stream=self._stream(num_epochs=1))
    repeated = dataset.repeat(2)
    for name, values in repeated[len(dataset) + 3].items():
      if name != "cost":
        np.testing.assert_array_equal(values, dataset[3][name])
    content = content_lib.Content(extras=("row_ids", "labels"))
    labels = np.zeros(len(self.index.files), np.int32)
    for dataset in (self._dataset(), self._dataset(content=content, labels=labels)):
      spec = grain.experimental.get_element_spec(dataset)
      self.assertEqual(
          {name: (value.shape, value.dtype) for name, value in spec.items()},
          {name: (value.shape, value.dtype) for name, value in dataset[0].items()},
      )

  def test_a_host_whose_rows_are_all_padding_reads_nothing(self):
    dataset = self._dataset({10: np.array([8, 9])}, stream=self._stream(num_epochs=1))
    batch = dataset[len(dataset) - 1]
    self.assertEqual(batch["cost"].tolist()[3:], [0, 0])
    self.assertFalse(any(array.any() for array in batch_lib.to_arrays(batch).values()))

  def test_an_endless_stream_is_as_long_as_grain_counts(self):
    self.assertLen(self._dataset(), sys.maxsize)

  def test_a_batch_may_span_epochs(self):
    dataset = self._dataset(stream=self._stream(num_epochs=2))
    step = len(self.rows) // 10
    expected = self.rows[self.stream.order.at(np.arange(10 * step, 10 * step + 10))]
    np.testing.assert_array_equal(dataset[step]["tokens"], expected)

  @parameterized.parameters(False, True)
  def test_a_token_outside_the_vocabulary_names_file_byte_step_and_row(self, compiled):
    if compiled:
      self.assertTrue(reader_lib.compile_reads(np.uint16))
    dataset = self._dataset({10: np.array([4, 5])}, content=content_lib.Content(vocab_size=99))
    with self.assertRaises(errors.CorpusError) as caught:
      for step in range(200):
        dataset[step]
    parts, numbers = dataset.parts(step), dataset.row_numbers(step)
    row, column = np.argwhere(self.rows[numbers] == 99)[0]
    path = self.index.resolve(int(parts.source[row]))
    message = str(caught.exception)
    self.assertIn(
        f"Token id 99 at step {step}, row {row + 4}, column {column} is outside the vocabulary of"
        f" 99: {path}, byte {2 * (parts.first[row] + column)}",
        message,
    )
    self.assertIn(f"(row {numbers[row]} of the corpus)", message)
    self.assertIn("maxtext-olmo verify", message)

  def test_without_a_vocabulary_ids_must_fit_int32(self):
    path = self.create_tempdir().full_path
    np.array([1, 2, 3, 2**31], "<u4").tofile(f"{path}/a.npy")
    self.index = index_lib.build_index(
        [(f"{path}/a.npy", "a")], 4, tokenizer="t", dtype="uint32", base=path
    )
    schedule = schedule_lib.BatchSchedule.constant(1)
    with self.assertRaisesRegex(errors.CorpusError, "Token id 2147483648 .* of 2147483648"):
      self._dataset(stream=self._stream(order="sequential"), schedule=schedule)[0]

  def test_values_that_do_not_fit_are_an_error(self):
    class Padded(windows.WindowRows):
      pad_id = 2**40

    class Large(windows.WindowRows):

      def num_rows(self, epoch):
        return 2**31 + 1

    for source, extras, message in (
        (Padded, (), "padding id 1099511627776 does not fit tokens of uint16"),
        (Large, ("row_ids",), "int32, but there are 2,147,483,649 rows"),
        (windows.WindowRows, ("labels",), "needs files with labels"),
    ):
      with self.assertRaisesRegex(errors.ConfigError, message):
        self._dataset(source=source(self.index), content=content_lib.Content(extras=extras))

  def test_row_ids_and_labels_come_on_request(self):
    labels = np.array([4, 5, 6, 7])
    dataset = self._dataset(
        {10: np.arange(12)},
        content=content_lib.Content(extras=("row_ids", "labels")),
        labels=labels,
    )
    for step in range(5):
      batch, numbers = dataset[step], dataset.row_numbers(step)
      self.assertEqual((batch["row_ids"].dtype, batch["labels"].dtype), (np.int32, np.int32))
      self.assertEqual(batch["row_ids"].tolist(), numbers.tolist())
      files = self.index.locate(numbers[:10])[0]
      self.assertEqual(batch["labels"].tolist(), [*labels[files].tolist(), -1, -1])

  def test_a_batch_that_is_held_keeps_its_tokens_while_others_are_made(self):
    dataset = self._dataset()
    held = [dataset[step]["tokens"][2:4, 1:] for step in range(12)]
    copies = [part.copy() for part in held]
    for step in range(40):
      dataset[step]
    for part, copy in zip(held, copies):
      np.testing.assert_array_equal(part, copy)

  def test_memory_is_reused_once_unreferenced(self):
    dataset = self._dataset()
    addresses = {dataset[step]["tokens"].ctypes.data for step in range(50)}
    self.assertLen(addresses, 1)
    self.assertEqual(addresses.pop() % 4096, 0)

  def test_a_batch_reports_its_cost(self):
    cost = dict(zip(batch_lib.COST, self._dataset()[0]["cost"].tolist(), strict=True))
    self.assertGreater(min(cost["order_seconds"], cost["read_seconds"]), 0)
    self.assertEqual((cost["bytes_read"], cost["reads"]), (10 * 8 * 2, 10))

  def test_it_survives_pickling(self):
    dataset = self._dataset(storage=slow_storage.SlowStorage())
    dataset[0]
    again = pickle.loads(pickle.dumps(dataset))
    self.addCleanup(again.close)
    np.testing.assert_array_equal(again[4]["tokens"], dataset[4]["tokens"])

  def test_a_slice_is_a_dataset(self):
    dataset = self._dataset()
    np.testing.assert_array_equal(dataset[3:][1]["tokens"], dataset[4]["tokens"])

  def test_a_closed_dataset_stays_usable(self):
    dataset = self._dataset(storage=slow_storage.SlowStorage())
    expected = dataset[5]["tokens"].copy()
    dataset.close()
    np.testing.assert_array_equal(dataset[5]["tokens"], expected)

  def test_truncating_a_file_during_a_run_stops_it(self):
    for storage in (None, slow_storage.SlowStorage(0.0)):
      dataset = self._dataset(stream=self._stream(num_epochs=1), storage=storage)
      dataset[0]
      path = self.index.resolve(3)
      size = os.path.getsize(path)
      os.truncate(path, 100)
      with self.assertRaisesRegex(errors.CorpusError, r"part-003\.npy is too short"):
        for step in range(1, len(dataset)):
          dataset[step]
      os.truncate(path, size)


class ReadAheadStepsTest(WindowStepsTest):
  """Runs the same tests with a storage that wants many reads in flight."""

  def _dataset(self, rows=None, *, storage=None, **kwargs):
    if storage is None:
      storage = slow_storage.SlowStorage(0.0)
    return super()._dataset(rows, storage=storage, **kwargs)

  def test_memory_is_reused_once_unreferenced(self):
    dataset = self._dataset()
    addresses = {dataset[step]["tokens"].ctypes.data for step in range(50)}
    self.assertLessEqual(len(addresses), 8)

  def test_a_storage_that_wants_it_reads_several_steps_at_once(self):
    storage = slow_storage.SlowStorage(0.0)
    dataset, plain = self._dataset(storage=storage), super()._dataset()
    for step in range(8):
      if step == 2:
        storage.gather = 2  # More only if steps are read more slowly than they are taken.
      np.testing.assert_array_equal(dataset[step]["tokens"], plain[step]["tokens"])

  def test_slow_batches_between_quick_ones_do_not_start_it(self):
    storage = slow_storage.SlowStorage(wants_concurrency=0)
    dataset = self._dataset(storage=storage)
    for step in range(6):
      storage.seconds = 0.0 if step % 2 else 0.002
      dataset[step]
    self.assertEqual(storage.most_waiting, 1)

  def test_local_files_get_it_after_two_slow_batches(self):
    storage = slow_storage.SlowStorage(0.002, wants_concurrency=0)
    dataset, plain = self._dataset(storage=storage), super()._dataset()
    for step in range(2):
      dataset[step]
      self.assertEqual(storage.most_waiting, 1)
    storage.gather = 10
    for step in range(2, 8):
      np.testing.assert_array_equal(dataset[step]["tokens"], plain[step]["tokens"])


class RowSourceStepsTest(parameterized.TestCase):
  """Row sources that are not windows."""

  def setUp(self):
    super().setUp()
    self.directory = self.create_tempdir().full_path
    rng = np.random.default_rng(0)
    self.tokens = [rng.integers(10, 99, size).astype(np.uint16) for size in (60, 40)]
    self.masks = [rng.integers(0, 2, len(tokens)).astype(np.uint8) for tokens in self.tokens]
    self.paths, self.mask_paths = (
        tuple(f"{self.directory}/{i}.{kind}" for i in range(2)) for kind in ("npy", "mask")
    )
    self._write()

  def _write(self):
    for path, values in zip(self.paths + self.mask_paths, self.tokens + self.masks):
      values.tofile(path)

  def _dataset(self, source, *, size=4, num_epochs=1, files=None, storage=None, **kwargs):
    if files is None:
      storage = storage or slow_storage.SlowStorage(0.0)
      files = token_files.TokenFiles(self.paths, np.zeros(2, np.int64), np.dtype("uint16"), storage)
    stream = row_sequence.RowSequence(source, name="t", seed=0, num_epochs=num_epochs)
    schedule = schedule_lib.BatchSchedule.constant(size)
    dataset = steps.StepDataset(
        source, reader_lib.FileReader(files), stream, schedule, _whole(schedule), **kwargs
    )
    self.addCleanup(dataset.close)
    return dataset

  def test_a_third_party_row_source_needs_only_the_protocol(self):
    dataset = self._dataset(PairRows(18))
    self.assertLen(dataset, 5)
    for step in range(5):
      batch = dataset[step]
      arrays = batch_lib.to_arrays(batch)
      for r in range(4):
        row = 4 * step + r
        if row >= 18:
          self.assertFalse(any(array[r].any() for array in arrays.values()))
          continue
        first, second = (self.tokens[i][n * row :][:n].tolist() for i, n in ((0, 3), (1, 2)))
        self.assertEqual(arrays["inputs"][r].tolist(), [*first, *second, 9])
        self.assertEqual(arrays["inputs_segmentation"][r].tolist(), [1, 1, 1, 2, 2, 0])
        self.assertEqual(arrays["inputs_position"][r].tolist(), [0, 1, 2, 0, 1, 0])
        self.assertEqual(arrays["targets_segmentation"][r].tolist(), [1, 1, 2, 2, 0, 0])

  @parameterized.parameters(False, True)
  def test_loss_masks_are_read_by_the_same_parts(self, compiled):
    if compiled:
      self.assertTrue(reader_lib.compile_reads(np.uint8))
    dataset = self._dataset(PairRows(18, self.mask_paths))
    for step in range(5):
      batch = dataset[step]
      loss = segments.unpack_bits(batch["loss"], 6)
      expected = np.zeros((4, 6), bool)
      for r in range(4):
        row = 4 * step + r
        if row < 18:
          expected[r, :3] = self.masks[0][3 * row :][:3]
          expected[r, 3:5] = self.masks[1][2 * row :][:2]
      np.testing.assert_array_equal(loss, expected)
      # The loss of a token is taken where it is the target.
      counted = batch_lib.to_arrays(batch)["targets_segmentation"][:, :-1] != 0
      np.testing.assert_array_equal(counted, expected[:, 1:])

  @parameterized.named_parameters(
      ("too_long", lambda row: [(0, 0, 4), (1, 0, 3)], "a row of 7 tokens, but its row_length"),
      ("empty_part", lambda row: [(0, 0, 6), (1, 0, 0)], "a part of 0 tokens"),
  )
  def test_wrong_parts_are_an_error_that_names_the_source(self, parts, message):
    with self.assertRaisesRegex(errors.CorpusError, f"PairRows made {message}"):
      self._dataset(PairRows(parts=parts))[0]

  @parameterized.parameters(1, None)
  def test_more_rows_than_requested_are_an_error(self, num_epochs):
    source = PairRows(5)
    source.parts = lambda epoch, rows: parts_lib.Parts.of_rows([[(0, 0, 1)]] * (len(rows) + 1))
    with self.assertRaisesRegex(errors.CorpusError, r"PairRows made \d+ rows, .* were requested"):
      self._dataset(source, num_epochs=num_epochs)[0]

  def test_a_token_of_a_packed_row_outside_the_vocabulary_is_found(self):
    self.tokens[1][13] = 500  # Row 6, column 4.
    self._write()
    dataset = self._dataset(PairRows(18), content=content_lib.Content(vocab_size=100))
    dataset[0]
    with self.assertRaisesRegex(
        errors.CorpusError,
        r"Token id 500 at step 1, row 2, column 4 is outside the vocabulary of 100:"
        r" .*1\.npy, byte 26 \(row 6 of the corpus\)",
    ):
      dataset[1]

  def test_padding_may_lie_outside_the_vocabulary_of_the_tokens(self):
    source = PairRows(18)
    source.pad_id = 60000
    dataset = self._dataset(source, content=content_lib.Content(vocab_size=100))
    self.assertEqual(dataset[0]["tokens"][:, 5].tolist(), [60000] * 4)

  def test_a_negative_id_of_a_record_is_found(self):
    records = [{"inputs": np.array([1, 2, 3, -7, 5, 6])}]
    source = PairRows(1, parts=lambda row: [(0, 0, 6)])
    stream = row_sequence.RowSequence(source, name="t", seed=0, num_epochs=1)
    schedule = schedule_lib.BatchSchedule.constant(1)
    dataset = steps.StepDataset(
        source, reader_lib.RecordReader(records), stream, schedule, _whole(schedule)
    )
    with self.assertRaisesRegex(
        errors.CorpusError, "Token id -7 at step 0, row 0, column 3 .* record 0, token 3"
    ):
      dataset[0]

  def test_the_label_of_a_packed_row_is_that_of_its_first_part(self):
    source = PairRows(18, parts=lambda row: [(row % 2, 0, 2), (0, 0, 2)])
    dataset = self._dataset(
        source, content=content_lib.Content(extras=("labels",)), labels=np.array([5, 8])
    )
    self.assertEqual(dataset[0]["labels"].tolist(), [5, 8, 5, 8])
    self.assertEqual(dataset[4]["labels"].tolist(), [5, 8, -1, -1])

  @parameterized.parameters(1, 2)
  def test_an_element_past_an_unknown_end_is_an_empty_dict(self, num_epochs):
    corpus = document_corpus.write(self.directory)
    source = corpus.planned()
    dataset = self._dataset(source, files=corpus.files, num_epochs=num_epochs)
    self.assertLen(dataset, sys.maxsize)
    found, numbers = [], []
    while batch := dataset[len(found)]:
      numbers.append(dataset.row_numbers(len(found)))
      found.append(batch)
    total = corpus.planned().plan.count(num_epochs)
    self.assertLen(found, -(-total // 4))
    numbers = np.concatenate(numbers)
    self.assertEqual((numbers >= 0).sum(), total)
    self.assertFalse(found[-1]["used"][numbers[-4:] < 0].any())
    for step in (len(found), len(found) + 1, 10**9):
      self.assertEqual(dataset[step], {})
    # Now that all rows have been counted, the end is known.
    self.assertLen(self._dataset(source, files=corpus.files, num_epochs=num_epochs), len(found))

  def test_planned_rows_are_the_documents_of_their_parts(self):
    corpus = document_corpus.write(self.directory)
    dataset = self._dataset(corpus.planned(), files=corpus.files, num_epochs=None)
    for step in (0, 30):  # The second one in a later epoch.
      batch, parts = dataset[step], dataset.parts(step)
      arrays = batch_lib.to_arrays(batch)
      lines = zip(parts.row, parts.column, parts.segment, parts.source, parts.first, parts.count)
      for row, column, segment, source, first, count in lines:
        here = slice(column, column + count)
        expected = corpus.contents[source][first : first + count]
        np.testing.assert_array_equal(batch["tokens"][row, here], expected)
        self.assertTrue((arrays["inputs_segmentation"][row, here] == segment).all())
        np.testing.assert_array_equal(arrays["inputs_position"][row, here], np.arange(count))


if __name__ == "__main__":
  absltest.main()
