"""Tests of writing and reading the parts of a corpus."""

import os
import pathlib

import hypothesis
from absl.testing import absltest
from hypothesis import strategies as st

from maxtext_olmo.corpus import part_files
from maxtext_olmo.corpus.storage import open_storage
from maxtext_olmo.errors import CorpusError


def _documents(lengths):
  return [
      part_files.EncodedDocument(
          bytes([i]) * 2 * length, length, f"n{i}", "s,\n", i if i % 2 else None
      )
      for i, length in enumerate(lengths)
  ]


class PartFilesTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = self.create_tempdir().full_path

  def read(self, name):
    return list(part_files.read_part(open_storage(), os.path.join(self.dir, name), itemsize=2))

  @hypothesis.given(
      lengths=st.lists(st.integers(1, 9), max_size=12),
      tokens_per_file=st.integers(1, 20),
      first=st.integers(0, 3),
  )
  @hypothesis.settings(deadline=None)
  def test_documents_are_read_as_they_were_written(self, lengths, tokens_per_file, first):
    documents = _documents(lengths)
    parts = part_files.write_parts(iter(documents), self.dir, tokens_per_file, first)
    numbers = range(first, first + len(parts))
    self.assertEqual(parts, [f"part-{number:05d}.npy" for number in numbers])
    found = [self.read(part) for part in parts]
    self.assertEqual([document for part in found for document in part], documents)
    for number, part in enumerate(found):
      before = sum(document.length for document in part[:-1])
      self.assertLess(before, tokens_per_file)
      if number < len(found) - 1:
        self.assertGreaterEqual(before + part[-1].length, tokens_per_file)

  def test_a_part_takes_no_document_after_it_is_full(self):
    documents = iter(_documents([3, 4, 5]))
    part_files.write_part(documents, os.path.join(self.dir, "x", "a.npy"), 7)
    self.assertEqual(self.read("x/a.npy"), _documents([3, 4]))
    self.assertEqual([document.length for document in documents], [5])

  def test_a_part_without_documents(self):
    part_files.write_part([], os.path.join(self.dir, "a.npy"))
    self.assertEmpty(self.read("a.npy"))

  def test_a_part_whose_writing_fails_does_not_appear(self):
    def broken():
      yield from _documents([3])
      raise CorpusError("no more")

    with self.assertRaisesRegex(CorpusError, "no more"):
      part_files.write_part(broken(), os.path.join(self.dir, "a.npy"))
    self.assertEmpty(os.listdir(self.dir))

  def test_a_truncated_token_file_is_an_error(self):
    path = pathlib.Path(self.dir, "a.npy")
    part_files.write_part(_documents([3, 4]), str(path))
    path.write_bytes(path.read_bytes()[:-2])
    with self.assertRaisesRegex(CorpusError, "a.csv.gz"):
      self.read("a.npy")


if __name__ == "__main__":
  absltest.main()
