"""Tests of the start-up measurement."""

import mmap
import pathlib

from absl.testing import absltest

from maxtext_olmo.cli import bench_startup


class BenchStartupTest(absltest.TestCase):

  def test_it_measures_both_sizes_side_by_side_and_prints_ratios(self):
    table = bench_startup.measure(files=20, instances=5_000_000, repeats=1)
    self.assertIn("| | 5,000,000 instances | 1,000,000 instances | ratio |", table)
    self.assertRegex(table, r"\| first batch \| [\d.]+ s \| [\d.]+ s \| [\d.]+ \|")
    self.assertRegex(table, r"\| peak resident memory \| \d+ MB")

  def test_what_the_measuring_process_holds_is_not_counted(self):
    directory = pathlib.Path(self.create_tempdir().full_path, "mix")
    bench_startup._make_sparse_mix(directory, 2, 1000)
    alone = bench_startup._in_fresh_process(directory).peak_bytes
    size = alone + 100_000_000
    held = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
    with held:
      self.assertLess(bench_startup._in_fresh_process(directory).peak_bytes, size)


if __name__ == "__main__":
  absltest.main()
