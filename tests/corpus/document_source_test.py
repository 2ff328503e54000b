"""Documents as a Grain data source."""

import os
import pickle

import grain
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import maxtext_olmo
from maxtext_olmo import errors
from maxtext_olmo.corpus import document_source
from maxtext_olmo.corpus import documents as documents_lib
from maxtext_olmo.corpus import index_builder as index_lib
from tests import corpora


class OlmoDocumentSourceTest(parameterized.TestCase):

  def make(self, dtype="uint16", **kwargs):
    directory = self.create_tempdir().full_path
    path, _ = corpora.write_corpus(directory, dtype=dtype)
    self.index = index_lib.load_index(path)
    documents = documents_lib.build_documents(self.index, path + ".documents", 0)
    self.tokens = [np.fromfile(self.index.resolve(i), dtype) for i in range(len(self.index.files))]
    return document_source.OlmoDocumentSource(self.index, documents, **kwargs)

  @parameterized.parameters("uint8", "uint16", "uint32", "uint64")
  def test_the_documents_are_the_tokens_of_the_files_in_order(self, dtype):
    source = self.make(dtype)
    found = [source[i]["inputs"] for i in range(len(source))]
    np.testing.assert_array_equal(np.concatenate(found), np.concatenate(self.tokens))
    for tokens in found:
      self.assertEqual(tokens.dtype, np.int32)
      self.assertNotIn(0, tokens[:-1])
    self.assertEqual([len(t) for t in found], source.lengths(np.arange(len(source))).tolist())

  def test_parts_of_documents_go_where_they_should(self):
    source = self.make("uint32")
    row = np.zeros(10, np.int32)
    whole = [source[i]["inputs"] for i in (3, 1)]
    starts = np.array([1, 0])
    lengths = np.array([len(whole[0]) - 1, min(2, len(whole[1]))])
    row = np.zeros(lengths.sum(), np.int32)
    read = source.read_parts(np.array([3, 1]), starts, lengths, np.split(row, [lengths[0]]))
    np.testing.assert_array_equal(row, np.concatenate([whole[0][1:], whole[1][: lengths[1]]]))
    self.assertEqual(read, 4 * len(row))

  def test_it_is_a_grain_source_and_survives_pickling(self):
    source = self.make()
    dataset = grain.MapDataset.source(source).seed(1).shuffle()
    self.assertLen(dataset, len(source))
    again = pickle.loads(pickle.dumps(source))
    np.testing.assert_array_equal(again[5]["inputs"], source[5]["inputs"])
    self.assertEqual(repr(again), repr(source))
    self.assertIs(maxtext_olmo.OlmoDocumentSource, document_source.OlmoDocumentSource)

  def test_a_document_that_is_not_there_is_an_error(self):
    source = self.make()
    for number in (-1, len(source)):
      with self.assertRaisesRegex(errors.OrderError, f"Document {number} does not exist"):
        source[number]

  @parameterized.parameters("uint16", "uint32")
  def test_a_token_outside_the_vocabulary_names_file_and_byte(self, dtype):
    source = self.make(dtype, vocab_size=50)
    bad = next(i for i in range(len(self.tokens[0])) if self.tokens[0][i] >= 50)
    with self.assertRaises(errors.CorpusError) as caught:
      for i in range(len(source)):
        source[i]
    self.assertIn(f"byte {bad * np.dtype(dtype).itemsize}", str(caught.exception))
    self.assertIn(os.path.basename(self.index.resolve(0)), str(caught.exception))

  def test_labels_know_their_documents(self):
    source = self.make()
    labels = source.labels()
    self.assertEqual(set(labels), {"label-0", "label-1"})
    numbers = sorted(
        i for ranges in labels.values() for start, end in ranges for i in range(start, end)
    )
    self.assertEqual(numbers, list(range(len(source))))


if __name__ == "__main__":
  absltest.main()
