"""Tests of the thread that works ahead."""

import itertools
import subprocess
import sys
import threading
import time

from absl.testing import absltest

from maxtext_olmo.pipelines import ahead

_FAILS_IN_THE_MIDDLE = """
import jax
import numpy as np
from maxtext_olmo.pipelines import ahead

rows = np.zeros((64, 1 << 16), np.int32)
worker = ahead.Ahead(lambda: jax.block_until_ready(jax.device_put(rows, jax.devices()[0]) + 1), 1)
worker.take()
raise SystemExit(3)
"""


class AheadTest(absltest.TestCase):

  def test_results_come_in_order_and_only_so_many_ahead(self):
    made = []

    def make():
      made.append(len(made))
      return made[-1]

    worker = ahead.Ahead(make, depth=2)
    self.assertEqual([worker.take() for _ in range(5)], [0, 1, 2, 3, 4])
    while worker.ready < 2:
      time.sleep(0.001)
    # Five taken, two waiting, and one that has no room to wait.
    self.assertLessEqual(len(made), 8)
    worker.stop()

  def test_what_goes_wrong_reaches_whoever_asks_after_the_good_results(self):
    numbers = iter([1, 2])
    worker = ahead.Ahead(lambda: next(numbers), depth=4)
    self.assertEqual([worker.take(), worker.take()], [1, 2])
    for _ in range(2):
      with self.assertRaises(StopIteration):
        worker.take()
    worker.stop()

  def test_stopping_ends_the_thread_even_where_nobody_takes(self):
    before = threading.active_count()
    workers = [ahead.Ahead(lambda: next(itertools.count()), depth=1) for _ in range(5)]
    for worker in workers:
      worker.stop()
      worker.stop()
    self.assertEqual(threading.active_count(), before)

  def test_a_program_that_fails_without_stopping_it_ends_with_its_own_exit_code(self):
    for _ in range(3):
      done = subprocess.run([sys.executable, "-c", _FAILS_IN_THE_MIDDLE], check=False)
      self.assertEqual(done.returncode, 3)

  def test_dropping_it_ends_the_thread(self):
    before = threading.active_count()
    workers = [ahead.Ahead(lambda: 1, depth=1) for _ in range(5)]
    for worker in workers:
      worker.take()
    threads = [worker._thread for worker in workers]
    del worker, workers
    for thread in threads:
      thread.join()
    self.assertEqual(threading.active_count(), before)


if __name__ == "__main__":
  absltest.main()
