"""Tests of the start-up measurement."""

from absl.testing import absltest

from maxtext_olmo.tools import bench_startup


class BenchStartupTest(absltest.TestCase):

  def test_it_measures_both_sizes_side_by_side_and_prints_ratios(self):
    table = bench_startup.measure(files=20, instances=5_000_000, repeats=1)
    self.assertIn("| | 5,000,000 instances | 1,000,000 instances | ratio |", table)
    self.assertRegex(table, r"\| first batch \| [\d.]+ s \| [\d.]+ s \| [\d.]+ \|")
    self.assertRegex(table, r"\| peak resident memory \| \d+ MB")


if __name__ == "__main__":
  absltest.main()
