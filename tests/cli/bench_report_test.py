"""Tests of the tables, the goals and the picture."""

import json
import pathlib
from xml.etree import ElementTree

from absl.testing import absltest

from maxtext_olmo import errors
from maxtext_olmo.cli import bench_cold
from maxtext_olmo.cli import bench_figures
from maxtext_olmo.cli import bench_goals
from maxtext_olmo.cli import bench_growth
from maxtext_olmo.cli import bench_plan
from maxtext_olmo.cli import bench_report
from maxtext_olmo.cli import bench_start

_PARTS = {"imports": 2.0, "index": 0.1, "iterator": 0.3, "first_batch": 0.5}
_SVG = "{http://www.w3.org/2000/svg}"


def figure(candidate, milliseconds, *, filter=False, **more):
  """A batch of 64 × 8192 in so many milliseconds, with a range of ten per cent."""
  runs = []
  for factor in (0.9, 1.0, 1.1):
    seconds = factor * milliseconds / 1e3
    runs.append(
        {
            "batches": 1,
            "seconds": seconds,
            "cpu_seconds": seconds,
            "faults": 3,
            "peak_bytes": 10**8,
            **more,
        }
    )
  return bench_figures.Figure(
      candidate.name,
      candidate.group,
      delivers="tokens: uint32 B×L",
      batch=64,
      length=8192,
      filter=filter,
      device=candidate.device,
      bytes_per_token=4,
      runs=tuple(runs),
  )


def results(**changes):
  parts = {"order_seconds": 1e-5, "read_seconds": 3e-4, "check_seconds": 1e-4}
  found = {
      "machine": "a machine <of> tests",
      "when": "2026-01-01",
      "load_before": 0.5,
      "megabytes": 1000,
      "compare": [
          figure(bench_plan.LIMIT, 0.25),
          figure(bench_plan.INLINE, 0.4, filter=True),
          figure(bench_plan.INLINE, 0.35),
          figure(bench_plan.ALONE, 0.5, filter=True, **parts),
          figure(bench_plan.ALONE, 0.45, **{**parts, "check_seconds": 4e-5}),
          figure(bench_plan.PREFETCH, 0.45, filter=True),
          figure(
              bench_plan.DEVICE,
              1,
              filter=True,
              bytes_to_device=2 * 64 * 8192 * 4,
              reads=128,
              read_seconds=1.4e-3,
              transfer_seconds=6e-4,
          ),
          figure(bench_plan.FORMED, 6, filter=True, bytes_to_device=64 * 8192 * 24),
          figure(bench_plan.MAXTEXT, 80, filter=True),
          figure(bench_plan.MAXTEXT, 40),
          bench_figures.Figure(
              bench_plan.OLMO_CORE.name, "peer", filter=True, missing="no | torch"
          ),
      ],
      "allocated": 5000,
      "sizes": [],
      "startup": [
          bench_start.Start("this library", n, 3.0, 0.8, 400_000_000, parts=_PARTS)
          for n in bench_start.INSTANCES
      ]
      + [bench_start.Start("MaxText olmo_grain", 1_000_000, missing="stopped after 30 s")],
      "growth": [
          bench_growth.Growth("files", (10, 12000), (100.0, 120.0), ((90, 110), (110, 130)))
      ],
      "cold": [bench_cold.Cold("10 ms per read", (6e8,), (3e6,), "a note")],
      "trainer": {"wait_share": 0.004, "step_seconds": 0.01},
  }
  return {**found, **changes}


