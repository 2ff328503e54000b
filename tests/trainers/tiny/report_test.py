"""Tests of maxtext_olmo.trainers.tiny.report."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib

from absl import logging
from absl.testing import absltest

from maxtext_olmo import errors
from maxtext_olmo.trainers.tiny import report as report_lib

_METRICS = {"loss": 1.23456789, "grad_norm": 0.5, "learning_rate": 1e-3}


class ReportTest(absltest.TestCase):

  def steps(self, report: report_lib.Report, *steps: int, last: int = -1) -> None:
    for step in steps:
      report.step(step, _METRICS, tokens=100, last=step == last)

  def test_a_line_per_interval_and_one_for_the_last_step(self):
    report = report_lib.Report("", 0, 3, enabled=True)
    with self.assertLogs("absl", "INFO") as logs:
      self.steps(report, *range(8), last=7)
    self.assertLen(logs.output, 3)
    for line, step in zip(logs.output, (2, 5, 7)):
      self.assertRegex(line, rf"step     {step}  loss 1\.2346  grad 0\.50  lr 1\.0e-03 .* tokens/s")

  def test_a_line_says_where_in_the_data_its_step_was(self):
    report = report_lib.Report("", 0, 1, enabled=True)
    with self.assertLogs("absl", "INFO") as logs:
      place = {"position": 32, "stage": 2, "epoch": 1}
      report.step(4, {**_METRICS, **place}, tokens=1, last=False)
    self.assertEndsWith(logs.output[0], "position 32  stage 2  epoch 1")

  def test_an_evaluation_has_a_line_of_its_own(self):
    report = report_lib.Report("", 0, 100, enabled=True)
    with self.assertLogs("absl", "INFO") as logs:
      report.step(4, {**_METRICS, "eval_loss": 2.5}, tokens=1, last=False)
    self.assertLen(logs.output, 1)
    self.assertIn("step     4  eval loss 2.5000", logs.output[0])

  def test_only_the_first_process_reports(self):
    path = os.path.join(self.create_tempdir().full_path, "metrics.jsonl")
    report = report_lib.Report(path, 0, 1, enabled=False)
    with self.assertNoLogs("absl", "INFO"):
      self.steps(report, 0, last=0)
    report.close()
    self.assertFalse(os.path.exists(path))

  def test_the_file_keeps_full_precision_and_the_steps_before_a_resume(self):
    path = os.path.join(self.create_tempdir().full_path, "new", "metrics.jsonl")
    for first, steps in ((0, range(5)), (3, range(3, 6))):
      with contextlib.closing(report_lib.Report(path, first, 100, enabled=True)) as report:
        self.steps(report, *steps)
    with open(path, encoding="utf-8") as file:
      lines = [json.loads(line) for line in file]
    self.assertEqual([line["step"] for line in lines], [0, 1, 2, 3, 4, 5])
    self.assertEqual(lines[0]["loss"], 1.23456789)

  def test_a_file_that_is_something_else_is_refused_and_stays_as_it_is(self):
    directory = pathlib.Path(self.create_tempdir().full_path)
    (directory / "thesis.txt").write_bytes(b"\x93years of work")
    os.mkfifo(directory / "pipe")
    for path, text in (
        (directory / "thesis.txt", "holds something other than metrics"),
        (directory / "pipe", "is not a regular file"),
        (directory, "is not a regular file"),
        (directory / "thesis.txt" / "below", "Cannot write .*below: "),
        ("/proc/none/metrics.jsonl", "Cannot write /proc/none/metrics.jsonl: "),
        ("a\0b", "contains a NUL"),
    ):
      with self.assertRaisesRegex(errors.WriteError, text):
        report_lib.Report(str(path), 0, 1, enabled=True)
    self.assertEqual((directory / "thesis.txt").read_bytes(), b"\x93years of work")

  def test_a_line_that_a_killed_run_left_unfinished_is_dropped(self):
    path = pathlib.Path(self.create_tempdir().full_path, "metrics.jsonl")
    for left in ('{"st', '{"step": 0, "lo', '{"step": 0, "loss": 1.0}\n{"step"'):
      path.write_text(left)
      with contextlib.closing(report_lib.Report(str(path), 1, 100, enabled=True)) as report:
        self.steps(report, 1)
      self.assertEqual(json.loads(path.read_text().splitlines()[-1])["step"], 1)

  def test_a_write_that_fails_names_the_file_and_the_free_space(self):
    path = pathlib.Path(self.create_tempdir().full_path, "metrics.jsonl")
    report = report_lib.Report(str(path), 0, 100, enabled=True)
    full = os.open("/dev/full", os.O_WRONLY)
    with open(path) as file:
      (here,) = (
          int(number)
          for number in os.listdir("/proc/self/fd")
          if int(number) != file.fileno()
          and os.path.realpath(f"/proc/self/fd/{number}") == os.path.realpath(path)
      )
    os.dup2(full, here)  # From now on, the disk is full.
    os.close(full)
    with self.assertRaisesRegex(errors.WriteError, r"metrics\.jsonl.*No space.*bytes of free"):
      self.steps(report, 0)
    report.close()

  def test_time_in_a_pause_does_not_count(self):
    report = report_lib.Report("", 0, 1, enabled=True)
    before = report._since
    with report.paused():
      pass
    self.assertGreater(report._since, before)

  def test_other_packages_log_only_warnings(self):
    logger = logging.get_absl_logger()
    handlers, propagate, level = logger.handlers, logger.propagate, logging.get_verbosity()
    try:
      with contextlib.redirect_stderr(io.StringIO()) as stderr:
        report_lib.show_on_stderr(0)
        logging.info("from a test, which is not in the package")
        logging.warning("beware")
        self.steps(report_lib.Report("", 0, 1, enabled=True), 0)
      lines = stderr.getvalue().splitlines()
      self.assertLen(lines, 2)
      self.assertEqual(lines[0], "WARNING: beware")
      self.assertStartsWith(lines[1], "step     0  loss 1.2346")
    finally:
      logger.handlers, logger.propagate = handlers, propagate
      logging.set_verbosity(level)


if __name__ == "__main__":
  absltest.main()
