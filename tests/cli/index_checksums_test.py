"""Tests of `maxtext-olmo index checksums`."""

import os
import pathlib

from absl.testing import absltest

from maxtext_olmo.corpus import index_builder
from tests import corpora
from tests.cli import runner


class IndexChecksumsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)
    self.index, _ = corpora.write_corpus(self.dir)

  def sums(self, path):
    return [entry.checksum for entry in index_builder.load_index(path).files]

  def test_an_index_gets_checksums_that_verify_compares(self):
    before = index_builder.load_index(self.index)
    code, out, _ = runner.run("index", "checksums", self.index)
    self.assertEqual((code, out), (0, f"Wrote {self.index}, with checksums of 4 files.\n"))
    after = index_builder.load_index(self.index)
    self.assertEqual(after.fingerprint, before.fingerprint)
    self.assertFalse(os.path.exists(f"{self.index}.work"))
    code, out, _ = runner.run("verify", self.index)
    self.assertEqual(code, 0)
    self.assertIn("checksums of 4 files", out)

  def test_parts_and_a_merge_give_the_same_index(self):
    whole, merged = str(self.dir / "whole.json"), str(self.dir / "merged.json")
    runner.run("index", "checksums", self.index, "--output", whole, "--algorithm", "sha256")
    args = ("index", "checksums", self.index, "--output", merged, "--algorithm", "sha256")
    for part in range(2):
      code, out, _ = runner.run(*args, "--part", part, "--of", 2)
      self.assertEqual(code, 0)
      self.assertIn(f"part {part} of 2: 2 pieces of 2 done", out)
    self.assertEqual(runner.run(*args, "--merge")[0], 0)
    self.assertEqual(self.sums(merged), self.sums(whole))
    self.assertEqual(self.sums(self.index), [None] * 4)

  def test_checksums_of_another_algorithm_are_replaced_only_on_request(self):
    runner.run("index", "checksums", self.index, "--algorithm", "sha256")
    before = self.sums(self.index)
    code, _, err = runner.run("index", "checksums", self.index)
    self.assertEqual(code, 2)
    self.assertRegex(err, "^error: The index already has checksums: sha256.*--replace")
    self.assertEqual(self.sums(self.index), before)
    self.assertEqual(runner.run("index", "checksums", self.index, "--replace")[0], 0)
    for checksum in self.sums(self.index):
      self.assertStartsWith(checksum, "xxh3-pieces-")

  def test_a_missing_file_leaves_the_index_as_it_is(self):
    before = pathlib.Path(self.index).read_bytes()
    (self.dir / "data" / "part-001.npy").unlink()
    code, _, err = runner.run("index", "checksums", self.index)
    self.assertEqual(code, 2)
    self.assertRegex(err, r"Checksums cannot be computed \(1 of 4 pieces failed\):\n.*part-001.npy")
    self.assertEqual(pathlib.Path(self.index).read_bytes(), before)


if __name__ == "__main__":
  absltest.main()
