"""Tests of one document per row."""

import pickle

import numpy as np
from absl.testing import absltest

from maxtext_olmo import errors
from maxtext_olmo.rows import document_rows
from maxtext_olmo.rows import reader as reader_lib
from tests.rows import document_corpus


class DocumentRowsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.corpus = document_corpus.write(self.create_tempdir().full_path)
    self.count = self.corpus.documents.num_documents
    self.lengths = self.corpus.documents.lengths(np.arange(self.count))
    self.longest = int(self.lengths.max())

  def _check(self, source, numbers):
    parts = source.parts(0, numbers)
    out = np.zeros((len(numbers), source.row_length), np.uint16)
    reader_lib.FileReader(self.corpus.files).read(parts, out, reader_lib.Checks(pad_id=77))
    for row, number in zip(out, numbers):
      expected = self.corpus.tokens(number)[: source.row_length]
      self.assertEqual(row[: len(expected)].tolist(), expected.tolist())
      self.assertTrue((row[len(expected) :] == 77).all())
    return parts

  def test_a_row_is_its_document_and_padding(self):
    source = document_rows.DocumentRows(self.corpus.documents, self.longest)
    numbers = np.random.default_rng(0).permutation(self.count)
    parts = self._check(source, numbers)
    np.testing.assert_array_equal(parts.used, self.lengths[numbers])

  def test_an_empty_document_is_a_padding_row(self):
    empty = np.flatnonzero(self.lengths == 0)
    self.assertLen(empty, 2)
    source = document_rows.DocumentRows(self.corpus.documents, self.longest)
    parts = self._check(source, np.array([empty[0], 3, empty[1]]))
    self.assertEqual(np.diff(parts.bounds).tolist(), [0, 1, 0])
    self.assertTrue((parts.count > 0).all())
    self.assertEqual(source.parts(0, empty).source.tolist(), [])

  def test_a_long_document_is_truncated_on_request(self):
    source = document_rows.DocumentRows(self.corpus.documents, 16, "truncate")
    parts = self._check(source, np.arange(self.count))
    np.testing.assert_array_equal(parts.used, np.minimum(self.lengths, 16))
    self.assertGreater(self.longest, 16)

  def test_a_long_document_is_otherwise_an_error_that_names_it(self):
    source = document_rows.DocumentRows(self.corpus.documents, self.longest - 1)
    worst = int(np.argmax(self.lengths))
    with self.assertRaisesRegex(
        errors.CorpusError,
        f"Document {worst} has {self.longest} tokens, but a row holds {self.longest - 1}.*truncate",
    ):
      source.parts(0, np.arange(self.count))
    source.parts(0, np.flatnonzero(self.lengths < self.longest))

  def test_every_epoch_has_all_documents(self):
    source = document_rows.DocumentRows(self.corpus.documents, 16, "truncate")
    self.assertEqual([source.num_rows(epoch) for epoch in (0, 7)], [self.count] * 2)
    self.assertEqual(source.fingerprint, self.corpus.index.fingerprint)

  def test_it_survives_pickling(self):
    source = document_rows.DocumentRows(self.corpus.documents, 16, "truncate")
    again = pickle.loads(pickle.dumps(source))
    self.assertEqual(again.parts(0, np.array([5])).used.tolist(), [min(16, self.lengths[5])])


if __name__ == "__main__":
  absltest.main()
