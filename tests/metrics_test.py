"""Tests of the loading metrics and the watchdog."""

import itertools
from collections.abc import Iterable

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import metrics

_COST = {
    "order_seconds": 0.001,
    "read_seconds": 0.02,
    "filter_seconds": 0.003,
    "transfer_seconds": 0.004,
    "bytes_read": 4096,
    "reads": 8,
    "bytes_to_device": 1024,
}


def _serve(sums: metrics.Metrics, waits: Iterable[float], step_seconds: float = 1.0) -> None:
  """Serves a batch per wait to a trainer that computes for `step_seconds` after each."""
  now = 100.0
  for step, wait in enumerate(waits):
    sums.made(**_COST)
    sums.served(step=step, asked_at=now, served_at=now + wait)
    now += wait + step_seconds


class MetricsTest(parameterized.TestCase):

  def test_it_sums_the_costs_of_batches(self):
    sums = metrics.Metrics()
    for step in range(2):
      sums.made(**_COST)
      sums.served(step=step, asked_at=3.0, served_at=3.25)
    found = sums.snapshot()
    self.assertEqual((found["batches"], found["bytes_read"], found["reads"]), (2, 8192, 16))
    self.assertEqual(found["bytes_to_device"], 2048)
    self.assertAlmostEqual(found["read_seconds"], 0.04)
    self.assertAlmostEqual(found["transfer_seconds"], 0.008)
    self.assertAlmostEqual(found["wait_seconds"], 0.5)
    self.assertFalse([name for name in found if name.startswith("_")])

  def test_persistent_waits_are_reported_once_with_the_largest_cost(self):
    sums = metrics.Metrics()
    sums.made(transfer_seconds=60.0)  # waits for the first compilation
    with self.assertLogs(level="WARNING") as logs:
      _serve(sums, [0.25] * 100)
    self.assertLen(logs.output, 1)
    self.assertIn(
        "over the last 20 steps (to step 40), it waited 20 % of the time, or 250 ms", logs.output[0]
    )
    self.assertIn("The largest cost of a batch is read (order 1.0 ms, read 20.0 ms", logs.output[0])

  def test_the_warning_names_the_store_if_reading_is_the_largest_cost(self):
    sums = metrics.Metrics()
    sums.watch_store(lambda: "gs://bucket has not answered for 12 s.")
    with self.assertLogs(level="WARNING") as logs:
      _serve(sums, [0.25] * 100)
    self.assertIn("transfer 4.0 ms). gs://bucket has not answered for 12 s. See", logs.output[0])

  def test_a_pipeline_that_measures_no_stage_names_none(self):
    sums = metrics.Metrics()
    with self.assertLogs(level="WARNING") as logs:
      for step in range(60):
        sums.served(step=step, asked_at=float(step), served_at=step + 0.5)
    self.assertNotIn("largest cost", logs.output[0])

  @parameterized.named_parameters(
      ("a_toy_run", [5.0] + [0.5] * 11, 0.01),
      ("warm_up_by_steps", [2.0] * 20 + [0.0] * 80, 1.0),
      ("warm_up_by_time", [0.02] * 100, 0.01),
      ("single_waits", [0.0] * 30 + [1.5] + [0.0] * 30 + [1.5], 1.0),
      ("short_waits", [0.05] * 100, 1.0),
      ("waits_of_milliseconds", [0.002] * 3000, 0.004),
  )
  def test_it_does_not_warn_about(self, waits, step_seconds):
    with self.assertNoLogs(level="WARNING"):
      _serve(metrics.Metrics(), waits, step_seconds)

  def test_waits_that_begin_late_are_reported(self):
    with self.assertLogs(level="WARNING") as logs:
      _serve(metrics.Metrics(), itertools.chain([0.0] * 200, [0.5] * 20))
    self.assertLen(logs.output, 1)


if __name__ == "__main__":
  absltest.main()
