"""Tests that the benchmark of evaluation compares what it says it compares."""

import numpy as np
from absl.testing import absltest

from maxtext_olmo.cli import bench_lmeval as bench


class BenchLMEvalTest(absltest.TestCase):

  def test_every_way_runs_every_row_once(self):
    rows = bench.make_rows(200, "zero-shot")
    lengths = sorted(row.length for row in rows)
    for make in bench._ways(4).values():
      batches = make(rows, 16)
      found = []
      for batch in batches:
        for segments in batch.inputs_segmentation:
          found += np.bincount(segments)[1:].tolist()
      self.assertEqual(sorted(found), lengths)
      run = sum(batch.inputs.size for batch in batches)
      self.assertAlmostEqual(bench.padding_share(batches), 1 - sum(lengths) / run)

  def test_few_shapes_and_less_than_five_percent_padding_when_packed(self):
    for name in bench._SETS:
      rows = bench.make_rows(4096, name)
      unsorted, _, globally, packed = (make(rows, 64) for make in bench._ways(4).values())
      self.assertLess(bench.padding_share(globally), bench.padding_share(unsorted))
      self.assertLessEqual(bench.padding_share(packed), bench.padding_share(globally) + 1e-9)
      self.assertLess(bench.padding_share(packed), 0.05)
      for batches in (globally, packed):
        self.assertLessEqual(len({batch.inputs.shape for batch in batches}), 12)

  def test_the_tables_have_a_row_for_each_way(self):
    text = bench.measure(requests=64, timed_requests=16, batch_size=8, hosts=2)
    for word in (
        "unsorted",
        "sorted on each of 2 hosts",
        "sorted globally",
        "| packed |",
        "zero-shot",
        "five-shot",
    ):
      self.assertIn(word, text)


if __name__ == "__main__":
  absltest.main()
