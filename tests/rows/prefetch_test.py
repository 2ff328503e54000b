"""Tests of prefetching with threads; `workers_test` has those with worker processes."""

import doctest
import gc
import os
import random
import signal
import threading
import time

import grain
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.rows import prefetch


def _threads():
  return [thread for thread in threading.enumerate() if thread.name.startswith("olmo-prefetch")]


def _keep(i):
  return i % 3 != 1


def _square(i):
  return {"i": np.array([i]), "square": np.full(4, i * i)}


def _dataset(n=20):
  return grain.MapDataset.range(n).filter(_keep).map(_square)


class PrefetcherTest(parameterized.TestCase):

  def _prefetcher(self, make, ahead, threads=1, first=0):
    prefetcher = prefetch.Prefetcher(make, ahead, threads, first)
    self.addCleanup(prefetcher.close)
    return prefetcher

  def test_the_examples_of_the_module_run(self):
    found = doctest.testmod(prefetch)
    self.assertEqual(found.failed, 0)
    self.assertGreater(found.attempted, 0)

  @parameterized.parameters((0, 1), (1, 1), (4, 1), (4, 3), (2, 8))
  def test_results_are_in_order_whichever_thread_finishes_first(self, ahead, threads):
    def make(number):
      time.sleep(random.random() * 0.003)
      return number

    prefetcher = self._prefetcher(make, ahead, threads, first=5)
    self.assertEqual([prefetcher.take() for _ in range(30)], list(range(5, 35)))

  def test_an_interrupt_while_it_waits_loses_nothing(self):
    interrupted = threading.Event()

    def interrupt(*_):
      if not interrupted.is_set():
        interrupted.set()
        raise KeyboardInterrupt

    # A process that was started in the background ignores interrupts.
    before = signal.signal(signal.SIGINT, interrupt)
    self.addCleanup(signal.signal, signal.SIGINT, before)
    asked = threading.Event()

    def make(number):
      if number == 0:
        asked.wait()
        # Again and again: a signal that arrives just before the wait begins does not end it.
        while not interrupted.wait(0.01):
          signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
      return number

    prefetcher = self._prefetcher(make, ahead=2)
    with self.assertRaises(KeyboardInterrupt):
      asked.set()
      prefetcher.take()
    self.assertEqual([prefetcher.take() for _ in range(4)], [0, 1, 2, 3])

  def test_no_more_results_are_made_than_requested(self):
    made = []
    prefetcher = self._prefetcher(made.append, ahead=3)
    for taken in range(5):
      while len(made) < taken + 3 or prefetcher.ready < 3:
        time.sleep(0.001)
      self.assertLen(made, taken + 3)
      prefetcher.take()

  def test_without_prefetching_there_is_no_thread(self):
    made = []
    prefetcher = self._prefetcher(made.append, ahead=0)
    self.assertEmpty(_threads())
    self.assertEmpty(made)
    prefetcher.take()
    self.assertEqual((made, prefetcher.ready), ([0], 0))

  @parameterized.parameters(0, 1, 3)
  def test_an_error_comes_in_its_place_and_again_after_it(self, ahead):
    def make(number):
      if number == 3:
        raise errors.CorpusError("no third")
      return number

    prefetcher = self._prefetcher(make, ahead)
    self.assertEqual([prefetcher.take() for _ in range(3)], [0, 1, 2])
    for _ in range(3):
      with self.assertRaisesRegex(errors.CorpusError, "no third"):
        prefetcher.take()

  @parameterized.parameters(0, 2)
  def test_stop_iteration_is_an_error_like_any_other(self, ahead):
    prefetcher = self._prefetcher(lambda number: next(iter([])), ahead)
    for _ in range(2):
      with self.assertRaises(StopIteration):
        prefetcher.take()

  @parameterized.parameters(0, 2)
  def test_a_closed_prefetcher_says_so(self, ahead):
    prefetcher = self._prefetcher(lambda number: number, ahead)
    prefetcher.take()
    prefetcher.close()
    prefetcher.close()
    with self.assertRaisesRegex(RuntimeError, "closed"):
      prefetcher.take()

  @parameterized.parameters(1, 3)
  def test_closing_wakes_a_waiting_thread(self, ahead):
    go_on, began = threading.Event(), threading.Event()

    def make(number):
      began.set()
      go_on.wait(60)
      return number

    prefetcher = self._prefetcher(make, ahead)
    found = []

    def wait():
      try:
        while True:
          found.append(prefetcher.take())
      except Exception as error:
        found.append(error)

    waiting, closing = threading.Thread(target=wait), threading.Thread(target=prefetcher.close)
    waiting.start()
    began.wait(60)
    closing.start()
    go_on.set()
    for thread in (waiting, closing):
      thread.join(60)
      self.assertFalse(thread.is_alive())
    *results, error = found
    self.assertIsInstance(error, Exception)
    self.assertEqual(results, list(range(len(results))))
    self.assertEmpty(_threads())

  def test_an_iterator_that_is_dropped_waits_for_no_thread(self):
    # The garbage collector may run while a thread is being started, where waiting could deadlock.
    go_on, began = threading.Event(), threading.Event()
    self.addCleanup(go_on.set)

    def make(number):
      if number == 2:
        began.set()
        go_on.wait(60)
      return number

    iterator = iter(prefetch.PrefetchedDataset(grain.MapDataset.range(9).map(make), ahead=2))
    self.assertEqual(next(iterator), 0)
    began.wait(60)
    del iterator
    gc.collect()
    self.assertNotEmpty(_threads())
    go_on.set()
    for thread in _threads():
      thread.join(60)
    self.assertEmpty(_threads())

  def test_closing_ends_the_threads(self):
    prefetcher = self._prefetcher(lambda number: number, ahead=4, threads=3)
    prefetcher.take()
    self.assertNotEmpty(_threads())
    prefetcher.close()
    self.assertEmpty(_threads())

  def test_dropping_it_ends_the_threads(self):
    prefetcher = prefetch.Prefetcher(lambda number: number, ahead=4, threads=3)
    prefetcher.take()
    threads = _threads()
    self.assertNotEmpty(threads)
    del prefetcher
    gc.collect()
    for thread in threads:
      thread.join(60)
    self.assertEmpty(_threads())

  def test_its_threads_use_batch_scheduling(self):
    if not hasattr(os, "SCHED_BATCH"):
      self.skipTest("no SCHED_BATCH here")
    prefetcher = self._prefetcher(lambda number: os.sched_getscheduler(0), ahead=1)
    self.assertEqual(prefetcher.take(), os.SCHED_BATCH)


