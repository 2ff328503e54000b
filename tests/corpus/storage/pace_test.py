"""Tests of the pace of requests."""

from absl.testing import absltest

from maxtext_olmo.corpus.storage import pace as pace_lib


class PaceTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.now = 0.0
    self.pace = pace_lib.Pace(lambda: self.now)

  def _start(self, processes: int) -> None:
    """Begins again, as one of some processes."""
    self.addCleanup(pace_lib.share_with, pace_lib.sharing())
    pace_lib.share_with(processes)
    self.now = 0.0
    self.pace = pace_lib.Pace(lambda: self.now)

  def _send(self, seconds: float) -> int:
    """Returns the number of requests that a busy sender sends in some time."""
    end, sent = self.now + seconds, 0
    while self.now < end:
      self.now += self.pace.delay() or 1e-5
      sent += 1
    return sent

  def test_a_batch_is_sent_at_once(self):
    self.assertEqual([self.pace.delay() for _ in range(256)], [0.0] * 256)
    self.assertGreater(self.pace.delay(), 0)

  def test_the_start_is_gentle_and_grows(self):
    first, second = self._send(1), self._send(1)
    self.assertBetween(first, 1000, 2500)
    self.assertBetween(second, first, 4000)

  def test_the_processes_of_a_run_share_the_rate_that_a_bucket_serves_at_first(self):
    for processes, burst in ((5, 256), (50, 100), (500, 10), (4096, 2)):
      self._start(processes)
      self.assertAlmostEqual(processes * self.pace.rate, 5000)
      sent = next(n for n in range(1000) if self.pace.delay())  # At once, for the first batch.
      self.assertLessEqual(sent, burst)
      first, second = processes * (sent + self._send(1)), processes * self._send(1)
      self.assertBetween(first, 5000, 15000)
      self.assertBetween(second, 4096, 10000)

  def test_a_run_of_many_processes_doubles_its_rate_no_faster_than_every_half_minute(self):
    for processes in (64, 1000, 4096):
      self._start(processes)
      for least, most in ((7000, 10_000), (9900, 20_000), (14_000, 40_000)):
        self._send(30)
        self.assertBetween(processes * self.pace.rate, least, most)

  def test_a_run_of_few_processes_soon_reads_as_fast_as_it_can(self):
    for processes, seconds, least in ((1, 4, 5000), (1, 14, 15_000), (4, 5, 9000), (16, 60, 3e4)):
      self._start(processes)
      self._send(seconds)
      self.assertGreater(processes * self.pace.rate, least)

  def test_a_pause_is_followed_by_the_requests_of_a_second(self):
    for processes, burst in ((16, 256), (500, 11)):
      self._start(processes)
      self.now += 3600.0
      sent = next(n for n in range(1000) if self.pace.delay())
      self.assertLessEqual(sent, burst)

  def test_a_throttled_process_soon_regains_its_share(self):
    self._start(1000)
    for _ in range(5):
      self.now += 1.0
      self.pace.slow_down()
    self.assertLessEqual(self.pace.rate, 1.0)
    self._send(10)
    self.assertGreater(self.pace.rate, 5)

  def test_a_throttled_store_is_asked_half_as_often_once_per_second(self):
    self._send(3)
    before = self.pace.rate
    for _ in range(100):
      self.pace.slow_down()
    self.assertAlmostEqual(self.pace.rate, before / 2)
    self.now += 1.5
    self.pace.slow_down()
    self.assertAlmostEqual(self.pace.rate, before / 4)

  def test_a_store_has_one_pace_until_the_number_of_processes_changes(self):
    self.addCleanup(pace_lib.share_with, pace_lib.sharing())
    pace_lib.share_with(10)
    pace = pace_lib.of_store("gs://shared")
    self.assertIs(pace_lib.of_store("gs://shared"), pace)
    self.assertIsNot(pace_lib.of_store("gs://shared", slow_start=False), pace)
    pace_lib.share_with(100)
    self.assertLess(pace_lib.of_store("gs://shared").rate, pace.rate)

  def test_without_a_slow_start_only_a_throttled_store_is_asked_less_often(self):
    self.pace = pace_lib.Pace(lambda: self.now, slow_start=False)
    self.assertGreater(self._send(1), 15_000)
    before = self.pace.rate
    self.pace.slow_down()
    self.assertAlmostEqual(self.pace.rate, before / 2)

  def test_it_never_stops(self):
    for _ in range(50):
      self.now += 1.0
      self.pace.slow_down()
    self.assertGreaterEqual(self.pace.rate, 1)
    self.assertLessEqual(self.pace.delay(), 1.0)


if __name__ == "__main__":
  absltest.main()
