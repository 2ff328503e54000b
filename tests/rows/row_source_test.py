"""Tests of the protocol of row sources."""

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.rows import document_rows
from maxtext_olmo.rows import mixture
from maxtext_olmo.rows import parts as parts_lib
from maxtext_olmo.rows import row_source
from maxtext_olmo.rows import row_stream
from maxtext_olmo.rows import windows
from tests import corpora
from tests.rows import document_corpus


def _sources(directory):
  """One row source of each kind."""
  corpus = document_corpus.write(directory + "/documents")
  path, _ = corpora.write_corpus(directory + "/windows")
  planned = corpus.planned()
  member = row_stream.RowSequence(planned, name="t", seed=0)
  return {
      "windows": windows.WindowRows(index_lib.load_index(path)),
      "documents": document_rows.DocumentRows(corpus.documents, 16, "truncate"),
      "planned": planned,
      "mixture": mixture.MixedRows([member, member], [1, 2]),
  }


class RowSourceTest(parameterized.TestCase):

  def test_every_source_meets_the_protocol(self):
    for name, source in _sources(self.create_tempdir().full_path).items():
      with self.subTest(name):
        self.assertIsInstance(source, row_source.RowSource)

  def test_every_source_gives_the_rows_that_it_is_asked_for(self):
    for name, source in _sources(self.create_tempdir().full_path).items():
      with self.subTest(name):
        whole = source.parts(1, np.arange(12))
        rows = np.array([7, 2, 2, 11])
        parts, expected = source.parts(1, rows), whole.take(rows)
        for column in ("bounds", "source", "first", "count"):
          np.testing.assert_array_equal(getattr(parts, column), getattr(expected, column))
        self.assertLessEqual(whole.used.max(), source.row_length)

  def test_defaults_are_full_rows_of_one_segment_without_masks(self):
    source = row_source.RowSourceDefaults()
    self.assertEqual((source.pad_id, source.filter_sees_padding), (0, False))
    self.assertEqual(source.segment_rule.begins, "nowhere")
    self.assertIsNone(source.mask_paths)

  def test_what_lacks_something_does_not_meet_it(self):
    class Unfinished(row_source.RowSourceDefaults):
      row_length = 4

      def parts(self, epoch, rows):
        del epoch, rows
        return parts_lib.Parts.of_rows([])

    self.assertNotIsInstance(Unfinished(), row_source.RowSource)


if __name__ == "__main__":
  absltest.main()
