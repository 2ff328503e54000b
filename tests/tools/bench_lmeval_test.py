"""Tests that the benchmark of evaluation compares what it says it compares."""

import numpy as np
from absl.testing import absltest

from maxtext_olmo.tools import bench_lmeval as bench


class BenchLMEvalTest(absltest.TestCase):

  def test_every_way_runs_every_row_once(self):
    rows = bench.make_rows(200, "zero-shot")
    for make in bench._ways(4).values():
      batches = make(rows, 16)
      numbers = np.concatenate([batch.document_idx for batch in batches])
      self.assertEqual(sorted(numbers[numbers > 0]), list(range(1, len(rows) + 1)))
      real = sum(row.length for row in rows)
      run = sum(batch.inputs.size for batch in batches)
      self.assertAlmostEqual(bench.padding_share(batches), 1 - real / run)

  def test_sorting_globally_pads_least_in_at_most_twelve_shapes(self):
    for name in bench._SETS:
      rows = bench.make_rows(2048, name)
      unsorted, per_host, globally = (make(rows, 64) for make in bench._ways(4).values())
      self.assertLess(bench.padding_share(globally), bench.padding_share(unsorted))
      self.assertLess(bench.padding_share(globally), bench.padding_share(per_host))
      self.assertLessEqual(len({batch.inputs.shape for batch in globally}), 12)

  def test_the_tables_have_a_row_for_each_way(self):
    text = bench.measure(requests=64, timed_requests=16, batch_size=8, hosts=2)
    for word in (
        "unsorted",
        "sorted on each of 2 hosts",
        "sorted globally",
        "zero-shot",
        "five-shot",
    ):
      self.assertIn(word, text)


if __name__ == "__main__":
  absltest.main()