class BenchReportTest(absltest.TestCase):

  def verdicts(self, found):
    return {goal.what: goal.reached for goal in bench_goals.judge(found)}

  def test_goals_are_reached_or_not_by_the_medians(self):
    verdicts = self.verdicts(results())
    self.assertTrue(verdicts["filter on, inline, against the copy limit"])  # 0.25 / 0.4 ≥ 0.6
    self.assertFalse(verdicts["filter off, inline, against the copy limit"])  # 0.25 / 0.35 < 0.8
    self.assertTrue(verdicts["filter on, inline, against MaxText's loader"])
    self.assertIsNone(verdicts["filter on, inline, against OLMo-core's loader"])
    self.assertTrue(verdicts["on devices, against MaxText's way of forming arrays"])
    self.assertTrue(verdicts["bytes per token from host to devices"])
    self.assertTrue(verdicts["share of time that the tiny trainer waits"])

  def test_the_table_says_what_is_reached_and_where_the_time_goes_where_something_is_not(self):
    text = bench_report.to_markdown(results())
    self.assertIn("| 0.625 × (by processor time 0.625 ×, by one thread 0.5 ×) | reached |", text)
    self.assertIn("**not reached**", text)
    self.assertIn("| reading beyond the copy, and the vocabulary check | 90 |", text)
    self.assertIn("| repetition filter | 60 |", text)
    # Two batches were made while one was taken.
    self.assertIn("| a thread reads and looks at tokens | 700 |", text)
    self.assertIn("| another sends them and starts the targets | 300 |", text)
    self.assertIn("not measured: no \\| torch", text)
    self.assertIn("| MaxText olmo_grain | stopped after 30 s | – | – |", text)
    self.assertIn("| create_data_iterator | 0.30 s | 0.30 s | 0.30 s |", text)
    self.assertIn("600 MB/s | 3.0 MB/s | 200 ×", text)

  def test_a_goal_that_a_plain_copy_would_miss_says_so(self):
    found = results()
    found["compare"].append(figure(bench_plan.OLMO_CORE, 0.5))
    (goal,) = [goal for goal in bench_goals.judge(found) if "best peer" in goal.what]
    self.assertFalse(goal.reached)
    self.assertIn("against the best peer as it comes (OLMo-core)", goal.what)
    self.assertEndsWith(goal.text, "; a plain copy is 2 × it")

  def test_parts_that_were_not_measured_are_left_out(self):
    kept = {
        k: v
        for k, v in results().items()
        if k in ("machine", "when", "load_before", "megabytes", "cold")
    }
    text = bench_report.to_markdown(kept)
    self.assertIn("Slow sources", text)
    self.assertNotIn("Goals", text)

  def test_the_json_holds_every_run_and_verdict(self):
    values = json.loads(bench_report.to_json(results()))
    self.assertLen(values["compare"], 11)
    self.assertLen(values["compare"][0]["runs"], 3)
    self.assertEqual(values["goals"][0]["reached"], True)

  def test_the_picture_is_well_formed_and_has_a_bar_for_each_figure(self):
    root = ElementTree.fromstring(bench_report.to_svg(results()))
    texts = [node.text for node in root.iter(f"{_SVG}text")]
    self.assertIn("batch 64 × 8192; a machine <of> tests", texts)
    self.assertEqual(texts.count(bench_plan.INLINE.name), 2)
    self.assertEqual(texts.count(bench_plan.LIMIT.name), 3)
    width = float(root.get("viewBox").split()[2])
    for bar in root.iter(f"{_SVG}rect"):
      self.assertLessEqual(float(bar.get("x", 0)) + float(bar.get("width")), width)

  def test_longer_bars_are_faster(self):
    root = ElementTree.fromstring(bench_report.to_svg(results()))
    bars = [
        float(bar.get("width")) for bar in root.iter(f"{_SVG}rect") if bar.get("height") == "15"
    ]
    first = bars[:4]  # The limit, then this library's two and MaxText's, fastest first.
    self.assertEqual(first, sorted(first, reverse=True))

  def test_the_guide_gets_the_tables_between_its_marks(self):
    guides = pathlib.Path(self.create_tempdir().full_path)
    page = guides / "performance.md"
    page.write_text(f"before\n{bench_report._BEGIN}\nold\n{bench_report._END}\nafter\n")
    bench_report.write_docs(results(), guides)
    text = page.read_text()
    self.assertStartsWith(text, "before\n")
    self.assertEndsWith(text, "\nafter\n")
    self.assertIn("### Goals", text)
    self.assertNotIn("old", text)
    self.assertTrue((guides / "performance.svg").exists())
    page.write_text("no marks")
    with self.assertRaisesRegex(errors.ConfigError, "does not have the lines"):
      bench_report.write_docs(results(), guides)

  def test_the_real_guide_has_its_marks(self):
    page = pathlib.Path(__file__).resolve().parents[2] / "docs" / "guides" / "performance.md"
    self.assertIn(bench_report._BEGIN, page.read_text())
    self.assertIn(bench_report._END, page.read_text())


if __name__ == "__main__":
  absltest.main()
