"""Tests of the measurements of slow sources, on a small corpus."""

import pathlib
import tempfile

import numpy as np
from absl.testing import absltest

from maxtext_olmo.cli import bench_cold
from maxtext_olmo.cli import bench_corpus
from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.corpus import source as source_lib


class BenchColdTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    directory = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.corpus = bench_corpus.make(pathlib.Path(directory) / "c", megabytes=20, files=4)

  def test_a_slow_storage_gives_the_same_bytes_late(self):
    index = index_lib.load_index(self.corpus.indices[8192])
    ids = np.array([5, 77, 12])
    slow = source_lib.OlmoNpyDataSource(index, storage=bench_cold.SlowStorage(0.001))
    np.testing.assert_array_equal(slow.read(ids), source_lib.OlmoNpyDataSource(index).read(ids))

  def test_reads_ahead_are_many_times_faster_than_one_after_the_other(self):
    slow, dropped = bench_cold.measure(self.corpus, repeats=1, say=lambda line: None)
    self.assertGreater(slow.ratio, 5)
    self.assertGreater(dropped.rate, 0)
    self.assertIn("pages were still in memory", dropped.note)


if __name__ == "__main__":
  absltest.main()
