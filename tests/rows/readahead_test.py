"""Tests of reads in flight."""

import pathlib
import threading
import time
from unittest import mock

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.corpus import source as source_lib
from maxtext_olmo.corpus.storage import local as local_storage
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.order import stream as stream_lib
from maxtext_olmo.rows import inspection
from maxtext_olmo.rows import readahead
from maxtext_olmo.rows import steps
from tests import corpora


class _SlowStorage(local_storage.LocalStorage):
  """A disk that takes a while to answer each read, and counts how many are waiting."""

  def __init__(self, max_open_files=64, seconds=0.005):
    super().__init__(max_open_files)
    self.seconds = seconds
    self.waiting = self.most_waiting = self.hints = 0
    self._count = threading.Lock()

  def fill(self, paths, file_ids, offsets, out):
    for i in range(len(out)):
      with self._count:
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
      if self.seconds:
        time.sleep(self.seconds)
      super().fill(paths, file_ids[i : i + 1], offsets[i : i + 1], out[i : i + 1])
      with self._count:
        self.waiting -= 1

  def hint(self, paths, file_ids, offsets, size):
    self.hints += len(offsets)
    super().hint(paths, file_ids, offsets, size)


class _Disk(local_storage.LocalStorage):
  """A disk that brings what it was told of into memory; any other read takes a while."""

  def __init__(self):
    super().__init__()
    self.seconds = 0.0004
    self.told: set[tuple[int, int]] = set()
    self.waits = self.hints = 0

  def fill(self, paths, file_ids, offsets, out):
    for row in zip(file_ids.tolist(), offsets.tolist()):
      if row not in self.told:
        self.waits += 1
        if self.seconds:
          time.sleep(self.seconds)
    super().fill(paths, file_ids, offsets, out)

  def hint(self, paths, file_ids, offsets, size):
    self.hints += len(offsets)
    self.told.update(zip(file_ids.tolist(), offsets.tolist()))


class ReadAheadTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = self.create_tempdir().full_path
    path, self.rows = corpora.write_corpus(self.directory, tokens_per_file=(3000, 2000, 4000))
    self.index = index_lib.load_index(path)
    self.stream = stream_lib.train_stream(self.index, order="feistel", seed=1, num_epochs=1)

  def _dataset(self, disk, size=16):
    return steps.StepDataset(
        source_lib.OlmoNpyDataSource(self.index, storage=disk),
        self.stream,
        schedule_lib.BatchSchedule.constant(size),
        {size: np.arange(size)},
    )

  def test_a_slow_disk_is_asked_for_many_rows_at_once_and_batches_stay_the_same(self):
    disk = _SlowStorage()
    slow, quick = self._dataset(disk), self._dataset(local_storage.LocalStorage())
    self.assertEqual(len(slow), -(-len(self.rows) // 16))
    for step in range(len(slow)):
      for name in ("tokens", "flags"):
        np.testing.assert_array_equal(slow[step][name], quick[step][name])
    # More than a batch: the rows of later steps are under way too.
    self.assertGreater(disk.most_waiting, 32)
    self.assertGreater(disk.hints, 0)

  def test_a_quick_disk_is_read_by_the_thread_that_asks(self):
    dataset = self._dataset(local_storage.LocalStorage())
    for step in range(len(dataset)):
      dataset[step]
    self.assertIsNone(dataset._reads._readers)

  @parameterized.parameters(1, 2)
  @mock.patch.object(readahead, "_VERY_SLOW_SECONDS", 1e9)  # However long a busy machine sleeps.
  def test_hints_are_enough_for_a_disk_that_heeds_them(self, stride):
    disk = _Disk()
    dataset, quick = self._dataset(disk, size=8), self._dataset(
        local_storage.LocalStorage(), size=8
    )
    for step in range(0, len(dataset), stride):
      np.testing.assert_array_equal(dataset[step]["tokens"], quick[step]["tokens"])
    self.assertIsNone(dataset._reads._readers)
    self.assertGreater(disk.hints, 4 * disk.waits)

  @parameterized.parameters(1, 4)
  def test_a_read_is_as_slow_as_it_is_for_each_of_the_threads_that_share_a_batch(self, threads):
    def read(step, tokens):
      del step, tokens
      for _ in range(16 // threads):
        time.sleep(1e-4)
      return inspection.Findings(0, None, threads)

    reads = readahead.ReadAhead(
        ids_of=lambda step: np.arange(16),
        buffer_of=lambda ids: np.zeros((16, 8), np.uint32),
        read=read,
        row_reader=None,
        hint=lambda ids: None,
    )
    for step in range(2):
      reads.take(step)
    self.assertTrue(reads._hinting or reads._slow)

  def _judged(self, ids, sleeps, **found):
    """What is thought of a source after three batches whose thread slept so often."""

    def read(step, tokens):
      del step, tokens
      for _ in range(sleeps):
        time.sleep(5e-4)
      return inspection.Findings(0, None, **found)

    reads = readahead.ReadAhead(
        ids_of=lambda step: ids,
        buffer_of=lambda ids: np.zeros((len(ids), 8), np.uint32),
        read=read,
        row_reader=None,
        hint=lambda ids: None,
    )
    for step in range(3):
      reads.take(step)
    return reads._hinting or reads._slow

  def test_rows_of_padding_do_not_make_a_slow_disk_look_quick(self):
    self.assertTrue(self._judged(np.array([3, 4, -1, -1, -1, -1, -1, -1]), sleeps=2))

  def test_naps_for_other_threads_do_not_make_a_disk_look_slow(self):
    self.assertTrue(self._judged(np.arange(16), sleeps=8, threads=2))
    self.assertFalse(self._judged(np.arange(16), sleeps=8, threads=2, naps=8))

  def test_a_disk_that_heeds_no_hints_is_read_by_threads(self):
    reads = self._dataset(local_storage.LocalStorage())._reads
    # Of the first two batches one was held up, which does not make the later ones quick.
    for seconds in (4e-4, 5e-3):
      reads._judge_plain(seconds, 5e-5)
    self.assertEqual((reads._hinting, reads._slow), (True, False))
    for _ in range(2):
      reads._judge_hints(True, 4e-4, 5e-5)
    self.assertEqual((reads._hinting, reads._slow), (False, True))

  def test_a_mount_is_read_by_threads_at_once(self):
    reads = self._dataset(local_storage.LocalStorage())._reads
    for seconds in (2e-3, 3e-3):
      reads._judge_plain(seconds, 5e-5)
    self.assertEqual((reads._hinting, reads._slow), (False, True))

  def test_one_slow_batch_is_no_slow_disk(self):
    reads = self._dataset(local_storage.LocalStorage())._reads
    for seconds in (1e-2, 0.0, 1e-2, 0.0):
      reads._judge_plain(seconds, 5e-5)
    self.assertEqual((reads._hinting, reads._slow), (False, False))

  @mock.patch.object(readahead, "_VERY_SLOW_SECONDS", 1e9)
  def test_hints_end_when_the_pages_are_in_the_cache(self):
    disk = _Disk()
    dataset = self._dataset(disk, size=4)
    for step in range(10):
      dataset[step]
    self.assertTrue(dataset._reads._hinting)
    disk.seconds = 0.0
    for step in range(10, 140):
      dataset[step]
    self.assertFalse(dataset._reads._hinting)
    hints = disk.hints
    for step in range(140, 160):
      dataset[step]
    self.assertEqual(disk.hints, hints)

  def test_steps_far_from_the_present_one_are_forgotten(self):
    dataset = self._dataset(_SlowStorage(seconds=0.002), size=4)
    for step in [200, 201, 202, 203, 3, 4, 5]:
      dataset[step]
    self.assertNotEmpty(dataset._reads._flights)
    self.assertLess(max(dataset._reads._flights), 150)

  @parameterized.parameters(2, 3)
  def test_a_worker_reads_ahead_in_its_own_stride(self, stride):
    dataset, quick = self._dataset(_SlowStorage()), self._dataset(local_storage.LocalStorage())
    for step in range(1, len(dataset), stride):
      np.testing.assert_array_equal(dataset[step]["tokens"], quick[step]["tokens"])

  def test_any_order_of_steps_gives_their_batches(self):
    dataset, quick = self._dataset(_SlowStorage(seconds=0.002)), self._dataset(
        local_storage.LocalStorage()
    )
    for step in np.random.default_rng(0).permutation(len(dataset)).tolist():
      np.testing.assert_array_equal(dataset[step]["tokens"], quick[step]["tokens"])

  def test_an_error_of_a_read_in_flight_reaches_the_step_that_needs_it(self):
    dataset = self._dataset(_SlowStorage())
    for step in range(4):
      dataset[step]
    with open(pathlib.Path(self.directory) / "data" / "part-002.npy", "r+b") as file:
      file.truncate(100)
    with self.assertRaisesRegex(errors.CorpusError, r"part-002\.npy is too short"):
      for step in range(4, len(dataset)):
        dataset[step]

  def test_a_bad_row_of_a_later_step_does_not_fail_this_one(self):
    dataset = self._dataset(_SlowStorage())
    for step in range(3):
      dataset[step]
    with open(pathlib.Path(self.directory) / "data" / "part-000.npy", "r+b") as file:
      file.truncate(0)
    failed = []
    for step in range(3, len(dataset)):
      bad = any(i < 375 for i in dataset.instance_ids(step))
      try:
        dataset[step]
      except errors.CorpusError:
        failed.append(step)
        self.assertTrue(bad, step)
    self.assertNotEmpty(failed)

  def test_closing_ends_the_reading_threads(self):
    dataset = self._dataset(_SlowStorage())
    for step in range(4):
      dataset[step]
    threads = list(dataset._reads._readers._pool._threads)
    self.assertNotEmpty(threads)
    dataset.close()
    for thread in threads:
      thread.join()
    dataset[5]
    dataset.close()

  def test_a_disk_that_becomes_quick_is_read_plainly_again(self):
    disk = _SlowStorage()
    dataset = self._dataset(disk, size=4)
    for step in range(20):
      dataset[step]
    disk.seconds = 0.0
    for step in range(20, len(dataset)):
      dataset[step]
    self.assertFalse(dataset._reads._slow)

  def test_how_many_reads_are_in_flight_follows_from_the_time_per_read(self):
    reads = self._dataset(local_storage.LocalStorage())._reads
    wanted = []
    for seconds in (1e-5, 1e-3, 1e-2, 1.0):
      reads._seconds_per_read = seconds
      wanted.append((reads._wanted_reads(32768), reads._wanted_reads(1 << 20)))
    self.assertEqual(wanted, [(8, 8), (20, 8), (200, 9), (256, 256)])

  def test_a_disk_that_becomes_slower_while_somebody_waits_gets_more_reads(self):
    reads = self._dataset(local_storage.LocalStorage())._reads
    reads._slow, reads._seconds_per_read = True, 1e-3
    wanted = []
    for seconds, waits in ((1e-2, False), (1.4e-3, True), (4e-3, True), (2e-3, True)):
      reads._judge(seconds, waits)
      wanted.append(reads._wanted_reads(32768))
    # Not where nobody waits, nor by a little, nor back: it is the device that was slow, not the trainer.
    self.assertEqual(wanted, [20, 20, 80, 80])

  def test_what_is_held_ahead_is_bounded(self):
    dataset = self._dataset(_SlowStorage(seconds=0.02), size=4)
    for step in range(40):
      dataset[step]
      held = list(dataset._reads._flights.values())
      self.assertLessEqual(sum(len(flight.ids) for flight in held), 256 + 3 * 4)
    self.assertNotEmpty(held)

  def test_threads_that_ask_out_of_turn_do_not_change_what_is_read_ahead(self):
    disk = _SlowStorage(seconds=0.002)
    dataset, quick = self._dataset(disk, size=4), self._dataset(
        local_storage.LocalStorage(), size=4
    )
    for step in [0, 1, 2, 3, 5, 4, 6, 8, 7, 9, 11, 10]:
      np.testing.assert_array_equal(dataset[step]["tokens"], quick[step]["tokens"])
      if step >= 6:
        self.assertEqual(dataset._reads._stride(), 1)
        ahead = sorted(set(dataset._reads._flights) - set(range(12)))
        self.assertEqual(ahead, list(range(12, 12 + len(ahead))))

  def test_a_source_that_reads_only_whole_batches_is_read_ahead_too(self):
    class Plain:

      def __init__(self, source):
        self.read, self.dtype, self.where = source.read, source.dtype, source.where

    disk = _SlowStorage()
    source = Plain(source_lib.OlmoNpyDataSource(self.index, storage=disk))
    sizes = schedule_lib.BatchSchedule.constant(16), {16: np.arange(16)}
    dataset, quick = steps.StepDataset(source, self.stream, *sizes), self._dataset(
        local_storage.LocalStorage()
    )
    for step in range(len(dataset)):
      np.testing.assert_array_equal(dataset[step]["tokens"], quick[step]["tokens"])
    self.assertGreater(disk.most_waiting, 32)


if __name__ == "__main__":
  absltest.main()
