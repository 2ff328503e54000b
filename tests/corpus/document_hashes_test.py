"""Hashes of documents."""

import os
import pathlib

import numpy as np
import xxhash
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from maxtext_olmo import errors
from maxtext_olmo.corpus import documents as documents_lib
from maxtext_olmo.corpus import index_builder
from maxtext_olmo.corpus import scan
from tests.rows import document_corpus


class DocumentHashesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = self.create_tempdir().full_path

  @settings(deadline=None, max_examples=30)
  @given(
      st.lists(st.lists(st.integers(0, 2), max_size=60), min_size=1, max_size=3),
      st.sampled_from([2, 6, 64]),
  )
  def test_documents_are_found_by_the_hash_of_their_tokens(self, files, piece):
    directory = pathlib.Path(self.create_tempdir().full_path)
    entries = []
    for i, tokens in enumerate(files):
      entries.append((str(directory / f"{i}.npy"), "a"))
      np.array(tokens, np.uint16).tofile(entries[-1][0])
    index = index_builder.build_index(entries, 4, tokenizer="t", dtype="uint16")
    was, scan.CHUNK_BYTES = scan.CHUNK_BYTES, piece
    try:
      documents = documents_lib.build_documents(index, directory / "d", 0, hashes=True)
    finally:
      scan.CHUNK_BYTES = was
    documents.verify()
    numbers = np.arange(documents.num_documents)
    expected = {}
    for number, file, start, length in zip(
        numbers.tolist(), *documents.locate(numbers), documents.lengths(numbers)
    ):
      tokens = np.array(files[file][start : start + length], np.uint16)
      expected.setdefault(xxhash.xxh3_128_hexdigest(tokens.tobytes()), []).append(number)
    found = documents.find_hashes([*expected, "0" * 32])
    self.assertEqual([one.tolist() for one in found], [*expected.values(), []])

  def test_tokens_between_documents_are_in_no_hash(self):
    corpus = document_corpus.write(self.directory)
    path = os.path.join(self.directory, "with_hashes")
    documents = documents_lib.build_documents(corpus.index, path, 0, hashes=True)
    self.assertEqual(documents.checksum, corpus.documents.checksum)
    for number in range(documents.num_documents):
      text = xxhash.xxh3_128_hexdigest(corpus.tokens(number).tobytes())
      self.assertIn(number, documents.find_hashes([text.upper()])[0].tolist())

  @parameterized.parameters("", "12", "g" * 32, "0" * 33)
  def test_a_malformed_hash_is_an_error(self, text):
    corpus = document_corpus.write(self.directory)
    path = os.path.join(self.directory, "with_hashes")
    documents = documents_lib.build_documents(corpus.index, path, 0, hashes=True)
    with self.assertRaisesRegex(ValueError, "32 hexadecimal digits, found"):
      documents.find_hashes([text])

  def test_a_document_index_without_hashes_says_how_to_make_them(self):
    corpus = document_corpus.write(self.directory)
    with self.assertRaisesRegex(ValueError, "index documents --hashes"):
      corpus.documents.find_hashes(["0" * 32])

  def test_a_truncated_file_is_an_error(self):
    corpus = document_corpus.write(self.directory)
    os.truncate(corpus.files.paths[1], 100)  # Its documents are known from its boundary file.
    with self.assertRaisesRegex(errors.CorpusError, r"part-001.npy: expected \d+ bytes, found 100"):
      documents_lib.build_documents(
          corpus.index, os.path.join(self.directory, "new"), 0, hashes=True
      )
    self.assertFalse(os.path.exists(os.path.join(self.directory, "new")))


if __name__ == "__main__":
  absltest.main()
