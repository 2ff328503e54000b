"""Tests of the growth measurements, on a small corpus."""

import pathlib
import tempfile

import numpy as np
from absl.testing import absltest

from maxtext_olmo.cli import bench_corpus
from maxtext_olmo.cli import bench_growth


class BenchGrowthTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    directory = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.corpus = bench_corpus.make(pathlib.Path(directory) / "c", megabytes=20, files=4)

  def test_every_kind_of_growth_has_a_cost_for_each_size(self):
    found = bench_growth.measure(self.corpus, rounds=1, batches=3, say=lambda line: None)
    self.assertEqual(
        [growth.what for growth in found],
        ["files", "instances", "hosts", "position in the epoch"],
    )
    for growth in found:
      self.assertLen(growth.microseconds, len(growth.sizes))
      self.assertGreater(min(growth.microseconds), 0)
      self.assertGreaterEqual(growth.ratio, 1)

  def test_a_folded_corpus_of_a_billion_instances_reads_real_windows(self):
    source = bench_growth._folded(self.corpus, 10**9)
    self.assertLen(source, 10**9)
    beginnings = self.corpus.beginnings(8192)
    rows = source.read(np.array([0, 123_456_789, 10**9 - 1]))
    for row in rows[:, :8].tolist():
      self.assertIn(tuple(row), beginnings)


if __name__ == "__main__":
  absltest.main()
