"""Tests of the tokens of each label in a stream, for rows of documents."""

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.inspection import changes as changes_lib
from maxtext_olmo.inspection import counts
from maxtext_olmo.inspection import sources
from maxtext_olmo.order import permutations
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.rows import document_rows
from maxtext_olmo.rows import mixture
from maxtext_olmo.rows import row_sequence
from maxtext_olmo.rows import row_source
from tests.rows import document_corpus


class DocumentsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.corpus = document_corpus.write(self.create_tempdir().full_path)
    self.index = self.corpus.index

  def stream(self, packing, num_epochs=None):
    if packing == "planned":
      rows = self.corpus.planned()
      return row_sequence.RowSequence(rows, name="t", seed=0, num_epochs=num_epochs)
    order = permutations.FeistelOrder(num_instances=self.corpus.documents.num_documents, seed=0)
    rows = document_rows.DocumentRows(self.corpus.documents, 32, "truncate")
    return row_sequence.RowSequence(rows, name="t", seed=0, num_epochs=num_epochs, order=order)

  def by_label(self, stream, positions):
    parts = row_source.parts_at(stream.source, stream, positions)
    names = [self.index.files[file].label for file in parts.source]
    return {
        label: sum(count for name, count in zip(names, parts.count.tolist()) if name == label)
        for label in ("label-0", "label-1")
    }

  @parameterized.parameters("planned", "none")
  def test_short_runs_are_counted_by_the_parts_of_their_rows(self, packing):
    stream = self.stream(packing)
    schedule = schedule_lib.BatchSchedule(((0, 4), (6, 3)))
    counted = sources.count_sources([changes_lib.Stretch(0, 20, schedule, stream, self.index)])
    self.assertTrue(counted.exact)
    for number, edge in enumerate(counted.edges.tolist()):
      expected = self.by_label(stream, np.arange(schedule.position(edge)))
      self.assertEqual(dict(zip(counted.labels, counted.seen[number].tolist())), expected)

  @parameterized.parameters("planned", "none")
  def test_epochs_end_where_the_stream_does(self, packing):
    stream = self.stream(packing, num_epochs=2)
    schedule = schedule_lib.BatchSchedule.constant(5)
    counted = sources.count_sources([changes_lib.Stretch(0, 10_000, schedule, stream, self.index)])
    self.assertEqual(counted.rows[-1], stream.num_positions)
    if packing == "planned":
      # A few tokens of the corpus are in no document.
      np.testing.assert_allclose(counted.epochs[-1], 2.0, atol=0.02)

  def test_windows_of_a_plan_that_are_sampled_have_the_shares_of_the_corpus(self):
    counter = counts.make_counter(self.stream("planned"), self.index)
    rows = np.arange(0, 40, 2)
    sums, squares, count = counter.sample(rows)
    whole = np.array(list(self.by_label(self.stream("planned"), np.arange(32)).values()))
    np.testing.assert_allclose(sums / sums.sum(), whole / whole.sum(), atol=0.1)
    self.assertTrue((squares <= sums).all())
    self.assertGreater(count, len(rows))

  def test_a_mixture_of_documents_is_exact_in_rows(self):
    members = [
        row_sequence.RowSequence(self.corpus.planned(seed=seed), name=label, seed=0)
        for seed, label in enumerate(("label-0", "label-1"))
    ]
    rows = mixture.MixedRows(members, (2, 1))
    stream = row_sequence.RowSequence(rows, name="t", seed=0)
    schedule = schedule_lib.BatchSchedule.constant(3)
    counted = sources.count_sources([changes_lib.Stretch(0, 50, schedule, stream, self.index)])
    self.assertTrue(counted.exact)
    np.testing.assert_array_equal(counted.seen[:, 0], 2 * 32 * counted.edges)
    np.testing.assert_array_equal(counted.seen[:, 1], 32 * counted.edges)


if __name__ == "__main__":
  absltest.main()
