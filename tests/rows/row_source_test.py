"""Tests of the protocol of row sources."""

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from maxtext_olmo import errors
from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.order import mixture as mixture_lib
from maxtext_olmo.order import permutations
from maxtext_olmo.order import stream as stream_lib
from maxtext_olmo.rows import document_rows
from maxtext_olmo.rows import mixture
from maxtext_olmo.rows import parts as parts_lib
from maxtext_olmo.rows import row_sequence
from maxtext_olmo.rows import row_source
from maxtext_olmo.rows import windows
from tests import corpora
from tests.rows import document_corpus


def _sources(directory):
  """Returns one row source of each kind."""
  corpus = document_corpus.write(directory + "/documents")
  path, _ = corpora.write_corpus(directory + "/windows")
  planned = corpus.planned()
  member = row_sequence.RowSequence(planned, name="t", seed=0)
  return {
      "windows": windows.WindowRows(index_lib.load_index(path)),
      "documents": document_rows.DocumentRows(corpus.documents, 16, "truncate"),
      "planned": planned,
      "mixture": mixture.MixedRows([member, member], [1, 2]),
  }


def _streams(directory):
  """Returns row sources, each with a stream over it."""
  corpus = document_corpus.write(directory)
  index, count = corpus.index, corpus.documents.num_documents
  truncated = document_rows.DocumentRows(corpus.documents, 16, "truncate")
  shuffled = permutations.FeistelOrder(num_instances=count, seed=4)
  rows = windows.WindowRows(index)

  def sequence(source, **arguments):
    return source, row_sequence.RowSequence(source, name="t", seed=0, **arguments)

  members = [sequence(corpus.planned(seed=seed))[1] for seed in (1, 2)]
  how = {"order": "feistel", "seed": 2}
  return {
      "windows": (rows, stream_lib.train_stream(index, held_out_instances=11, **how)),
      "windows mixed": (rows, mixture_lib.mixture_stream(index, {"*-1": 2.5}, "epochs", **how)),
      "documents": sequence(truncated, order=shuffled),
      "planned": sequence(corpus.planned()),
      "planned, truncated": sequence(corpus.planned(16, long_documents="truncate")),
      "planned, split": sequence(corpus.planned(7)),
      "planned, mixed": sequence(mixture.MixedRows(members, [1, 2])),
  }


