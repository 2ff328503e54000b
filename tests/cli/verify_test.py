"""Tests of `maxtext-olmo verify`."""

import os
import pathlib
import shutil

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from tests import corpora
from tests.cli import runner


class VerifyTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)
    self.index, _ = corpora.write_corpus(self.dir)
    self.work = f"{self.index}.work"
    self.data = self.dir / "data"
    for path in self.data.iterdir():
      corpora.end_documents(path)

  def test_a_good_corpus_exits_with_0(self):
    code, out, err = runner.run(
        "verify", self.index, "--vocab-size", 100, "--eos-id", 0, "--workers", 2
    )
    self.assertEqual((code, err), (0, ""))
    self.assertEqual(
        out,
        f"4 files below {self.data}, 1,004 tokens\n"
        "checked: sizes, data offsets, dtype (from samples), ids (vocab_size 100), EOS (id 0)\n"
        "documents: 13 documents, median about 100 tokens, longest 100; 0 of 4 files do not end"
        " with the EOS, 0.0% of the tokens come after the last EOS\n"
        "not checked: checksums: the index has none\n"
        "ok: 0 errors, 0 warnings\n",
    )

  def test_a_bad_corpus_exits_with_1_and_a_table(self):
    os.unlink(self.data / "part-000.npy")
    code, out, err = runner.run("verify", self.index, "--vocab-size", 100)
    self.assertEqual((code, err), (1, ""))
    self.assertRegex(out, r"│ error │ .*part-000\.npy │ No such file or directory +│")
    self.assertEndsWith(out, "NOT OK: 1 error, 0 warnings\n")

  def test_warnings_exit_with_0(self):
    np.full(7, 5, np.uint16).tofile(self.data / "part-002.npy")
    code, out, _ = runner.run("verify", self.index, "--eos-id", 0)
    self.assertEqual(code, 0)
    self.assertIn("│ warning │", out)
    self.assertEndsWith(out, "ok: 0 errors, 1 warning\n")

  def test_an_id_that_is_probably_not_the_eos_is_a_warning(self):
    code, out, _ = runner.run("verify", self.index, "--eos-id", 10)
    self.assertEqual(code, 0)
    self.assertRegex(out, r"│ warning │ \(all files\) +│ id 10 may not be the EOS, because most")

  def test_a_finding_about_all_files(self):
    code, out, _ = runner.run("verify", self.index, "--eos-id", 500)
    self.assertEqual(code, 1)
    self.assertRegex(out, r"│ error │ \(all files\) │ no file contains the EOS id 500: check")

  @parameterized.parameters(True, False)
  def test_moved_files(self, remap):
    shutil.move(self.data, self.dir / "moved")
    self.assertEqual(runner.run("verify", self.index)[0], 1)
    where = (
        ("--path-remap", self.data, self.dir / "moved") if remap else ("--base", self.dir / "moved")
    )
    code, out, _ = runner.run("verify", self.index, *where)
    self.assertEqual(code, 0)
    self.assertStartsWith(out, f"4 files below {self.dir / 'moved'}, ")

  def test_an_index_that_cannot_be_read_exits_with_2(self):
    code, _, err = runner.run("verify", "/no/index.json")
    self.assertEqual(code, 2)
    self.assertStartsWith(
        err, "error: Cannot read the index /no/index.json: No such file or directory."
    )

  def test_after_an_error_only_changed_files_are_read_again(self):
    path = self.data / "part-000.npy"
    content = path.read_bytes()
    path.unlink()
    args = ("verify", self.index, "--vocab-size", 100)
    code, out, _ = runner.run(*args)
    self.assertEqual(code, 1)
    self.assertIn(f"results: kept in {self.index}.work, so", out)
    kept = {path.name: path.stat().st_mtime_ns for path in pathlib.Path(self.work).glob("*/*")}
    self.assertLen(kept, 4)
    code, out, _ = runner.run(*args)
    self.assertEqual(code, 1)
    self.assertIn(f"to read these too, remove {self.index}.work", out)
    path.write_bytes(content)
    code, out, _ = runner.run(*args)
    self.assertEqual(code, 0)
    self.assertIn("reused: the results of 3 pieces", out)
    self.assertIn("to read these too, run the command again", out)
    self.assertFalse(os.path.exists(self.work))
    self.assertNotIn("reused", runner.run(*args)[1])

  def test_parts_are_merged_into_the_same_report(self):
    args = ("verify", self.index, "--vocab-size", 100, "--eos-id", 0)
    code, expected, _ = runner.run(*args)
    self.assertEqual(code, 0)
    code, _, err = runner.run(*args, "--merge")
    self.assertEqual(code, 2)
    self.assertRegex(err, "4 of 4 pieces have no result yet in .*index.json.work/verify-")
    for part, lines in (
        (0, "part 0 of 2: 2 pieces of 2 done, 0 of them before this run\n"),
        (1, "part 1 of 2: 2 pieces of 2 done, 0 of them before this run\n"),
        (1, "part 1 of 2: 2 pieces of 2 done, 2 of them before this run\n"),
    ):
      code, out, _ = runner.run(*args, "--part", part, "--of", 2)
      self.assertEqual(code, 0)
      self.assertStartsWith(out, lines)
    code, out, _ = runner.run(*args, "--merge")
    self.assertEqual((code, out), (0, expected))
    self.assertFalse(os.path.exists(self.work))

  @parameterized.parameters(
      (("--part", 0), "Use --part and --of together"),
      (("--part", 2, "--of", 2), "--part must be at least 0 and below --of"),
      (("--processes", "--dask", "local"), "Choose only one of"),
      (("--workers", 0), "workers must be at least 1, got 0"),
  )
  def test_impossible_options_exit_with_2(self, options, message):
    code, _, err = runner.run("verify", self.index, *options)
    self.assertEqual(code, 2)
    self.assertIn(message, err)

  def test_impossible_numbers_exit_with_2(self):
    code, _, err = runner.run("verify", self.index, "--vocab-size", 0)
    self.assertEqual((code, err), (2, "error: vocab_size must be 1 or more, got 0.\n"))


if __name__ == "__main__":
  absltest.main()
