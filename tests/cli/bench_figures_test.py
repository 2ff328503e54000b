"""Tests that figures which contradict each other are refused."""

from absl.testing import absltest

from maxtext_olmo.cli import bench_figures


def run(batches=10, seconds=1.0, cpu=None, halfway=None, **more):
  cpu = seconds if cpu is None else cpu
  halfway = seconds / 2 if halfway is None else halfway
  return {
      "batches": batches,
      "buffered": 4,
      "seconds": seconds,
      "cpu_seconds": cpu,
      "halfway_seconds": halfway,
      "faults": 0,
      "peak_bytes": 1,
      **more,
  }


def figure(name, group, *runs, **more):
  return bench_figures.Figure(name, group, batch=4, length=8, runs=runs, **more)


class BenchFiguresTest(absltest.TestCase):

  def test_medians_and_ranges_come_from_the_runs(self):
    found = figure("x", "ours", run(seconds=1), run(seconds=4), run(seconds=2, faults=30))
    self.assertEqual(found.rates, [320, 80, 160])
    self.assertEqual(found.rate, 160)
    self.assertEqual(found.cpu_ns_per_token, 2e9 / 320)
    self.assertEqual(found.to_json()["tokens_per_second"], {"median": 160, "low": 80, "high": 320})

  def test_bytes_to_devices_are_counted_by_the_rows_that_were_sent(self):
    found = figure("x", "ours", run(bytes_to_device=44 * 32, reads=44))
    self.assertEqual(found.device_bytes_per_token, 4)

  def test_what_is_slower_than_a_copy_passes(self):
    limit = figure("copy", "limit", run(seconds=1), run(seconds=1.1))
    ours = figure("ours", "ours", run(seconds=1.2), run(seconds=1.3))
    bench_figures.check([limit, ours])

  def test_nothing_beats_the_copy_limit(self):
    limit = figure("copy", "limit", run(seconds=1), run(seconds=1.1))
    ours = figure("ours", "ours", run(seconds=0.8), run(seconds=0.7))
    with self.assertRaisesRegex(bench_figures.ImpossibleFigureError, "No loader beats a copy"):
      bench_figures.check([limit, ours])

  def test_two_threads_may_be_faster_than_one_copy_but_not_for_less_work(self):
    limit = figure("copy", "limit", run(seconds=1))
    bench_figures.check([limit, figure("ours", "ours", run(seconds=0.7, cpu=1.3), threads=2)])
    with self.assertRaisesRegex(bench_figures.ImpossibleFigureError, "processor time"):
      bench_figures.check([limit, figure("ours", "ours", run(seconds=0.7, cpu=0.6), threads=2)])

  def test_the_filter_does_not_make_anything_faster(self):
    on = figure("ours", "ours", run(seconds=1), run(seconds=1.1), filter=True)
    off = figure("ours", "ours", run(seconds=2), run(seconds=2.1))
    with self.assertRaisesRegex(bench_figures.ImpossibleFigureError, "faster with the filter"):
      bench_figures.check([on, off])

  def test_ranges_that_overlap_are_noise(self):
    on = figure("ours", "ours", run(seconds=1), run(seconds=3), filter=True)
    off = figure("ours", "ours", run(seconds=2), run(seconds=2.1))
    bench_figures.check([on, off])

  def test_batches_that_lay_ready_are_not_counted_as_made(self):
    full = figure("peer", "peer", run(seconds=1, halfway=0.1))
    with self.assertRaisesRegex(bench_figures.ImpossibleFigureError, "buffers were not empty"):
      bench_figures.check([full])

  def test_a_busy_moment_is_no_full_buffer_where_there_is_none(self):
    bench_figures.check([figure("peer", "peer", run(seconds=1, halfway=0.1, buffered=1))])

  def test_missing_loaders_are_left_alone(self):
    bench_figures.check(
        [figure("copy", "limit", run()), figure("peer", "peer", missing="no torch")]
    )


if __name__ == "__main__":
  absltest.main()
