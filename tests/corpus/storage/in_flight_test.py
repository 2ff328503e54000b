"""Tests of the threads that send requests."""

import threading
import time

from absl.testing import absltest

from maxtext_olmo import errors
from maxtext_olmo.corpus.storage import in_flight


class InFlightTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.threads = in_flight.InFlight()
    self.addCleanup(self.threads.close)

  def test_every_request_of_every_read_is_sent_once(self):
    found = [[] for _ in range(8)]
    callers = [
        threading.Thread(target=self.threads.run, args=(sent.append, range(1000))) for sent in found
    ]
    for caller in callers:
      caller.start()
    for caller in callers:
      caller.join()
    for sent in found:
      self.assertCountEqual(sent, range(1000))

  def test_all_rows_of_a_batch_are_in_flight_at_once(self):
    together = threading.Barrier(256)
    self.threads.run(lambda _: together.wait(), range(256))

  def test_after_an_error_nothing_runs_any_more(self):
    running = []

    def send(number):
      running.append(number)
      time.sleep(0.001)
      running.remove(number)
      if number == 300:
        raise errors.CorpusError("replaced")

    with self.assertRaisesRegex(errors.CorpusError, "replaced"):
      self.threads.run(send, range(2000))
    self.assertEmpty(running)
    self.threads.run(lambda _: None, range(10))

  def test_fewer_are_in_flight_if_the_store_is_near(self):
    self.threads.run(lambda _: None, range(2000))
    self.assertLess(self.threads.limit, 256)
    self.threads.run(lambda _: time.sleep(0.05), range(600))
    self.assertEqual(self.threads.limit, 256)

  def test_threads_end_when_the_limit_falls(self):
    before = set(threading.enumerate())

    def count():
      return len(set(threading.enumerate()) - before)

    together = threading.Barrier(256)  # Passed only if 256 threads are running.
    self.threads.run(lambda _: together.wait(), range(256))
    deadline = time.monotonic() + 60
    while self.threads.limit > 64 or count() > 128:
      self.assertLess(time.monotonic(), deadline, f"{count()} threads, limit {self.threads.limit}")
      self.threads.run(lambda _: None, range(1000))

  def test_close_gives_up_what_was_not_sent(self):
    began, end, raised = threading.Event(), threading.Event(), []

    def send(_):
      began.set()
      end.wait()

    def run():
      try:
        self.threads.run(send, range(1000))
      except errors.CorpusError as error:
        raised.append(str(error))

    caller = threading.Thread(target=run)
    caller.start()
    began.wait()
    self.threads.close()
    end.set()
    caller.join()
    self.assertIn("closed", raised[0])
    with self.assertRaisesRegex(errors.CorpusError, "closed"):
      self.threads.run(send, [1])


if __name__ == "__main__":
  absltest.main()
