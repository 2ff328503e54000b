"""Tests of the start-up and trainer measurements."""

import pathlib
import tempfile

from absl.testing import absltest

from maxtext_olmo.cli import bench_plan
from maxtext_olmo.cli import bench_start
from maxtext_olmo.cli import bench_startup


class BenchStartTest(absltest.TestCase):

  def measure(self, patience):
    grain = next(c for c in bench_plan.CANDIDATES if c.loader == "grain_loader")
    with tempfile.TemporaryDirectory() as directory:
      mixes = {n: pathlib.Path(directory, str(n)) for n in (1000, 2000)}
      for n, mix in mixes.items():
        bench_startup._make_sparse_mix(mix, 2, n)
      return bench_start._measure_peer(grain, mixes, patience, lambda line: None)

  def test_a_peer_is_measured_from_its_start_to_its_first_batch(self):
    small, large = self.measure(patience=60)
    self.assertEqual((small.instances, large.instances), (1000, 2000))
    self.assertGreater(small.seconds, 0)
    self.assertGreater(large.peak_bytes, 10**7)

  def test_a_peer_that_is_too_slow_is_stopped_and_not_tried_at_larger_sizes(self):
    small, large = self.measure(patience=0.01)
    self.assertIn("stopped after", small.missing)
    self.assertIn("not tried", large.missing)

  def test_the_trainer_says_how_long_it_waited(self):
    found = bench_start.trainer_wait(lambda line: None)
    self.assertBetween(found["wait_share"], 0, 1)
    self.assertGreater(found["step_seconds"], 0)


if __name__ == "__main__":
  absltest.main()
