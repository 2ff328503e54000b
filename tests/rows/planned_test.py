"""Tests of packed documents as rows."""

import collections
import pickle

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.rows import row_stream
from tests.rows import document_corpus


class PlannedRowsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.corpus = document_corpus.write(self.create_tempdir().full_path)

  def _places(self, parts):
    """How often each token (file, place) is in some rows."""
    found = collections.Counter()
    for source, first, count in zip(parts.source, parts.first, parts.count):
      found.update((int(source), place) for place in range(first, first + count))
    return found

  def _all_places(self):
    found = collections.Counter()
    number = np.arange(self.corpus.documents.num_documents)
    files, first = self.corpus.documents.locate(number)
    for source, start, length in zip(files, first, self.corpus.documents.lengths(number)):
      found.update((int(source), place) for place in range(start, start + length))
    return found

  @parameterized.parameters(8, 32, 500)
  def test_every_token_of_a_document_is_in_one_row_of_each_epoch(self, row_length):
    source = self.corpus.planned(row_length)
    for epoch in range(2):
      count = source.count_rows(epoch, 10**6)
      self.assertEqual(source.num_rows(epoch), count)
      parts = source.parts(epoch, np.arange(count))
      self.assertLessEqual(parts.used.max(), row_length)
      self.assertGreater(parts.used.min(), 0)
      self.assertTrue((parts.count > 0).all())
      self.assertEqual(self._places(parts), self._all_places())

  def test_any_rows_may_be_asked_for_in_any_order(self):
    source = self.corpus.planned()
    count = source.count_rows(0, 10**6)
    whole = source.parts(0, np.arange(count))
    numbers = np.random.default_rng(0).permutation(count)[:9]
    other = self.corpus.planned().parts(0, numbers)
    expected = whole.take(numbers)
    for name in ("bounds", "source", "first", "count"):
      np.testing.assert_array_equal(getattr(other, name), getattr(expected, name))

  def test_rows_are_counted_as_they_are_asked_for(self):
    source = self.corpus.planned()
    self.assertIsNone(source.num_rows(0))
    counted = source.count_rows(0, 0)
    self.assertGreater(counted, 0)
    self.assertIsNone(source.num_rows(0))
    self.assertGreater(source.count_rows(0, 10**6), counted)
    self.assertIsNotNone(source.num_rows(0))
    self.assertIsNone(source.num_rows(1))

  def test_counting_in_the_background_knows_the_end(self):
    source = self.corpus.planned()
    stream = row_stream.RowSequence(source, name="planned", seed=0, num_epochs=2)
    stream.look_ahead(0)
    while stream.num_positions is None:
      self.assertTrue(stream.has(0))
    self.assertEqual(stream.num_positions, self.corpus.planned().plan.count(2))
    stream.close()

  def test_no_rows_have_no_parts(self):
    self.assertEqual(self.corpus.planned().parts(0, np.zeros(0, np.int64)).num_rows, 0)

  def test_it_survives_pickling(self):
    source = self.corpus.planned()
    parts = source.parts(0, np.arange(5))
    again = pickle.loads(pickle.dumps(source)).parts(0, np.arange(5))
    np.testing.assert_array_equal(again.first, parts.first)


if __name__ == "__main__":
  absltest.main()
