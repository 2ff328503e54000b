"""Tests of the demo's parts; `make demo` runs the whole."""

import argparse
import json
import pathlib
import subprocess
import sys

from absl.testing import absltest

from maxtext_olmo import errors
from maxtext_olmo.cli import demo
from tests import distributed

STARTS_PROCESSES = True


class DemoTest(absltest.TestCase):

  def test_pythons_own_documentation_is_a_corpus(self):
    found = {kind: list(texts) for kind, texts in demo.docstrings(limit_files=40).items()}
    self.assertEqual(set(found), {"modules", "classes", "functions"})
    self.assertGreater(sum(len(text) for texts in found.values() for text in texts), 50_000)

  def test_it_does_not_touch_a_directory_that_is_not_its_own(self):
    directory = pathlib.Path(self.create_tempdir().full_path)
    (directory / "thesis.txt").write_text("years of work")
    with self.assertRaisesRegex(errors.ConfigError, "was not made by a demo"):
      demo.run(argparse.Namespace(directory=str(directory), steps=48))
    self.assertEqual((directory / "thesis.txt").read_text(), "years of work")

  def test_too_few_steps_are_refused(self):
    with self.assertRaisesRegex(errors.ConfigError, "--steps=5 leaves no room"):
      demo.run(argparse.Namespace(directory="unused", steps=5))

  def test_a_ledger_merges_processes_and_ignores_an_incomplete_line(self):
    directory = pathlib.Path(self.create_tempdir().full_path)
    (directory / "1.jsonl").write_text(
        json.dumps({"step": 0, "rows": {"0": "a"}}) + "\n" + '{"step": 1, "ro'
    )
    (directory / "2.jsonl").write_text(json.dumps({"step": 0, "rows": {"1": "b"}}) + "\n")
    self.assertEqual(demo.read_ledger(directory), {0: {0: "a", 1: "b"}})

  def test_the_trainer_records_every_row_of_every_batch(self):
    directory = pathlib.Path(self.create_tempdir().full_path)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "maxtext_olmo.cli.demo",
            "--config.dataset_type=synthetic",
            "--config.vocab_size=64",
            "--config.max_target_length=16",
            "--config.steps=3",
            "--config.warmup_steps=1",
        ],
        env=distributed.child_environment({demo.LEDGER_VARIABLE: str(directory)}),
        capture_output=True,
        text=True,
        check=False,
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    ledger = demo.read_ledger(directory)
    self.assertEqual(sorted(ledger), [0, 1, 2])
    for rows in ledger.values():
      self.assertEqual(sorted(rows), list(range(8)))
    self.assertLen({digest for rows in ledger.values() for digest in rows.values()}, 24)

  def test_a_step_after_the_checkpoint_counts_from_the_resumed_run(self):
    expected = {0: "a", 1: "b"}
    count = demo._differing_rows
    self.assertEqual(count(expected, expected, None, kept=True), 0)
    self.assertEqual(count(expected, {0: "a"}, None, kept=True), 1)
    # Process 1 was killed before it noted its row; the resumed run trained the whole step.
    self.assertEqual(count(expected, {0: "a"}, expected, kept=False), 0)
    self.assertEqual(count(expected, {0: "x"}, expected, kept=False), 1)
    self.assertEqual(count(expected, {}, {0: "a", 1: "x"}, kept=False), 1)
    self.assertEqual(count(expected, {}, None, kept=False), 2)


if __name__ == "__main__":
  absltest.main()
