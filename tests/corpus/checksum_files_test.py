"""Tests of computing the checksums of a corpus."""

import dataclasses
import hashlib
import os
import pathlib

import numpy as np
import xxhash
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.corpus import checksum_files
from maxtext_olmo.corpus import checksums
from maxtext_olmo.corpus import index_builder
from maxtext_olmo.corpus import verify
from maxtext_olmo.corpus.work.options import WorkOptions
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError
from tests import corpora


class ChecksumFilesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)
    path, _ = corpora.write_corpus(self.dir)
    self.index = index_builder.load_index(path)
    self.files = [pathlib.Path(self.index.resolve(i)) for i in range(len(self.index.files))]

  @parameterized.parameters("sha256", "xxh3", "xxh3-pieces")
  def test_checksums_are_of_whole_files_with_header_and_incomplete_token(self, algorithm):
    np.save(self.files[0], np.arange(50, dtype=np.uint16))
    with open(self.files[1], "ab") as file:
      file.write(b"x")
    names = [(str(path), "l") for path in self.files]
    index = index_builder.build_index(names, 8, tokenizer="t", dtype="uint16")
    summed = checksum_files.add_checksums(index, algorithm)
    own = hashlib.sha256 if algorithm == "sha256" else xxhash.xxh3_128
    for path, entry in zip(self.files, summed.files):
      expected = own(path.read_bytes()).hexdigest()
      if algorithm == "xxh3-pieces":
        expected = checksums.join_pieces([expected])
      self.assertEqual(entry.checksum, f"{checksums.full_name(algorithm)}:{expected}")
    self.assertEqual(summed.fingerprint, index.fingerprint)
    self.assertTrue(verify.verify_corpus(summed).ok)
    self.files[2].write_bytes(os.urandom(self.files[2].stat().st_size))
    self.assertFalse(verify.verify_corpus(summed).ok)

  def test_parts_give_the_checksums_of_one_run_and_old_ones_are_ignored(self):
    expected = checksum_files.add_checksums(self.index, "xxh3")
    files = (dataclasses.replace(entry, checksum="sha256:0") for entry in self.index.files)
    old = dataclasses.replace(self.index, files=tuple(files))
    options = WorkOptions(workers=1, results=str(self.dir / "x.work"))
    for part in range(2):
      checksum_files.sum_pieces(old, "xxh3", dataclasses.replace(options, part=(part, 2)))
    merged = checksum_files.sum_pieces(old, "xxh3", dataclasses.replace(options, merge=True))
    self.assertEqual(merged.reused, len(self.files))
    self.assertEqual(checksum_files.with_checksums(old, "xxh3", merged), expected)

  def test_files_that_do_not_match_the_index_are_named(self):
    with open(self.files[1], "ab") as file:
      file.write(b"xy")
    with self.assertRaisesRegex(
        CorpusError,
        r"Checksums cannot be computed \(1 of 4 files\):\n.*part-001.*expected .* by",
    ):
      checksum_files.add_checksums(self.index, "xxh3")

  def test_an_unknown_checksum_is_an_error_before_anything_is_read(self):
    self.files[0].unlink()
    with self.assertRaisesRegex(ConfigError, "Unknown checksum 'md5': it must be one of xxh3"):
      checksum_files.add_checksums(self.index, "md5")


if __name__ == "__main__":
  absltest.main()
