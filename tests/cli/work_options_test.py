"""Tests of the options of commands that work on a whole corpus."""

import argparse
import functools
import os
import pathlib

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import cli
from maxtext_olmo.corpus.work.options import WorkOptions
from maxtext_olmo.errors import ConfigError
from tests import corpora
from tests.cli import runner


def _parse(*words: str) -> argparse.Namespace:
  parser = argparse.ArgumentParser()
  cli.add_work_options(functools.partial(cli.add_option, parser))
  return parser.parse_args(words)


class WorkOptionsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.index = os.path.join(self.create_tempdir().full_path, "index.json")

  def test_the_default_is_threads_with_results_next_to_the_index(self):
    self.assertEqual(
        cli.work_options(_parse(), self.index), WorkOptions(results=f"{self.index}.work")
    )

  def test_every_option_arrives(self):
    words = ["--workers", "3", "--processes", "--results", "/r", "--part", "1", "--of", "4"]
    words.append("--retry-failed")
    self.assertEqual(
        cli.work_options(_parse(*words), self.index),
        WorkOptions(3, True, results="/r", part=(1, 4), retry_failed=True),
    )
    self.assertEqual(cli.work_options(_parse("--dask", "tcp://h:1"), self.index).dask, "tcp://h:1")
    self.assertEqual(cli.work_options(_parse("--ray", "auto"), self.index).ray, "auto")
    self.assertTrue(cli.work_options(_parse("--merge"), self.index).merge)

  def test_any_option_is_noticed(self):
    self.assertFalse(cli.has_work_options(_parse()))
    for words in (["--workers", "1"], ["--part", "0"], ["--merge"], ["--results", "/r"]):
      self.assertTrue(cli.has_work_options(_parse(*words)), words)

  def test_other_machines_need_results_that_they_can_reach(self):
    with self.assertRaisesRegex(ConfigError, "no place next to gs://b/index.json.*--results"):
      cli.work_options(_parse("--part", "0", "--of", "2"), "gs://b/index.json")
    options = cli.work_options(
        _parse("--part", "0", "--of", "2", "--results", "gs://b/results"), "gs://b/index.json"
    )
    self.assertEqual(options.results, "gs://b/results")

  @parameterized.parameters(
      ("stats INDEX --eos-id 0", 2),
      ("index documents INDEX --eos-id 0", 2),
      ("index checksums INDEX", 2),
      ("verify INDEX --eos-id 0", 1),  # A file that cannot be read is one of its findings.
  )
  def test_a_piece_that_fails_exits_with_2_with_a_part_or_without(self, command, without_part):
    folder = pathlib.Path(self.create_tempdir().full_path)
    index, _ = corpora.write_corpus(folder)
    (folder / "data" / "part-001.npy").unlink()
    words = command.replace("INDEX", str(index)).split()
    code, out, _ = runner.run(*words, "--part", 0, "--of", 1)
    self.assertEqual(code, 2)
    self.assertRegex(out, "failed: .*part-001.npy")
    code, out, err = runner.run(*words)
    self.assertEqual(code, without_part)
    self.assertIn("part-001.npy", out + err)

  @parameterized.parameters(
      "stats INDEX --eos-id 0",
      "index documents INDEX --eos-id 0",
      "index checksums INDEX",
      "verify INDEX --eos-id 0",
  )
  def test_files_that_have_moved_are_found_with_path_remap(self, command):
    folder = pathlib.Path(self.create_tempdir().full_path)
    index, _ = corpora.write_corpus(folder)
    (folder / "data").rename(folder / "moved")
    words = command.replace("INDEX", str(index)).split()
    code, _, err = runner.run(*words, "--path-remap", folder / "data", folder / "moved")
    self.assertEqual(code, 0, err)


if __name__ == "__main__":
  absltest.main()
