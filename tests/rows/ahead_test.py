"""Tests of the thread that works ahead."""

import os
import subprocess
import sys
import threading
import time

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.rows import ahead
from tests import distributed

STARTS_PROCESSES = True

_FAILS_IN_THE_MIDDLE = """
import jax
import numpy as np
from maxtext_olmo.rows import ahead

rows = np.zeros((64, 1 << 16), np.int32)
worker = ahead.Ahead(lambda _: jax.block_until_ready(jax.device_put(rows, jax.devices()[0]) + 1), 1)
worker.take()
raise SystemExit(3)
"""


class AheadTest(parameterized.TestCase):

  def test_results_come_in_order_and_only_so_many_ahead(self):
    made = []

    def make(number):
      made.append(number)
      return number

    worker = ahead.Ahead(make, depth=2)
    self.assertEqual([worker.take() for _ in range(5)], [0, 1, 2, 3, 4])
    while worker.ready < 2:
      time.sleep(0.001)
    # Five taken, two waiting, and one that has no room to wait.
    self.assertLessEqual(len(made), 8)
    worker.stop()

  @parameterized.product(depth=(0, 1, 3), threads=(1, 2, 5))
  def test_several_threads_hand_over_in_order_and_only_so_many_ahead(self, depth, threads):
    made = []

    def make(number):
      time.sleep(1e-3 * (number % 3))  # So that later ones are made before earlier ones.
      made.append(number)
      return number

    worker = ahead.Ahead(make, depth, threads)
    for number in range(40):
      self.assertEqual(worker.take(), number)
      self.assertLess(max(made), number + depth + threads + 2)
    while worker.ready < depth:
      time.sleep(0.001)
    time.sleep(0.01)
    self.assertEqual(worker.ready, depth)
    self.assertLessEqual(len(made), 40 + depth + threads)
    worker.stop()

  def test_what_one_thread_gets_wrong_comes_after_what_was_before_it_and_ends_the_rest(self):
    def make(number):
      if number == 5:
        raise ValueError("five")
      time.sleep(0.002 if number < 5 else 0)
      return number

    worker = ahead.Ahead(make, depth=2, threads=3)
    self.assertEqual([worker.take() for _ in range(5)], [0, 1, 2, 3, 4])
    for _ in range(20):
      with self.assertRaisesRegex(ValueError, "five"):
        worker.take()
    worker.stop()
    self.assertFalse(any(thread.is_alive() for thread in worker._threads))

  def test_what_goes_wrong_reaches_whoever_asks_after_the_good_results(self):
    numbers = iter([1, 2])
    worker = ahead.Ahead(lambda _: next(numbers), depth=4)
    self.assertEqual([worker.take(), worker.take()], [1, 2])
    for _ in range(2):
      with self.assertRaises(StopIteration):
        worker.take()
    worker.stop()

  def test_stopping_ends_the_thread_even_where_nobody_takes(self):
    before = threading.active_count()
    workers = [ahead.Ahead(lambda number: number, depth=1, threads=3) for _ in range(5)]
    for worker in workers:
      worker.stop()
      worker.stop()
    self.assertEqual(threading.active_count(), before)

  def test_a_program_that_fails_without_stopping_it_ends_with_its_own_exit_code(self):
    for _ in range(3):
      done = subprocess.run([sys.executable, "-c", _FAILS_IN_THE_MIDDLE], check=False)
      self.assertEqual(done.returncode, 3)

  def test_a_program_ends_at_once_where_one_waits_for_another(self):
    # The inner one never makes its third, so the outer one waits for it; both are left running.
    code = """
import threading
from maxtext_olmo.rows import ahead
ahead._EXIT_SECONDS = 0.5
inner = ahead.Ahead(lambda number: number if number < 2 else threading.Event().wait(), 1)
outer = ahead.Ahead(lambda _: inner.take(), 1)
print(outer.take())
ahead._stop_all()
print(any(thread.is_alive() for thread in outer._threads))
"""
    done = distributed.run_python(code)
    self.assertEqual((done.returncode, done.stdout.split()), (0, ["0", "False"]), done.stderr)

  @absltest.skipUnless(hasattr(os, "SCHED_BATCH"), "needs Linux")
  def test_the_threads_do_not_take_the_core_of_the_one_that_wakes_them(self):
    worker = ahead.Ahead(lambda _: os.sched_getscheduler(0), depth=1, threads=2)
    self.assertEqual([worker.take() for _ in range(4)], [os.SCHED_BATCH] * 4)
    self.assertEqual(os.sched_getscheduler(0), os.SCHED_OTHER)
    worker.stop()

  def test_whoever_waits_for_a_result_is_told_when_it_is_stopped(self):
    begin = threading.Event()
    worker = ahead.Ahead(lambda _: begin.wait(), depth=0)
    found = []

    def take():
      try:
        worker.take()
      except RuntimeError as error:
        found.append(str(error))

    taker = threading.Thread(target=take)
    taker.start()
    worker.end()
    taker.join()
    begin.set()
    worker.stop()
    self.assertIn("Nothing is made ahead any more", found[0])

  def test_dropping_it_ends_the_thread(self):
    before = threading.active_count()
    workers = [ahead.Ahead(lambda _: 1, depth=1, threads=2) for _ in range(5)]
    for worker in workers:
      worker.take()
    threads = [thread for worker in workers for thread in worker._threads]
    del worker, workers
    for thread in threads:
      thread.join()
    self.assertEqual(threading.active_count(), before)


if __name__ == "__main__":
  absltest.main()
