"""Tests of explanations of steps."""

import gzip
import json
import pathlib

import numpy as np
from absl.testing import absltest

from maxtext_olmo import errors
from maxtext_olmo.corpus import documents as documents_lib
from maxtext_olmo.order import schedule
from maxtext_olmo.rows import content as content_lib
from maxtext_olmo.rows import exclude
from maxtext_olmo.rows import explain
from maxtext_olmo.rows import reader
from maxtext_olmo.rows import row_sequence
from maxtext_olmo.rows import windows
from tests.rows import document_corpus


class ExplainTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = self.create_tempdir().full_path
    self.corpus = document_corpus.write(self.directory)
    self.path = documents_lib.default_path(f"{self.directory}/index.json")

  def explain(self, source, provenance=None, rows=None, **content):
    stream = row_sequence.RowSequence(source, name="t", seed=0)
    return explain.explain(
        source,
        reader.FileReader(self.corpus.files),
        stream,
        schedule.BatchSchedule.constant(4),
        content_lib.Content(**content),
        2,
        provenance,
        rows=rows,
    )

  def test_a_window_names_its_file_bytes_label_and_documents(self):
    provenance = explain.Provenance(self.corpus.index, self.path)
    explanation = self.explain(windows.WindowRows(self.corpus.index), provenance)
    self.assertEqual((explanation.step, explanation.position), (2, 8))
    self.assertEqual([row.number for row in explanation.rows], [8, 9, 10, 11])
    row = explanation.rows[1]
    (part,) = row.parts
    self.assertEqual((part.file, part.label), (self.corpus.files.paths[0], "label-0"))
    self.assertEqual((part.first, part.count, part.column), (72, 8, 0))
    self.assertEqual((part.first_byte, part.end_byte), (144, 160))
    np.testing.assert_array_equal(row.tokens, self.corpus.contents[0][72:80])
    rebuilt = [
        self.corpus.tokens(span.document)[span.first : span.last + 1] for span in part.documents
    ]
    np.testing.assert_array_equal(np.concatenate(rebuilt), row.tokens)

  def test_only_rows_of_the_step_can_be_chosen(self):
    source = windows.WindowRows(self.corpus.index)
    (row,) = self.explain(source, rows=[2]).rows
    self.assertEqual((row.row, row.number), (2, 10))
    for rows in ([-1], [4]):
      with self.assertRaisesRegex(errors.OrderError, "rows 0 to 3"):
        self.explain(source, rows=rows)

  def test_a_step_after_the_end_names_the_last_one(self):
    for source in (windows.WindowRows(self.corpus.index), self.corpus.planned()):
      stream = row_sequence.RowSequence(source, name="t", seed=0, num_epochs=1)
      arguments = (reader.FileReader(self.corpus.files), stream, schedule.BatchSchedule.constant(4))
      with self.assertRaisesRegex(errors.OrderError, "Step 500 is outside") as raised:
        explain.explain(source, *arguments, content_lib.Content(), 500)
      last = -(-stream.num_positions // 4) - 1
      self.assertEndsWith(str(raised.exception), f"ends with step {last}.")
      self.assertNotEmpty(explain.explain(source, *arguments, content_lib.Content(), last).rows)

  def test_excluded_tokens_are_counted_and_located(self):
    source = windows.WindowRows(self.corpus.index)
    lengths = [entry.n_tokens for entry in self.corpus.index.files]
    exclusions = exclude.Exclusions.of_ranges(lengths, [(0, 64, 72), (0, 75, 77)])
    rows = self.explain(source, exclusions=exclusions).rows
    self.assertEqual([row.excluded for row in rows], [8, 2, 0, 0])
    self.assertEqual(rows[0].loss_tokens, 0)
    self.assertEqual(np.flatnonzero(rows[1].excluded_columns).tolist(), [3, 4])
    self.assertTrue(all(row.kept for row in rows))
    self.assertEqual(rows[1].to_json()["excluded"], 2)
    self.assertEqual([row.excluded for row in self.explain(source).rows], [0] * 4)

  def test_a_whole_document_is_told_from_a_piece_of_one(self):
    provenance = explain.Provenance(self.corpus.index, self.path)
    for row in self.explain(self.corpus.planned(7), provenance).rows:
      for part in row.parts:
        (span,) = part.documents
        self.assertEqual(span.whole, part.count == span.length)
        self.assertEqual(span.column, part.column)

  def test_documents_have_the_names_of_their_boundary_file(self):
    boundaries = pathlib.Path(self.corpus.files.paths[1]).with_suffix(".csv.gz")
    boundaries.write_bytes(gzip.compress(b"0,4,a,s,1\n4,9,b,,\n9,150\n"))
    documents_lib.build_documents(self.corpus.index, self.path, 0)
    provenance = explain.Provenance(self.corpus.index, self.path)
    spans = provenance.spans(1, 0, 20, 0)
    named = [(span.name, span.source, span.line, span.length) for span in spans]
    self.assertEqual(named, [("a", "s", 1, 4), ("b", "", None, 5), ("", "", None, 141)])
    explanation = self.explain(windows.WindowRows(self.corpus.index), provenance).to_json()
    span = explanation["rows"][0]["parts"][0]["documents"][0]
    self.assertEqual((span["name"], span["source"], span["line"]), ("", "", None))

  def test_without_a_document_index_there_are_file_and_bytes(self):
    for provenance in (None, explain.Provenance(self.corpus.index, f"{self.directory}/none")):
      row = self.explain(windows.WindowRows(self.corpus.index), provenance).rows[0]
      self.assertEqual(row.parts[0].documents, ())
      self.assertEqual(row.parts[0].first_byte, 128)
    self.assertEqual(row.label, "label-0")

  def test_the_document_index_of_another_corpus_is_not_used(self):
    with self.assertLogs(level="WARNING") as logs:
      other = explain.Provenance(self.corpus.index, f"{self.directory}/index.json")
      self.assertIsNone(other.documents)
    self.assertIn("The document index cannot be used", logs.output[0])

  def test_a_step_with_an_id_outside_the_vocabulary_is_explained(self):
    explanation = self.explain(windows.WindowRows(self.corpus.index), vocab_size=2)
    self.assertLen(explanation.rows, 4)

  def test_it_becomes_json_without_tokens(self):
    explanation = self.explain(
        self.corpus.planned(), explain.Provenance(self.corpus.index, self.path)
    )
    values = json.loads(json.dumps(explanation.to_json()))
    document = values["rows"][0]["parts"][0]["documents"][0]
    self.assertCountEqual(
        document,
        ["document", "column", "first", "last", "length", "name", "source", "line", "whole"],
    )
    self.assertNotIn("arrays", values)


if __name__ == "__main__":
  absltest.main()
