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

  def test_parts_give_the_checksums_of_one_run(self):
    expected = checksum_files.add_checksums(self.index, "xxh3")
    options = WorkOptions(workers=1, results=str(self.dir / "x.work"))
    for part in range(2):
      checksum_files.sum_pieces(self.index, "xxh3", dataclasses.replace(options, part=(part, 2)))
    merged = checksum_files.sum_pieces(self.index, "xxh3", dataclasses.replace(options, merge=True))
    self.assertEqual(merged.reused, len(self.files))
    self.assertEqual(checksum_files.with_checksums(self.index, "xxh3", merged), expected)

  def test_checksums_of_another_algorithm_are_replaced_only_on_request(self):
    old = checksum_files.add_checksums(self.index, "sha256")
    self.files[0].unlink()  # The error comes before anything is read.
    with self.assertRaisesRegex(ConfigError, "already has checksums: sha256.*use --replace"):
      checksum_files.add_checksums(old, "xxh3")
    corpora.write_corpus(self.dir)
    outcome = checksum_files.sum_pieces(old, "xxh3", WorkOptions(workers=1), replace=True)
    self.assertEqual(
        checksum_files.with_checksums(old, "xxh3", outcome),
        checksum_files.add_checksums(self.index, "xxh3"),
    )

  def test_checksums_that_files_no_longer_match_are_replaced_only_on_request(self):
    old = checksum_files.add_checksums(self.index, "xxh3")
    self.assertEqual(checksum_files.add_checksums(old, "xxh3"), old)
    self.files[2].write_bytes(os.urandom(self.files[2].stat().st_size))
    outcome = checksum_files.sum_pieces(old, "xxh3", WorkOptions(workers=1))
    with self.assertRaisesRegex(CorpusError, r"\n  replaced: part-002.*\nRestore .* --replace"):
      checksum_files.with_checksums(old, "xxh3", outcome)
    new = checksum_files.with_checksums(old, "xxh3", outcome, replace=True)
    self.assertTrue(verify.verify_corpus(new).ok)

  def test_an_index_keeps_the_sums_of_pieces_that_its_checksum_covers(self):
    summed = checksum_files.add_checksums(self.index, "xxh3-pieces-64")
    path = self.dir / "summed.json"
    summed.save(path)
    self.assertEqual(index_builder.load_index(path), summed)
    kept = [checksums.split_pieces(entry.piece_sums or "") for entry in summed.files]
    sizes = [file.stat().st_size for file in self.files]
    self.assertEqual(list(map(len, kept)), [-(-size // 64) if size > 64 else 0 for size in sizes])
    for entry, sums in zip(summed.files, kept):
      if sums:
        self.assertEqual(entry.checksum, f"xxh3-pieces-64:{checksums.join_pieces(sums)}")
    wrong = path.read_text().replace(kept[sizes.index(max(sizes))][1], "0" * 32)
    path.write_text(wrong)
    with self.assertRaisesRegex(CorpusError, "labels and checksums have the hash"):
      index_builder.load_index(path)

  def test_verify_names_the_pieces_that_changed(self):
    self.files[0].write_bytes(os.urandom(1000))
    names = [(str(self.files[0]), "l")]
    index = index_builder.build_index(
        names, 8, tokenizer="t", dtype="uint16", checksums="xxh3-pieces-128"
    )

    def finding(changed, index=index):
      data = bytearray(self.files[0].read_bytes())
      for place in changed:
        data[place] ^= 1
      self.files[0].write_bytes(data)
      return verify.verify_corpus(index).errors[0].message.partition("the content has changed")[2]

    self.assertEqual(finding([130, 999]), " in bytes 128 to 256, 896 to 1000")
    self.assertEqual(
        finding([256, 384, 512]), " in bytes 128 to 256, 256 to 384, 384 to 512, and 2 more pieces"
    )
    # An index without the sums of the pieces only shows that something changed.
    files = (dataclasses.replace(index.files[0], piece_sums=None),)
    self.assertEqual(finding([], dataclasses.replace(index, files=files)), "")
    # A file of one piece has no sums of pieces.
    whole = index_builder.build_index(
        names, 8, tokenizer="t", dtype="uint16", checksums="xxh3-pieces"
    )
    self.assertEqual(finding([5], whole), "")

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
