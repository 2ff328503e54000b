"""Tests of rows that are read by many threads."""

import concurrent.futures
import gc
import subprocess
import sys
import threading
import weakref
from unittest import mock

import numpy as np
from absl.testing import absltest

from maxtext_olmo.rows import flights

STARTS_PROCESSES = True


class FlightsTest(absltest.TestCase):

  def _readers(self, most=4):
    readers = flights.Readers(most)
    self.addCleanup(readers.close)
    return readers

  def _flight(self, ids, read_row):
    ids = np.asarray(ids)
    return flights.Flight(ids, np.zeros((len(ids), 2), np.uint32), read_row)

  def test_every_row_but_padding_is_read_once(self):
    readers, read = self._readers(), []
    made = [self._flight([5, -1, 6, 7], lambda row, k=k: read.append((k, row))) for k in range(20)]
    for flight in made:
      readers.start(flight, 4)
    for flight in made:
      flight.wait()
    self.assertCountEqual(read, [(k, row) for k in range(20) for row in (0, 2, 3)])

  def test_a_flight_without_rows_is_finished_at_once(self):
    self.assertTrue(self._flight([-1, -1], print).finished)
    self.assertEqual(self._flight([], print).wait(), 0.0)

  def test_a_late_row_holds_up_no_later_flight(self):
    readers, go_on = self._readers(2), threading.Event()
    late = self._flight([0, 1], lambda row: go_on.wait() if row == 0 else None)
    after = [self._flight([2, 3, 4], lambda row: None) for _ in range(5)]
    for flight in (late, *after):
      readers.start(flight, 2)
    for flight in after:
      flight.wait()
    self.assertFalse(late.finished)
    go_on.set()
    late.wait()

  def test_rows_begin_in_the_order_in_which_they_were_asked_for(self):
    readers, begun = self._readers(1), []
    made = [self._flight([0, 1, 2], lambda row, k=k: begun.append((k, row))) for k in range(4)]
    for flight in made:
      readers.start(flight, 1)
    made[-1].wait()
    self.assertEqual(begun, [(k, row) for k in range(4) for row in range(3)])

  def test_as_many_rows_as_asked_for_are_read_at_the_same_time(self):
    readers, together = self._readers(8), threading.Barrier(6)
    flight = self._flight(range(6), lambda row: together.wait())
    readers.start(flight, 6)
    flight.wait()  # None of the six returns before all have begun.
    self.assertLessEqual(len(readers._pool._threads), 6)

  def test_threads_that_found_nothing_to_do_are_used_again(self):
    readers = self._readers(64)
    for _ in range(50):
      flight = self._flight(range(4), lambda row: None)
      readers.start(flight, 4)
      flight.wait()
    self.assertLessEqual(len(readers._pool._threads), 4)

  def test_fewer_threads_than_asked_for_read_all_the_same(self):
    readers = self._readers(64)
    submit, may_start = readers._pool.submit, iter([True])

    def one_only(*work):
      if next(may_start, False):
        return submit(*work)
      raise RuntimeError("can't start new thread")

    flight = self._flight(range(3), lambda row: None)
    with mock.patch.object(readers._pool, "submit", one_only):
      readers.start(flight, 3)
    flight.wait()

  def test_without_any_thread_the_rows_are_dropped_and_the_error_is_raised(self):
    readers = self._readers(64)
    flight = self._flight(range(3), lambda row: None)
    none = mock.patch.object(readers._pool, "submit", side_effect=RuntimeError("no thread"))
    with none, self.assertRaisesRegex(RuntimeError, "no thread"):
      readers.start(flight, 2)
    with self.assertRaises(concurrent.futures.CancelledError):
      flight.wait()
    again = self._flight(range(3), lambda row: None)
    readers.start(again, 2)
    again.wait()

  def test_the_error_of_the_first_bad_row_is_raised_and_the_others_are_read(self):
    def read_row(row):
      read.append(row)
      if row in (1, 3):
        raise OSError(f"row {row}")

    readers, read = self._readers(), []
    flight = self._flight(range(5), read_row)
    readers.start(flight, 4)
    for _ in range(2):
      with self.assertRaisesRegex(OSError, "row 1"):
        flight.wait()
    self.assertCountEqual(read, range(5))

  def test_closing_ends_the_wait_for_rows_that_will_not_be_read(self):
    readers, go_on = flights.Readers(1), threading.Event()
    flight = self._flight(range(3), lambda row: go_on.wait())
    readers.start(flight, 1)
    readers.close()
    threads = list(readers._pool._threads)
    go_on.set()
    with self.assertRaises(concurrent.futures.CancelledError):
      flight.wait()
    for thread in threads:
      thread.join()

  def test_readers_that_nobody_holds_any_more_end(self):
    readers = flights.Readers(2)
    flight = self._flight(range(4), lambda row: None)
    readers.start(flight, 2)
    flight.wait()
    threads, dropped = list(readers._pool._threads), weakref.ref(readers)
    del readers
    gc.collect()
    self.assertIsNone(dropped())
    for thread in threads:
      thread.join()

  def test_a_program_that_closes_nothing_ends_quietly(self):
    program = (
        "import time, numpy as np\n"
        "from maxtext_olmo.rows import flights\n"
        "readers = flights.Readers(4)\n"
        "ids = np.arange(20)\n"
        "readers.start(flights.Flight(ids, ids, lambda row: time.sleep(0.01)), 4)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "", ""))


if __name__ == "__main__":
  absltest.main()
