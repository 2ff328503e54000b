"""Tests of filling the spool ahead of the trainer."""

import contextlib
import gc
import os
import pathlib
import threading
import time
from unittest import mock

import numpy as np
from absl.testing import absltest

from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.corpus import token_files
from maxtext_olmo.corpus.storage import spool as spool_lib
from maxtext_olmo.corpus.storage import spooled
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.order import stream as stream_lib
from maxtext_olmo.rows import reader as reader_lib
from maxtext_olmo.rows import row_sequence
from maxtext_olmo.rows import spool_filler
from maxtext_olmo.rows import steps
from maxtext_olmo.rows import windows
from tests import corpora
from tests.corpus.storage import counting_storage
from tests.rows import steps_test

_LIMIT = 64 << 20
_BATCH = 10


def _wait_for(condition):
  end = time.monotonic() + 60
  while not condition():
    if time.monotonic() > end:
      raise AssertionError("The condition did not become true in a minute.")
    time.sleep(0.005)


def _size_of(directory):
  total = 0
  for path in pathlib.Path(directory).glob("*.spool"):
    with contextlib.suppress(FileNotFoundError):  # It has just been deleted.
      total += path.stat().st_size
  return total


def _threads():
  return [thread for thread in threading.enumerate() if thread.name == "olmo-spool"]


class SpoolFillerTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    path, self.rows = corpora.write_corpus(
        self.create_tempdir().full_path,
        tokens_per_file=(333 * 64, 150 * 64, 7 * 64, 514 * 64),
        sequence_length=64,
    )
    self.index = index_lib.load_index(path)
    local = token_files.TokenFiles.of_index(self.index)
    self.store = counting_storage.CountingStorage(
        {path: pathlib.Path(path).read_bytes() for path in local.paths}
    )
    self.directory = self.create_tempdir().full_path
    self.epoch = -(-len(self.rows) // _BATCH)

  def _dataset(self, epochs=None, first_step=0, limit=_LIMIT):
    storage = spooled.SpooledStorage(self.store, spool_lib.Spool(self.directory, limit))
    self.addCleanup(storage.close)
    schedule = schedule_lib.BatchSchedule.constant(_BATCH)
    dataset = steps.StepDataset(
        windows.WindowRows(self.index),
        reader_lib.FileReader(token_files.TokenFiles.of_index(self.index, storage=storage)),
        stream_lib.train_stream(self.index, order="feistel", seed=1, num_epochs=epochs),
        schedule,
        {_BATCH: np.arange(_BATCH)},
        first_step=first_step,
    )
    self.addCleanup(dataset.close)
    self.stream = dataset._stream
    self.spooled = storage
    return dataset

  def _start(self, dataset, step=0, **kwargs):
    filler = spool_filler.SpoolFiller.start(dataset, step, **kwargs)
    self.addCleanup(filler.close)
    return filler

  def _check(self, dataset, step, first_step=0):
    found = dataset[step - first_step]["tokens"]
    end = self.stream.num_positions or _BATCH * (step + 1)
    positions = np.arange(_BATCH * step, min(end, _BATCH * (step + 1)))
    _, numbers = self.stream.locate(positions)
    np.testing.assert_array_equal(found[: len(positions)], self.rows[numbers])

  def test_it_fetches_ranges_once_and_the_second_epoch_makes_no_request(self):
    dataset = self._dataset(epochs=3)
    filler = self._start(dataset)
    for step in range(3 * self.epoch - 1):
      self._check(dataset, step)
      filler.advance(step + 1)
      if step == self.epoch:
        _wait_for(lambda: filler.depth_steps > self.epoch)
        total = self.store.total
    self.assertEqual(self.store.total, total)
    self.assertEqual(self.store.total, len(self.rows))

  def test_it_goes_ahead_without_the_trainer_and_an_outage_is_not_noticed(self):
    dataset = self._dataset()
    filler = self._start(dataset)
    self._check(dataset, 0)
    filler.advance(1)
    _wait_for(lambda: filler.depth_steps > 2 * self.epoch)
    self.store.working.clear()
    self.store.fails = True
    before = self.store.total
    for step in range(1, 2 * self.epoch):
      self._check(dataset, step)
      filler.advance(step + 1)
    self.assertEqual(self.store.total, before)
    self.store.working.set()

  def test_it_continues_after_an_outage_where_it_stopped(self):
    dataset = self._dataset(epochs=1)
    self.store.working.clear()
    filler = self._start(dataset)
    _wait_for(lambda: self.store.in_flight)
    self.store.working.set()
    _wait_for(lambda: filler.depth_steps >= self.epoch)
    self.assertEqual(max(self.store.requests.values()), 1)

  def test_files_are_renewed_and_released_during_an_outage(self):
    self.enterContext(mock.patch.object(spool_lib, "RENEW_SECONDS", 0.1))
    dataset = self._dataset(limit=100_000)
    filler = self._start(dataset)
    _wait_for(lambda: self.spooled.spool.full)
    self.store.working.clear()
    self.addCleanup(self.store.working.set)
    for step in range(20):
      self._check(dataset, step)
      filler.advance(step + 1)
    _wait_for(lambda: self.store.in_flight)  # The thread uses the room that these steps had.
    last = max(pathlib.Path(self.directory).glob("*.spool"))
    old = time.time() - 59
    os.utime(last, (old, old))
    _wait_for(lambda: last.stat().st_mtime > old + 58)
    released = self._released_files()
    for step in range(20, 35):
      self._check(dataset, step)
      filler.advance(step + 1)
    _wait_for(lambda: self._released_files() - released)
    self.store.working.set()

  def _released_files(self):
    files = pathlib.Path(self.directory).glob("*.spool")
    return {path for path in files if path.stat().st_mtime < time.time() - 50}

  def test_an_error_is_logged_and_left_to_the_trainer(self):
    dataset = self._dataset()
    self.store.fails = True
    with self.assertLogs(level="WARNING") as logs:
      filler = self._start(dataset)
      _wait_for(lambda: logs.output)
      filler.close()
    self.assertLen(logs.output, 1)
    self.assertRegex(logs.output[0], "Cannot fill the spool with step 0: The store is broken")

  def test_a_run_that_is_started_again_uses_what_is_there(self):
    first = self._dataset(epochs=1)
    filler = self._start(first)
    _wait_for(lambda: filler.depth_steps >= self.epoch)
    filler.close()
    self.spooled.close()
    total = self.store.total
    second = self._dataset(epochs=1, first_step=2)
    filler = self._start(second, 2)
    for step in range(2, self.epoch):
      self._check(second, step, 2)
      filler.advance(step + 1)
    _wait_for(lambda: self.spooled.hits + self.spooled.misses >= len(self.rows) - 2 * _BATCH)
    self.assertEqual(self.store.total, total)

  def test_it_stays_behind_the_limit_and_follows_the_trainer(self):
    limit = 60_000  # The corpus has 128 KB.
    dataset = self._dataset(limit=limit)
    filler = self._start(dataset)
    _wait_for(lambda: self.spooled.spool.full)
    for step in range(4 * self.epoch):
      self._check(dataset, step)
      filler.advance(step + 1)
      if step % self.epoch == 0:
        _wait_for(lambda: filler.depth_steps > 5)
      self.assertLessEqual(_size_of(self.directory), limit)

  def test_it_does_not_request_what_the_trainer_is_reading(self):
    dataset = self._dataset(epochs=1)
    self.store.working.clear()
    reader = threading.Thread(target=lambda: [dataset[step] for step in range(3)])
    reader.start()
    _wait_for(lambda: self.store.in_flight)
    filler = self._start(dataset)
    _wait_for(lambda: self.store.in_flight > _BATCH)
    self.store.working.set()
    reader.join()
    _wait_for(lambda: filler.depth_steps >= self.epoch)
    self.assertEqual(max(self.store.requests.values()), 1)

  def test_steps_that_workers_read_are_left_out(self):
    dataset = self._dataset(epochs=1)
    filler = self._start(dataset, read_by_workers=5)
    _wait_for(lambda: filler.depth_steps >= self.epoch)
    self.assertEqual(self.store.total, len(self.rows) - 5 * _BATCH)

  def test_loss_masks_are_spooled_too(self):
    directory = pathlib.Path(self.create_tempdir().full_path)
    tokens = [np.arange(60, dtype=np.uint16), np.arange(40, dtype=np.uint16)]
    masks = [np.arange(60, dtype=np.uint8) % 2, np.arange(40, dtype=np.uint8) % 3]
    paths = tuple(str(directory / f"{i}.npy") for i in range(2))
    mask_paths = tuple(str(directory / f"{i}.mask") for i in range(2))
    self.store = counting_storage.CountingStorage(
        {p: a.tobytes() for p, a in zip(paths + mask_paths, tokens + masks)}
    )
    storage = spooled.SpooledStorage(self.store, spool_lib.Spool(self.directory, _LIMIT))
    self.addCleanup(storage.close)
    source = steps_test.PairRows(20, mask_paths)
    files = token_files.TokenFiles(paths, np.zeros(2, np.int64), np.dtype("uint16"), storage)
    dataset = steps.StepDataset(
        source,
        reader_lib.FileReader(files),
        row_sequence.RowSequence(source, name="t", seed=0, num_epochs=1),
        schedule_lib.BatchSchedule.constant(4),
        {4: np.arange(4)},
    )
    self.addCleanup(dataset.close)
    filler = self._start(dataset)
    _wait_for(lambda: filler.depth_steps >= 5)
    self.assertEqual(self.store.total, 80)  # Two parts per row, of tokens and of masks.
    for step in range(5):
      self.assertIn("loss", dataset[step])
    self.assertEqual(self.store.total, 80)

  def test_depth_is_measured_in_seconds_of_training(self):
    dataset = self._dataset(epochs=1)
    filler = self._start(dataset)
    _wait_for(lambda: filler.depth_steps >= self.epoch)
    self.assertEqual(filler.depth_seconds, 0)
    for step in range(1, 4):
      filler.advance(step)
      time.sleep(0.05)
    filler.advance(4)
    self.assertEqual(filler.depth_steps, self.epoch - 4)
    self.assertGreater(filler.depth_seconds, 0.04 * (self.epoch - 4))

  def test_closing_ends_the_thread(self):
    filler = self._start(self._dataset())
    self.assertNotEmpty(_threads())
    filler.close()
    self.assertEmpty(_threads())

  def test_an_outage_delays_neither_closing_nor_a_new_thread_for_long(self):
    dataset = self._dataset(epochs=1)
    self.store.working.clear()
    self.addCleanup(self.store.working.set)
    filler = self._start(dataset)
    _wait_for(lambda: self.store.in_flight)
    began = time.monotonic()
    filler.close()
    self.assertLess(time.monotonic() - began, 5)
    again = self._start(dataset)
    self.store.working.set()
    _wait_for(lambda: again.depth_steps >= self.epoch)
    self.assertEqual(max(self.store.requests.values()), 1)

  def test_requests_that_fail_after_closing_are_not_reported(self):
    dataset = self._dataset()
    self.store.working.clear()
    filler = self._start(dataset)
    _wait_for(lambda: self.store.in_flight)
    with self.assertNoLogs(level="WARNING"):
      filler.close()
      self.store.fails = True  # As if the storage had been closed.
      self.store.working.set()
      _wait_for(lambda: not _threads())

  def test_if_an_unexpected_error_ends_the_thread_the_trainer_reads_by_itself(self):
    dataset = self._dataset()
    staged, fails, plain = threading.Event(), threading.Event(), self.store.fill

    def fill(*args):
      if threading.current_thread().name == "olmo-spool":
        staged.set()
        fails.wait()
        raise RuntimeError("an unexpected error")
      plain(*args)

    self.store.fill = fill
    with self.assertLogs(level="ERROR") as logs:
      filler = self._start(dataset)
      staged.wait()
      threading.Timer(0.1, fails.set).start()  # While the trainer waits for what is being staged.
      self._check(dataset, 0)
      _wait_for(lambda: not _threads())
    self.assertLen(logs.output, 1)
    self.assertIn("Filling the spool has stopped", logs.output[0])
    for step in range(1, 5):
      self._check(dataset, step)
      filler.advance(step)

  def test_a_spool_that_is_turned_off_ends_the_thread(self):
    dataset = self._dataset(limit=10)  # No range fits: as good as full.
    filler = self._start(dataset)
    self._check(dataset, 0)
    filler.close()
    for path in pathlib.Path(self.directory).iterdir():
      path.unlink()
    pathlib.Path(self.directory).rmdir()
    dataset = self._dataset()
    pathlib.Path(self.directory).rmdir()
    with self.assertLogs(level="WARNING") as logs:
      self._start(dataset)
      _wait_for(lambda: not _threads())
      self._check(dataset, 0)
    self.assertLen(logs.output, 1)

  def test_a_storage_without_a_spool_has_no_filler(self):
    files = token_files.TokenFiles.of_index(self.index)
    schedule = schedule_lib.BatchSchedule.constant(_BATCH)
    dataset = steps.StepDataset(
        windows.WindowRows(self.index),
        reader_lib.FileReader(files),
        stream_lib.train_stream(self.index, order="feistel", seed=1),
        schedule,
        {_BATCH: np.arange(_BATCH)},
    )
    self.assertIsNone(spool_filler.SpoolFiller.start(dataset, 0))
    gc.collect()


if __name__ == "__main__":
  absltest.main()
