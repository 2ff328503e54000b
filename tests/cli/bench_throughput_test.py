"""Tests of the comparison, with real processes on a small corpus."""

import dataclasses
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest

from maxtext_olmo import errors
from maxtext_olmo.cli import bench_corpus
from maxtext_olmo.cli import bench_figures
from maxtext_olmo.cli import bench_plan
from maxtext_olmo.cli import bench_throughput

_EFFORT = dataclasses.replace(
    bench_throughput.QUICK, megabytes=60, rounds=2, seconds=0.05, try_settings=True
)
_GRAIN = dataclasses.replace(
    next(c for c in bench_plan.CANDIDATES if c.loader == "grain"),
    settings=(("in process", {"threads": 0}), ("no such setting", {"threads": -7})),
)
_MISSING = dataclasses.replace(bench_plan.MAXTEXT, name="missing", kind="missing")


class BenchThroughputTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    directory = cls.enterClassContext(tempfile.TemporaryDirectory())
    said = []
    cls.corpus = bench_throughput.prepare(pathlib.Path(directory), _EFFORT, said.append)
    chosen = [bench_plan.LIMIT, bench_plan.INLINE, bench_plan.PREFETCH, bench_plan.DEVICE]
    with bench_throughput.Comparison(cls.corpus, _EFFORT, said.append) as comparison:
      # A busy machine may well make figures that contradict each other; that they are refused is tested elsewhere.
      check, bench_figures.check = bench_figures.check, lambda figures: None
      try:
        cls.figures = comparison.measure(
            [*chosen, bench_plan.FORMED, _GRAIN, _MISSING], batch=8, length=2048, rounds=2
        )
      finally:
        bench_figures.check = check
      cls.allocated = comparison.allocated

  def find(self, name, **fields):
    found = [f for f in self.figures if f.name == name]
    return [f for f in found if all(getattr(f, k) == v for k, v in fields.items())]

  def test_every_variant_has_a_figure_from_each_round(self):
    for figure in self.figures:
      if figure.name != "missing":
        self.assertLen(figure.runs, 2, f"{figure.name}: {figure.missing}")
        self.assertGreater(figure.cpu_ns_per_token, 0)
    self.assertLen(self.find(bench_plan.DEVICE.name), 4)

  def test_it_says_what_each_delivers(self):
    self.assertEqual(
        self.find(bench_plan.INLINE.name)[0].delivers, "tokens: uint32 B×L; flags: uint8 B"
    )
    self.assertStartsWith(self.find(bench_plan.DEVICE.name)[0].delivers, "inputs, targets")

  def test_bytes_to_devices_are_those_of_tokens_alone(self):
    (ours,) = self.find(bench_plan.DEVICE.name, filter=True, documents=False)
    formed = self.find(bench_plan.FORMED.name)[0]
    self.assertBetween(ours.device_bytes_per_token, 4, 4.01)
    self.assertEqual(formed.device_bytes_per_token, 24)

  def test_the_steady_state_makes_no_buffer_and_no_large_allocation(self):
    for figure in self.find(bench_plan.INLINE.name):
      # Not exactly none: where the machine is so busy that reads seem slow, a batch or two are read ahead.
      self.assertLess(figure.per_batch("buffers_made"), 0.1)
    self.assertBetween(self.allocated, 1, 1 << 20)

  def test_settings_that_fail_lose_to_those_that_work(self):
    self.assertEqual(self.find(_GRAIN.name)[0].setting, "in process")

  def test_a_loader_that_is_not_installed_says_so(self):
    for figure in self.find("missing"):
      self.assertIn(".venv-missing", figure.missing)
      self.assertIn("make bench-peers", figure.missing)

  def test_rows_that_are_not_in_the_corpus_are_refused(self):
    with bench_throughput.Comparison(self.corpus, _EFFORT, lambda line: None) as comparison:
      comparison._beginnings = {2048: set()}
      with self.assertRaisesRegex(bench_figures.ImpossibleFigureError, "were expected"):
        comparison.measure([bench_plan.LIMIT], 8, 2048, 1)

  def test_a_round_that_lost_pages_is_measured_once_more_before_it_is_refused(self):
    gone = errors.CorpusError("Pages are gone.")
    with bench_throughput.Comparison(self.corpus, _EFFORT, lambda line: None) as comparison:
      # Asked for after each round.
      answers = [gone, None, None]
      with mock.patch.object(bench_corpus, "check_resident", side_effect=answers):
        (figure,) = comparison.measure([bench_plan.LIMIT], 8, 2048, 2)
      self.assertLen(figure.runs, 2)
      with (
          mock.patch.object(bench_corpus, "check_resident", side_effect=[gone] * 3),
          self.assertRaisesRegex(errors.CorpusError, "Pages are gone"),
      ):
        comparison.measure([bench_plan.LIMIT], 8, 2048, 1)

  def test_a_size_with_an_impossible_figure_is_measured_once_more_before_it_is_refused(self):
    impossible = bench_figures.ImpossibleFigureError("Something is wrong.")
    with bench_throughput.Comparison(self.corpus, _EFFORT, lambda line: None) as comparison:
      with mock.patch.object(bench_figures, "check", side_effect=[impossible, None]):
        (figure,) = comparison.measure([bench_plan.LIMIT], 8, 2048, 3)
      self.assertLen(figure.runs, 3)
      with (
          mock.patch.object(bench_figures, "check", side_effect=impossible),
          self.assertRaisesRegex(bench_figures.ImpossibleFigureError, "Something is wrong"),
      ):
        comparison.measure([bench_plan.LIMIT], 8, 2048, 1)


if __name__ == "__main__":
  absltest.main()