class RowSourceTest(parameterized.TestCase):

  def test_every_source_meets_the_protocol(self):
    for name, source in _sources(self.create_tempdir().full_path).items():
      with self.subTest(name):
        self.assertIsInstance(source, row_source.RowSource)

  @parameterized.parameters(
      ("windows", 8, 4, 120 // 8),  # All 120 rows of an epoch fit into a block.
      ("windows", 60, 4, 2),
      ("planned", 8, 4, 1024 // 8),  # Planned rows are packed for all hosts.
      ("planned", 2048, 4, 1),
      ("mixture", 512, 4, 2),
  )
  def test_blocks_are_of_a_hosts_rows_and_at_most_an_epoch(self, name, batch, own, steps):
    source = _sources(self.create_tempdir().full_path)[name]
    found = row_source.steps_per_block(source, {batch: np.arange(own)})
    self.assertEqual(found, steps)

  def test_blocks_do_not_depend_on_the_number_of_hosts(self):
    class Endless(row_source.RowSourceDefaults):
      row_length, fingerprint = 4, "v1"

      def num_rows(self, epoch):
        return 10**12

      def parts(self, epoch, rows):
        raise NotImplementedError

    for hosts in (1, 16, 4096):
      rows = {4 * hosts: np.arange(4)}
      self.assertEqual(row_source.steps_per_block(Endless(), rows), 8192 // 4)

  def test_every_source_returns_the_requested_rows(self):
    for name, source in _sources(self.create_tempdir().full_path).items():
      with self.subTest(name):
        whole = source.parts(1, np.arange(12))
        rows = np.array([7, 2, 2, 11])
        parts, expected = source.parts(1, rows), whole.take(rows)
        for column in ("bounds", "source", "first", "count"):
          np.testing.assert_array_equal(getattr(parts, column), getattr(expected, column))
        self.assertLessEqual(whole.used.max(), source.row_length)

  @parameterized.parameters(
      "windows",
      "windows mixed",
      "documents",
      "planned",
      "planned, truncated",
      "planned, split",
      "planned, mixed",
  )
  def test_positions_of_tokens_are_those_whose_parts_hold_one_of_them(self, name):
    source, stream = _streams(self.create_tempdir().full_path)[name]
    end = 400
    parts = row_source.parts_at(source, stream, np.arange(end))
    of_epochs = stream.locate(np.arange(end))[0]

    @settings(deadline=None, max_examples=60)
    @given(st.integers(0, 3), st.integers(0, 520), st.integers(1, 60), st.integers(0, end))
    def check(file, first, count, last):
      hits = (parts.source == file) & (parts.first < first + count)
      hits &= parts.first + parts.count > first
      expected = np.unique(parts.row[hits])
      expected = expected[expected < last]
      epochs, positions = row_source.positions_of(source, stream, file, first, count, last)
      np.testing.assert_array_equal(positions, expected)
      if name != "planned, mixed":  # In a mixture, epochs are those of the members.
        np.testing.assert_array_equal(epochs, of_epochs[expected])

    check()

  @parameterized.parameters("windows", "documents", "planned", "planned, split")
  def test_positions_is_the_inverse_of_locate(self, name):
    _, stream = _streams(self.create_tempdir().full_path)[name]
    positions = np.arange(300)
    epochs, rows = stream.locate(positions)
    for epoch in np.unique(epochs).tolist():
      here = epochs == epoch
      np.testing.assert_array_equal(stream.positions(epoch, rows[here]), positions[here])
      self.assertEqual(stream.positions(epoch, np.array([-1, 10**6])).tolist(), [-1, -1])

  def test_rows_that_cannot_be_searched_say_so(self):
    with self.assertRaisesRegex(errors.OrderError, "cannot be searched"):
      row_source.positions_of(row_source.RowSourceDefaults(), None, 0, 0, 1, 10)  # type: ignore

  def test_defaults_are_full_rows_of_one_segment_without_masks(self):
    source = row_source.RowSourceDefaults()
    self.assertEqual((source.pad_id, source.filter_sees_padding), (0, False))
    self.assertEqual(source.segment_rule.begins, "nowhere")
    self.assertIsNone(source.mask_paths)

  def test_an_incomplete_source_does_not_meet_the_protocol(self):
    class Unfinished(row_source.RowSourceDefaults):
      row_length = 4

      def parts(self, epoch, rows):
        del epoch, rows
        return parts_lib.Parts.of_rows([])

    self.assertNotIsInstance(Unfinished(), row_source.RowSource)


class _Rows(row_source.RowSourceDefaults):
  """Three rows in epoch 0 and four in each later one; row r of epoch e is token r of file e."""

  row_length = 4
  fingerprint = "rows"

  def num_rows(self, epoch):
    return 4 if epoch else 3

  def parts(self, epoch, rows):
    ones = np.ones(len(rows), np.int64)
    return parts_lib.Parts.one_per_row(ones * epoch, rows, ones)


class PartsAtTest(parameterized.TestCase):

  @parameterized.parameters(([],), ([0, 2],), ([6, 0, 3, 3, 12, 1],))
  def test_parts_are_those_of_the_positions_in_their_order(self, positions):
    stream = row_sequence.RowSequence(_Rows(), name="t", seed=0)
    positions = np.array(positions, np.int64)
    parts = row_source.parts_at(stream.source, stream, positions)
    epochs, rows = stream.locate(positions)
    self.assertEqual(parts.source.tolist(), epochs.tolist())
    self.assertEqual(parts.first.tolist(), rows.tolist())
    self.assertEqual(parts.num_rows, len(positions))


if __name__ == "__main__":
  absltest.main()
