"""Tests of reading ahead."""

import os
import pathlib
import threading
import time
import weakref

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.corpus import storage as storage_lib
from maxtext_olmo.corpus import token_files
from maxtext_olmo.rows import parts as parts_lib
from maxtext_olmo.rows import read_ahead
from maxtext_olmo.rows import reader as reader_lib
from tests.rows import slow_storage

_PARTS, _LENGTH, _STEPS = 8, 16, 40


def _threads():
  return [thread for thread in threading.enumerate() if thread.name.startswith("olmo-read")]


class ReadAheadTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    directory = pathlib.Path(self.create_tempdir().full_path)
    self.tokens = np.random.default_rng(0).integers(0, 1000, (2, 4000)).astype(np.uint16)
    self.paths = tuple(str(directory / f"{i}.npy") for i in range(2))
    for path, tokens in zip(self.paths, self.tokens):
      tokens.tofile(path)

  def _parts(self, step):
    """Returns one range per row, from both files in turn."""
    rows = step * _PARTS + np.arange(_PARTS)
    return parts_lib.Parts.one_per_row(rows % 2, rows * 7, np.full(_PARTS, _LENGTH))

  def _reads(self, storage, prepare=None, *, close=True):
    reader = reader_lib.FileReader(
        token_files.TokenFiles(self.paths, np.zeros(2, np.int64), np.dtype("uint16"), storage)
    )

    def make(step):
      if step >= _STEPS:
        return None
      return self._parts(step), np.zeros((_PARTS, _LENGTH), np.uint16)

    reads = read_ahead.ReadAhead(reader, prepare or make)
    if close:
      self.addCleanup(reads.close)
    return reads

  def _check(self, step, found):
    parts = self._parts(step)
    expected = [
        self.tokens[source, first : first + _LENGTH]
        for source, first in zip(parts.source, parts.first)
    ]
    np.testing.assert_array_equal(found, expected)

  @parameterized.parameters(1, 2, 3)
  def test_steps_equal_plain_reads_and_many_reads_are_in_flight(self, stride):
    storage = slow_storage.SlowStorage(0.0, wants_concurrency=0)
    # More than one batch: the parts of coming steps are read at the same time.
    storage.gather = 2 * _PARTS
    reads = self._reads(storage)
    for step in range(stride - 1, _STEPS, stride):
      self._check(step, reads.take(step))

  @parameterized.parameters(1, 2, 3)
  def test_a_storage_that_wants_concurrency_gets_whole_steps_several_at_once(self, stride):
    storage = slow_storage.SlowStorage(0.0)
    reads = self._reads(storage)
    steps = range(stride - 1, _STEPS, stride)

    def wait_for_others():
      if storage.calls >= 2:  # The first two steps are read when they are taken.
        storage.gather = 3

    storage.on_fill = wait_for_others
    for step in steps:
      self._check(step, reads.take(step))
    self.assertEqual(storage.calls, len(steps))

  def test_the_first_step_is_not_delayed_by_later_ones(self):
    storage = slow_storage.SlowStorage(0.0)
    reads = self._reads(storage)
    began = []
    storage.on_fill = lambda: began.append(reads.frontier)
    for step in (7, 8):
      reads.take(step)
    self.assertEqual(began[:2], [7, 8])
    self.assertGreater(reads.frontier, 8)

  def test_the_distance_grows_if_the_reads_are_slower_than_the_trainer(self):
    storage = slow_storage.SlowStorage(0.005)
    reads = self._reads(storage)
    for step in range(_STEPS):
      reads.take(step)
    self.assertGreater(storage.most_waiting, 6)

  def test_no_more_reads_are_queued_than_the_storage_can_use(self):
    storage = slow_storage.SlowStorage(0.0005, wants_concurrency=_PARTS)
    reads = self._reads(storage)
    for step in range(_STEPS - 8):
      reads.take(step)
      self.assertLessEqual(reads.frontier, step + 4)

  def test_the_distance_shrinks_if_the_trainer_is_slow(self):
    storage = slow_storage.SlowStorage(0.0)
    reads = self._reads(storage)
    for step in range(20):
      reads.take(step)
      time.sleep(0.02)
    self.assertLessEqual(reads.frontier, 19 + 3)

  def test_nothing_is_read_twice(self):
    storage = slow_storage.SlowStorage(0.0)
    reads = self._reads(storage)
    for step in range(_STEPS):
      reads.take(step)
    self.assertEqual(storage.ranges, _STEPS * _PARTS)

  def test_steps_may_come_in_any_order(self):
    reads = self._reads(slow_storage.SlowStorage(0.0))
    for step in np.random.default_rng(0).permutation(_STEPS).tolist():
      self._check(step, reads.take(step))

  def test_threads_may_take_steps_at_once(self):
    reads = self._reads(slow_storage.SlowStorage(0.001))
    found = {}

    def work(first):
      for step in range(first, _STEPS, 2):
        found[step] = reads.take(step)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(2)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    self.assertLen(found, _STEPS)
    for step, array in found.items():
      self._check(step, array)

  def test_a_failed_read_reaches_the_step_that_needs_it_and_no_other(self):
    reads = self._reads(slow_storage.SlowStorage(0.0))
    os.truncate(self.paths[1], 2 * 1000)
    failed = []
    for step in range(_STEPS):
      try:
        self._check(step, reads.take(step))
      except errors.CorpusError as error:
        self.assertRegex(str(error), r"1\.npy is too short")
        failed.append(step)
    parts = [self._parts(step) for step in range(_STEPS)]
    bad = [((p.first + _LENGTH > 1000) & (p.source == 1)).any() for p in parts]
    self.assertEqual(failed, np.flatnonzero(bad).tolist())

  def _most_alive(self, nbytes, storage=None):
    """Returns the largest number of arrays alive at a time while taking steps of a size."""
    arrays, most = [], 0

    def prepare(step):
      array = np.empty(
          (1, nbytes // 2), np.uint16
      )  # The pages that no part covers are not touched.
      arrays.append(weakref.ref(array))
      return parts_lib.Parts.of_rows([[(0, step, 10)]]), array

    reads = self._reads(storage or storage_lib.LocalStorage(), prepare)
    for step in range(20):
      taken = reads.take(step)
      self.assertEqual(taken[0, :10].tolist(), self.tokens[0, step : step + 10].tolist())
      del taken
      most = max(most, sum(array() is not None for array in arrays))
    return most

  def test_memory_ahead_is_bounded(self):
    # At most 4 steps are ahead, and at most 256 MB.
    self.assertLessEqual(self._most_alive(1 << 20), 5)
    self.assertLessEqual(self._most_alive(100 << 20), 3)
    self.assertLessEqual(self._most_alive(300 << 20), 1)

  def test_memory_ahead_is_bounded_however_slow_the_reads_are(self):
    self.assertLessEqual(self._most_alive(1 << 20, slow_storage.SlowStorage()), 33)
    self.assertLessEqual(self._most_alive(100 << 20, slow_storage.SlowStorage()), 3)

  def test_steps_far_from_the_current_one_are_dropped(self):
    arrays = {}

    def prepare(step):
      array = np.zeros((_PARTS, _LENGTH), np.uint16)
      arrays[step] = weakref.ref(array)
      return self._parts(step % _STEPS), array

    reads = self._reads(slow_storage.SlowStorage(0.0), prepare)
    for step in (200, 201, 202, 3, 4, 5, 6, 7):
      self._check(step % _STEPS, reads.take(step))
    reads.close()
    for thread in _threads():
      thread.join()
    self.assertEqual([step for step, array in arrays.items() if array() is not None], [])

  def test_closing_ends_the_threads_and_taking_starts_them_again(self):
    reads = self._reads(slow_storage.SlowStorage())
    reads.take(0)
    threads = _threads()
    self.assertNotEmpty(threads)
    reads.close()
    for thread in threads:
      thread.join(timeout=60)
    self.assertFalse(any(thread.is_alive() for thread in threads))
    self._check(1, reads.take(1))

  def test_dropping_it_ends_the_threads(self):
    reads = self._reads(slow_storage.SlowStorage(), close=False)
    reads.take(0)
    threads = _threads()
    del reads
    for thread in threads:
      thread.join(timeout=60)
    self.assertFalse(any(thread.is_alive() for thread in threads))

  def test_steps_without_parts_are_taken_at_once(self):
    nothing = parts_lib.Parts.of_rows([[], []])
    reads = self._reads(
        slow_storage.SlowStorage(), lambda step: (nothing, np.full((2, 3), step, np.uint16))
    )
    self.assertEqual(reads.take(5).tolist(), [[5] * 3] * 2)

  def test_no_more_steps_are_read_ahead_than_fit_into_memory(self):
    length, prepared = 1 << 23, []  # 128 MiB per step, of which only a few pages are written.

    def prepare(step):
      prepared.append(step)
      return self._parts(step), np.zeros((_PARTS, length), np.uint16)

    limit = read_ahead.max_steps_ahead(_PARTS * length * 2)
    self.assertEqual(limit, 2)
    reads = self._reads(slow_storage.SlowStorage(0.0), prepare)
    ahead = []
    for step in range(6):
      reads.take(step)
      ahead.append(max(prepared) - step)
    self.assertEqual(max(ahead), limit)

  def test_more_steps_are_wanted_the_longer_a_read_takes(self):
    wanted = [read_ahead.wanted_steps_ahead(latency, 0.1) for latency in (0.01, 0.1, 1.0)]
    self.assertEqual(wanted, [2, 3, 16])


class LocalReadsTest(absltest.TestCase):

  def test_one_slow_batch_does_not_start_it(self):
    reads = read_ahead.LocalReads()
    reads.slow_batch(0, waits=8, parts=8)
    self.assertLess(reads.ahead_until, 1)

  def test_two_slow_batches_in_a_row_start_it(self):
    reads = read_ahead.LocalReads()
    reads.slow_batch(0, waits=8, parts=8)
    reads.slow_batch(1, waits=4, parts=8)
    self.assertGreater(reads.ahead_until, 2)

  def test_a_batch_that_did_not_wait_is_not_slow(self):
    reads = read_ahead.LocalReads()
    reads.slow_batch(0, waits=8, parts=8)
    reads.slow_batch(1, waits=3, parts=8)
    reads.slow_batch(2, waits=8, parts=8)
    self.assertLess(reads.ahead_until, 3)

  def test_it_ends_and_lasts_longer_if_batches_stay_slow(self):
    reads = read_ahead.LocalReads()
    reads.slow_batch(0, waits=8, parts=8)
    reads.slow_batch(1, waits=8, parts=8)
    first = reads.ahead_until
    reads.slow_batch(first, waits=8, parts=8)
    self.assertGreater(reads.ahead_until - first, first)


if __name__ == "__main__":
  absltest.main()
