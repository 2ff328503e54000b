"""Tests of the comparison of two runs."""

import dataclasses
import pathlib
import tempfile
import unittest

import numpy as np
from absl.testing import absltest

from maxtext_olmo.inspection import comparison
from maxtext_olmo.inspection import run as run_lib
from tests.inspection import small_run
from tests.loader import cases

_run: small_run.SmallRun


def setUpModule():
  global _run
  cases.compile_fast()
  directory = tempfile.TemporaryDirectory(prefix="comparison_test_")
  unittest.addModuleCleanup(directory.cleanup)
  _run = small_run.write(directory.name)


class CompareTest(absltest.TestCase):

  def run_at(self, step, **values):
    """Returns a run of other values that has done some steps."""
    run = run_lib.Run("a", {**_run.config, "checkpoint_dir": "", **values})
    with run_lib.open_iterator(run) as iterator:
      iterator.go_to(step)
      return dataclasses.replace(run, state=iterator.get_state())

  def test_a_run_and_its_earlier_checkpoint_are_the_same_up_to_the_change(self):
    early, late = run_lib.find_run(f"{_run.checkpoints}/4"), run_lib.find_run(_run.checkpoints)
    found = comparison.compare(early, late)
    self.assertEqual(found.same_until, 5)
    self.assertEqual(found.differences, ("rows of the batch: 4 in the first, 6 in the second",))
    self.assertIn("They differ from step 5 on", found.lines()[0])

  def test_the_same_run_is_the_same(self):
    found = comparison.compare(*[run_lib.find_run(_run.checkpoints)] * 2)
    self.assertIsNone(found.same_until)
    self.assertIn("The same stream", found.lines()[0])

  def test_another_seed_differs_from_the_first_step_on(self):
    new = run_lib.Run("a", {**_run.config, "checkpoint_dir": ""})
    other = dataclasses.replace(new, config={**new.config, "data_shuffle_seed": 1})
    found = comparison.compare(new, other)
    self.assertEqual(found.same_until, 0)
    self.assertEqual(found.differences, ("seed: 0 in the first, 1 in the second",))
    self.assertIsNone(comparison.compare(new, new).same_until)

  def test_the_first_different_step_is_that_of_the_rows(self):
    new = run_lib.Run("a", {**_run.config, "checkpoint_dir": ""})
    stages = {"olmo_batch_schedule": ((0, 2), (7, 4))}
    other = dataclasses.replace(new, config={**new.config, **stages})
    with run_lib.open_iterator(new) as one, run_lib.open_iterator(other) as two:
      one.go_to(20)
      two.go_to(20)
      states = [dataclasses.replace(r, state=i.get_state()) for r, i in ((new, one), (other, two))]
      rows = [[i.row_numbers(step) for step in range(9)] for i in (one, two)]
    found = comparison.compare(*states)
    first = next(s for s in range(9) if not np.array_equal(rows[0][s], rows[1][s]))
    self.assertEqual((found.same_until, first), (7, 7))

  def test_runs_that_skip_or_mask_differ_from_the_first_such_step_on(self):
    for step in (20, 3):  # The skip is in the past, or planned.
      runs = {
          mode: self.run_at(step, olmo_skip=((6, 8),), olmo_skip_mode=mode)
          for mode in ("drop", "mask")
      }
      plain = self.run_at(step)
      for mode, words in (("drop", "skips"), ("mask", "takes no loss on")):
        found = comparison.compare(plain, runs[mode])
        self.assertEqual(found.same_until, 6)
        told = f"only in the second: {words} steps 6:8 (positions 12 to 15)"
        self.assertEqual(found.differences[0], told)
        self.assertIsNone(comparison.compare(runs[mode], runs[mode]).same_until)
      found = comparison.compare(runs["drop"], runs["mask"])
      self.assertEqual(found.same_until, 6)
      self.assertLen(found.differences, 3)
      self.assertEqual(found.differences[2], "position: 16 in the first, 12 in the second")

  def test_runs_with_other_stages_differ_from_the_first_such_step_on(self):
    def stage(share):
      mixture = {"web": share, "wiki": 1 - share}
      return ({"from_step": 9, "olmo_mixture": mixture, "olmo_mixture_unit": "tokens"},)

    for step in (20, 3):  # The stage has begun, or is planned.
      plain = self.run_at(step)
      one, other = (self.run_at(step, olmo_stages=stage(share)) for share in (0.25, 0.5))
      found = comparison.compare(plain, one)
      self.assertEqual(found.same_until, 9)
      (line,) = found.differences
      self.assertStartsWith(line, "only in the second: from step 9 (position 18) on: mixture")
      self.assertIn("web=0.25", line)
      found = comparison.compare(one, other)
      self.assertEqual(found.same_until, 9)
      self.assertLen(found.differences, 2)
      self.assertIn("web=0.5", found.differences[1])
      self.assertIsNone(comparison.compare(one, one).same_until)

  def test_other_mixtures_and_exclusions_are_named(self):
    mixed = [self.run_at(3, olmo_mixture={"web": 1.0, "wiki": share}) for share in (0.5, 1.0)]
    found = comparison.compare(*mixed)
    self.assertIn(
        "olmo_mixture: {'web': 1.0, 'wiki': 0.5} in the first, {'web': 1.0, 'wiki': 1.0} in the"
        " second",
        found.differences,
    )
    path = pathlib.Path(self.create_tempdir().full_path, "exclude.jsonl")
    path.write_text('{"label": "web"}\n')
    excluded = self.run_at(3, olmo_exclude=str(path))
    (line,) = comparison.compare(self.run_at(3), excluded).differences
    self.assertRegex(line, r"^exclusions \(olmo_exclude\): none in the first, [0-9a-f]+ in the")

  def test_a_planned_batch_size_is_a_difference_from_its_step_on(self):
    found = comparison.compare(
        self.run_at(3), self.run_at(3, olmo_batch_schedule=((0, 2), (70, 4)))
    )
    self.assertEqual(found.same_until, 70)
    self.assertEqual(found.differences, ("rows of the batch: 2 in the first, 4 in the second",))


if __name__ == "__main__":
  absltest.main()
