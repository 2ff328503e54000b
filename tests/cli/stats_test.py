"""`maxtext-olmo stats`."""

import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
from absl.testing import absltest

import maxtext_olmo
from tests import corpora
from tests.cli import runner
from tests.corpus.work import sample_work

STARTS_PROCESSES = True


class StatsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = self.create_tempdir().full_path
    self.path, _ = corpora.write_corpus(self.folder)
    index = maxtext_olmo.load_index(self.path)
    self.tokens = np.concatenate(
        [np.fromfile(index.resolve(i), np.uint16) for i in range(len(index.files))]
    )

  def run_json(self, *args):
    code, out, err = runner.run("stats", self.path, "--eos-id", "0", "--json", *args)
    self.assertEqual(code, 0, err)
    return json.loads(out)

  def test_a_table_has_each_label_and_all_of_them(self):
    code, out, err = runner.run("stats", self.path, "--eos-id", "0", "--top", "3")
    self.assertEqual(code, 0, err)
    for text in ("label-0", "label-1", "all", "documents", "bits per token", "1,004"):
      self.assertIn(text, out)
    commonest = int(np.bincount(self.tokens).argmax())
    self.assertRegex(out, rf"│ +{commonest} │")

  def test_without_an_eos_the_table_has_no_documents(self):
    code, out, err = runner.run("stats", self.path)
    self.assertEqual(code, 0, err)
    self.assertNotIn("documents", out)

  def test_json_has_the_count_of_each_id(self):
    found = self.run_json()
    self.assertEqual(found["all"]["ids"], np.bincount(self.tokens).tolist())
    self.assertEqual(found["all"]["documents"], int((self.tokens == 0).sum()))
    self.assertEqual(
        sum(line["documents"] for line in found["all"]["lengths"]), found["all"]["documents"]
    )
    self.assertEqual([label["label"] for label in found["labels"]], ["label-0", "label-1"])

  def test_parts_and_a_merge_print_what_one_command_prints(self):
    results = f"{self.folder}/results"
    for part in ("1", "0"):
      code, out, err = runner.run(
          *("stats", self.path, "--eos-id", "0", "--results", results),
          *("--part", part, "--of", "2"),
      )
      self.assertEqual(code, 0, err)
      self.assertIn(f"part {part} of 2: 2 pieces of 2 done", out)
    merged = self.run_json("--merge", "--results", results)
    self.assertEqual(merged, self.run_json())
    self.assertFalse(os.path.exists(f"{self.path}.work"))

  def test_two_commands_at_the_same_time_print_the_same(self):
    index = sample_work.write_corpus(self.folder, sizes=[50] * 1000)
    results = pathlib.Path(self.folder, "results")
    command = (
        *(sys.executable, "-m", "maxtext_olmo", "stats", f"{self.folder}/index.json"),
        *("--eos-id", "0", "--json", "--workers", "1", "--results", str(results)),
    )
    # The first command is stopped in the middle of the work, and the second removes its results.
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as first:
      try:
        sample_work.wait_for(lambda: list(results.glob("*/*.ok")), "the first result")
        first.send_signal(signal.SIGSTOP)
        second = subprocess.run(command, capture_output=True, check=False)
        self.assertEqual(second.returncode, 0, second.stderr)
        self.assertEmpty(list(results.iterdir()))
        first.send_signal(signal.SIGCONT)
        out, err = first.communicate()
      finally:
        first.kill()
    self.assertEqual(first.returncode, 0, err)
    self.assertEqual(out, second.stdout)
    self.assertEqual(json.loads(out)["all"]["tokens"], index.total_tokens)

  def test_a_merge_without_parts_says_what_is_missing(self):
    code, _, err = runner.run(
        "stats", self.path, "--eos-id", "0", "--merge", "--results", f"{self.folder}/none"
    )
    self.assertEqual(code, 2)
    self.assertIn("4 of 4 pieces have no result yet", err)

  def test_a_file_that_has_grown_fails_its_pieces_and_is_named(self):
    path = maxtext_olmo.load_index(self.path).resolve(1)
    size = os.path.getsize(path)
    os.truncate(path, 2 * size)
    message = f"{path}: expected {size} bytes, found {2 * size}"
    command = ("stats", self.path, "--eos-id", "0", "--results", f"{self.folder}/results")
    code, out, _ = runner.run(*command, "--part", "1", "--of", "2")
    self.assertEqual(code, 2)
    self.assertIn(f"failed: {message}", out)
    code, out, err = runner.run(*command)
    self.assertEqual((code, out), (2, ""))
    self.assertIn(message, err)

  def test_a_page_is_written(self):
    page = pathlib.Path(self.folder, "stats.html")
    code, _, err = runner.run("stats", self.path, "--eos-id", "0", "--html", str(page))
    if importlib.util.find_spec("bokeh") is None:
      self.assertEqual(code, 2)
      self.assertIn("needs Bokeh", err)
      self.assertFalse(page.exists())
      return
    self.assertEqual(code, 0, err)
    self.assertIn("<h2>Labels</h2>", page.read_text())

  def test_invalid_arguments_are_one_line_on_stderr(self):
    for args, message in (
        (("--top", "-1"), "--top must be 0 or more"),
        (("--part", "1"), "Use --part and --of together"),
        (("--eos-id", "65536"), "cannot occur in files of uint16"),
    ):
      code, _, err = runner.run("stats", self.path, *args)
      self.assertEqual(code, 2)
      self.assertIn(message, err)


if __name__ == "__main__":
  absltest.main()
