"""Tests of the measures of loading and the watchdog."""

import time

import numpy as np
from absl.testing import absltest

from maxtext_olmo import metrics

_COST = np.array([0.001, 0.02, 0.003, 4096.0, 8.0])


class MetricsTest(absltest.TestCase):

  def test_it_sums_what_batches_say(self):
    sums = metrics.Metrics()
    for step in range(2):
      sums.made(_COST, 4096, 0.5)
      sums.served(step, time.perf_counter(), queue_depth=1)
    found = sums.snapshot()
    self.assertEqual((found["batches"], found["bytes_read"], found["reads"]), (2, 8192, 16))
    self.assertEqual((found["bytes_to_device"], found["queue_depth"]), (8192, 1))
    self.assertAlmostEqual(found["read_seconds"], 0.04)
    self.assertAlmostEqual(found["transfer_seconds"], 1.0)
    self.assertGreaterEqual(found["wait_seconds"], 0.0)
    self.assertFalse([name for name in found if name.startswith("_")])

  def _serve(self, sums, waits):
    """Serves batches to a trainer whose steps take no time, with waits of so many seconds."""
    for step, wait in enumerate(waits):
      sums.made(_COST, 4096, 0.5)
      sums.served(step, time.perf_counter() - wait, queue_depth=0)

  def test_a_wait_longer_than_the_step_before_is_said_once_with_where_the_time_went(self):
    sums = metrics.Metrics()
    with self.assertLogs(level="WARNING") as logs:
      self._serve(sums, [0.0] * 5 + [0.3, 0.3, 0.2, 0.3])
    self.assertLen(logs.output, 1)
    self.assertRegex(
        logs.output[0],
        r"Step 7 waited 2\d\d ms for its batch, longer than the -?\d+ ms of the step",
    )
    self.assertIn("order 1.0 ms, read 20.0 ms, filter 3.0 ms, transfer 500.0 ms", logs.output[0])

  def test_short_and_single_waits_and_the_first_steps_are_no_news(self):
    with self.assertNoLogs(level="WARNING"):
      self._serve(metrics.Metrics(), [0.5, 0.5, 0.0, 0.001, 0.2, 0.2, 0.001, 0.2])


if __name__ == "__main__":
  absltest.main()
