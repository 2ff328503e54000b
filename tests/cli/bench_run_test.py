"""Tests of `maxtext-olmo bench throughput` as people run it."""

import json
import pathlib

from absl.testing import absltest

from tests.cli import runner


class BenchRunTest(absltest.TestCase):

  def test_a_part_can_be_measured_alone_and_written_to_files(self):
    output = pathlib.Path(self.create_tempdir().full_path)
    corpus = output / "corpus"
    words = ("--only", "cold", "--only", "growth", "--quick", "--megabytes", "20")
    code, out, err = runner.run(
        "bench", "throughput", *words, "--directory", corpus, "--output", output
    )
    self.assertEqual(code, 0, err)
    self.assertIn("### Slow sources", out)
    self.assertIn("### What a batch costs as things grow", out)
    self.assertNotIn("### Goals", out)
    values = json.loads((output / "bench.json").read_text())
    self.assertEqual(
        [cold["what"] for cold in values["cold"]], ["10 ms per read", "dropped page cache"]
    )
    self.assertEqual((output / "bench.md").read_text(), out)
    self.assertFalse((output / "performance.svg").exists())
    self.assertTrue((corpus / "bench.json").exists())

  def test_a_corpus_too_small_to_measure_is_refused(self):
    code, _, err = runner.run("bench", "throughput", "--megabytes", "1")
    self.assertEqual(code, 2)
    self.assertIn("too small", err)

  def test_the_guide_is_not_overwritten_with_a_part(self):
    code, _, err = runner.run("bench", "throughput", "--only", "cold", "--write-docs")
    self.assertEqual(code, 2)
    self.assertIn("leave out --only", err)

  def test_unknown_parts_are_named_in_the_error(self):
    code, _, err = runner.run("bench", "throughput", "--only", "nonsense")
    self.assertEqual(code, 2)
    self.assertIn("compare", err)

  def test_help_names_what_is_measured(self):
    code, out, _ = runner.run("bench", "--help")
    self.assertEqual(code, 0)
    self.assertIn("throughput", out)
    self.assertIn("startup", out)


if __name__ == "__main__":
  absltest.main()