class PrefetchedDatasetTest(parameterized.TestCase):

  @parameterized.parameters(0, 1, 5)
  def test_elements_and_states_do_not_depend_on_the_buffer_size(self, ahead):
    iterator = iter(prefetch.PrefetchedDataset(_dataset(), ahead=ahead))
    found, states = [], []
    for element in iterator:
      found.append(int(element["i"][0]))
      states.append(iterator.get_state()["next_index"])
    iterator.close()
    self.assertEqual(found, [i for i in range(20) if i % 3 != 1])
    self.assertEqual(states, [i + 1 for i in found])
    self.assertEmpty(_threads())

  def test_a_state_restores_into_another_iterator(self):
    one = iter(prefetch.PrefetchedDataset(_dataset(), ahead=2))
    for _ in range(5):
      next(one)
    state = one.get_state()
    rest = [int(e["i"][0]) for e in one]
    one.close()
    other = iter(prefetch.PrefetchedDataset(_dataset(), ahead=0))
    next(other)
    for saved in (state, {"next_index": np.int64(state["next_index"])}):
      other.set_state(saved)
      self.assertEqual(other.get_state(), state)
      self.assertEqual([int(e["i"][0]) for e in other], rest)

  @parameterized.parameters(0, 2)
  def test_an_empty_dict_is_the_end(self, ahead):
    dataset = grain.MapDataset.range(10).map(lambda i: {"i": i} if i < 4 else {})
    iterator = iter(prefetch.PrefetchedDataset(dataset, ahead=ahead))
    self.addCleanup(iterator.close)
    self.assertLen(list(iterator), 4)
    self.assertEqual(iterator.get_state(), {"next_index": 4})
    with self.assertRaises(StopIteration):
      next(iterator)

  def test_several_threads_give_the_same_elements(self):
    iterator = prefetch.PrefetchedIterator(_dataset(200), workers=0, ahead=4, threads=3)
    iterator.start_prefetch()
    found = [int(e["i"][0]) for e in iterator]
    iterator.close()
    self.assertEqual(found, [i for i in range(200) if i % 3 != 1])

  def test_an_error_reaches_the_caller_after_the_elements_before_it(self):
    def make(i):
      if i == 3:
        raise errors.CorpusError("no third")
      return {"i": i}

    iterator = iter(prefetch.PrefetchedDataset(grain.MapDataset.range(9).map(make), ahead=4))
    self.assertEqual([next(iterator)["i"] for _ in range(3)], [0, 1, 2])
    for _ in range(2):
      with self.assertRaisesRegex(errors.CorpusError, "no third"):
        next(iterator)
    self.assertEqual(iterator.get_state(), {"next_index": 3})
    iterator.set_state({"next_index": 4})
    self.assertEqual(next(iterator)["i"], 4)
    iterator.close()

  def test_a_dropped_iterator_ends_its_threads(self):
    iterator = iter(prefetch.PrefetchedDataset(_dataset(), ahead=2))
    next(iterator)
    threads = _threads()
    self.assertNotEmpty(threads)
    del iterator
    gc.collect()
    for thread in threads:
      thread.join(60)
    self.assertEmpty(_threads())

  def test_impossible_arguments_say_why(self):
    for workers, ahead in ((-1, 1), (0, -1), (1, 0)):
      with self.assertRaisesRegex(errors.ConfigError, "worker_count"):
        prefetch.PrefetchedDataset(_dataset(), workers=workers, ahead=ahead)
    iterator = iter(prefetch.PrefetchedDataset(_dataset()))
    for state in ({}, {"next_index": -1}, {"next_index": True}, {"next_index": "2"}, 3, None):
      with self.assertRaisesRegex(errors.ResumeError, "next_index"):
        iterator.set_state(state)
    iterator.close()
    with self.assertRaisesRegex(ValueError, "closed"):
      next(iterator)


if __name__ == "__main__":
  absltest.main()
