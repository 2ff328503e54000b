"""Tests of the demo's parts; `make demo` runs the whole."""

import argparse
import json
import pathlib

from absl.testing import absltest

from maxtext_olmo import errors
from maxtext_olmo.cli import demo
from maxtext_olmo.trainers.tiny import ledger as ledger_lib


class DemoTest(absltest.TestCase):

  def test_pythons_own_documentation_is_a_corpus(self):
    found = {kind: list(texts) for kind, texts in demo.docstrings(limit_files=40).items()}
    self.assertEqual(set(found), {"modules", "classes", "functions"})
    self.assertGreater(sum(len(text) for texts in found.values() for text in texts), 50_000)

  def test_it_leaves_a_directory_alone_that_is_not_its_own(self):
    directory = pathlib.Path(self.create_tempdir().full_path)
    (directory / "thesis.txt").write_text("years of work")
    with self.assertRaisesRegex(errors.ConfigError, "is not a demo's directory"):
      demo.run(argparse.Namespace(directory=str(directory), steps=48))
    self.assertEqual((directory / "thesis.txt").read_text(), "years of work")

  def test_too_few_steps_are_refused(self):
    with self.assertRaisesRegex(errors.ConfigError, "--steps=5 leaves no room"):
      demo.run(argparse.Namespace(directory="unused", steps=5))

  def test_a_ledger_joins_processes_and_passes_over_a_torn_line(self):
    directory = pathlib.Path(self.create_tempdir().full_path)
    (directory / "1.jsonl").write_text(
        json.dumps({"step": 0, "rows": {"0": "a"}}) + "\n" + '{"step": 1, "ro'
    )
    (directory / "2.jsonl").write_text(json.dumps({"step": 0, "rows": {"1": "b"}}) + "\n")
    self.assertEqual(ledger_lib.read_ledger(directory), {0: {0: "a", 1: "b"}})

  def test_a_step_counts_from_the_run_that_went_on(self):
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
