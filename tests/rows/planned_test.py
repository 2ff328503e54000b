"""Tests of packed documents as rows."""

import collections
import os
import pathlib
import pickle
import time

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from maxtext_olmo import errors
from maxtext_olmo.order import permutations
from maxtext_olmo.rows import planned
from maxtext_olmo.rows import row_sequence
from maxtext_olmo.rows import row_source
from tests.rows import document_corpus


class PlannedRowsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.corpus = document_corpus.write(self.create_tempdir().full_path)

  def _places(self, parts):
    """Counts each token (file, place) in a table of parts."""
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

  def test_rows_may_be_requested_in_any_order(self):
    source = self.corpus.planned()
    count = source.count_rows(0, 10**6)
    whole = source.parts(0, np.arange(count))
    numbers = np.random.default_rng(0).permutation(count)[:9]
    other = self.corpus.planned().parts(0, numbers)
    expected = whole.take(numbers)
    for name in ("bounds", "source", "first", "count"):
      np.testing.assert_array_equal(getattr(other, name), getattr(expected, name))

  def test_rows_are_counted_as_they_are_requested(self):
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
    stream = row_sequence.RowSequence(source, name="planned", seed=0, num_epochs=2)
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


_LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=40).filter(any)


class Lengths:
  """Maps document numbers to lengths; counts the requested numbers."""

  def __init__(self, lengths):
    self.lengths = np.array(lengths)
    self.asked = 0

  def __call__(self, ids):
    self.asked += len(ids)
    return self.lengths[ids]


def _plan(lengths, *, length=8, window=5, seed=3, order="feistel", **kwargs):
  lengths = lengths if isinstance(lengths, Lengths) else Lengths(lengths)
  made = permutations.make_order(order, num_instances=len(lengths.lengths), seed=seed)
  return planned.PackingPlan(
      lengths, made, identity="test", row_length=length, window=window, **kwargs
  )


def _row(plan, position):
  """Returns the documents, first tokens and lengths of the parts of a row."""
  stream = row_sequence.RowSequence(planned.PlannedRows(plan, 1000, "test"), name="", seed=0)
  parts = row_source.parts_at(stream.source, stream, np.array([position]))
  return parts.source, parts.first, parts.count


def _tokens(plan, positions):
  """Counts each token (document, place) in the rows at the given positions."""
  found = collections.Counter()
  for position in positions:
    for document, start, length in zip(*_row(plan, position)):
      found.update((document, start + i) for i in range(length))
  return found


class PackingPlanTest(parameterized.TestCase):

  @settings(deadline=None, max_examples=40)
  @given(_LENGTHS, st.integers(1, 12), st.integers(1, 20), st.sampled_from(["split", "truncate"]))
  def test_every_token_comes_once_per_epoch_and_no_row_is_overfull(
      self, lengths, length, window, choice
  ):
    plan = _plan(lengths, length=length, window=window, long_documents=choice)
    first = plan.count(1)
    second = plan.count(2) - first
    expected = collections.Counter()
    for document, size in enumerate(lengths):
      size = min(size, length) if choice == "truncate" else size
      expected.update((document, i) for i in range(size))
    self.assertEqual(_tokens(plan, range(first)), expected)
    self.assertEqual(_tokens(plan, range(first, first + second)), expected)
    for position in range(first + second):
      _, starts, sizes = _row(plan, position)
      self.assertTrue(0 < sizes.sum() <= length and (sizes > 0).all() and (starts >= 0).all())

  @settings(deadline=None, max_examples=40)
  @given(
      _LENGTHS,
      st.integers(1, 12),
      st.integers(1, 20),
      st.sampled_from(["split", "truncate"]),
      st.sampled_from(["feistel", "sequential"]),
      st.data(),
  )
  def test_rows_of_tokens_are_those_whose_parts_hold_one_of_them(
      self, lengths, length, window, choice, order, data
  ):
    plan = _plan(lengths, length=length, window=window, long_documents=choice, order=order)
    epoch = data.draw(st.integers(0, 2))
    document = data.draw(st.integers(0, len(lengths) - 1))
    first, count = data.draw(st.integers(0, 30)), data.draw(st.integers(1, 30))
    parts = plan.parts(epoch, np.arange(plan.count_rows(epoch, 10**9)))
    hits = (parts.source == document) & (parts.first < first + count)
    hits &= parts.first + parts.count > first
    found = plan.rows_of(epoch, np.array([document]), document, first, count)
    np.testing.assert_array_equal(found, np.unique(parts.row[hits]))

  def test_any_row_may_be_requested_first(self):
    lengths = np.random.default_rng(0).integers(1, 20, 60)
    whole = _plan(lengths)
    rows = [_row(whole, position) for position in range(40)]
    for position in (39, 3, 17):
      for got, expected in zip(_row(_plan(lengths), position), rows[position]):
        np.testing.assert_array_equal(got, expected)

  @given(_LENGTHS, st.integers(1, 12), st.data())
  @settings(deadline=None, max_examples=30)
  def test_parts_of_rows_are_those_of_their_windows(self, lengths, window, data):
    plan = _plan(lengths, window=window)
    first = plan.count(1)
    self.assertEqual((plan.num_rows(0), plan.num_rows(1)), (first, None))
    rows = data.draw(st.lists(st.integers(0, first - 1), max_size=6))
    parts = plan.parts(0, np.array(rows, np.int64))
    self.assertEqual(parts.num_rows, len(rows))
    for number, row in enumerate(rows):
      found = parts.take(np.array([number]))
      for got, expected in zip((found.source, found.first, found.count), _row(plan, row)):
        np.testing.assert_array_equal(got, expected)

  def test_documents_may_lie_in_files(self):
    lengths = np.random.default_rng(6).integers(1, 20, 50)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    here = _plan(lengths)
    there = _plan(lengths, locate=lambda ids: (ids % 3, starts[ids]))
    for position in range(here.count(1)):
      documents, within, sizes = _row(here, position)
      files, first, counts = _row(there, position)
      np.testing.assert_array_equal(files, documents % 3)
      np.testing.assert_array_equal(first, starts[documents] + within)
      np.testing.assert_array_equal(counts, sizes)

  def test_rows_are_counted_no_further_than_needed(self):
    plan = _plan(np.full(40, 3), window=10)
    self.assertEqual([plan.count_rows(0, row) for row in (0, 4, 5, 12)], [5, 5, 10, 15])
    self.assertEqual(plan.count_rows(0, 10**9), 20)

  def test_rows_of_a_window_are_not_in_the_order_of_packing_nor_its_documents_by_length(self):
    lengths = np.random.default_rng(1).integers(1, 100, 400)
    plan = _plan(lengths, length=256, window=400)
    first_is_longest = []
    for position in range(plan.count(1)):
      _, _, sizes = _row(plan, position)
      first_is_longest.append(sizes[0] == sizes.max())
    self.assertLess(np.mean(first_is_longest), 0.7)

  def test_each_epoch_has_a_packing_of_its_own(self):
    lengths = np.random.default_rng(2).integers(1, 9, 60)
    plan = _plan(lengths)
    first = plan.count(1)
    one = [_row(plan, position)[0].tolist() for position in range(5)]
    two = [_row(plan, first + position)[0].tolist() for position in range(5)]
    self.assertNotEqual(one, two)

  def test_memory_and_work_depend_only_on_requested_rows(self):
    lengths = Lengths(np.random.default_rng(3).integers(1, 9, 100_000))
    plan = _plan(lengths, window=50)
    _row(plan, 10)
    self.assertLessEqual(lengths.asked, 100)
    for position in range(600):
      _row(plan, position)
    asked = lengths.asked
    _row(plan, 599)
    self.assertEqual(lengths.asked, asked)
    _row(plan, 10)  # Its window has been dropped in the meantime.
    self.assertEqual(lengths.asked, asked + 50)

  def test_the_number_of_rows_is_none_until_all_have_been_counted(self):
    plan = _plan(np.full(40, 3), window=10)
    _row(plan, 0)
    self.assertIsNone(plan.num_rows(0))
    self.assertEqual(plan.count(1), 20)
    self.assertEqual(plan.num_rows(0), 20)
    self.assertIsNone(plan.num_rows(1))

  def test_stored_counts_need_no_packing(self):
    path = os.path.join(self.create_tempdir().full_path, "index")
    sizes = np.random.default_rng(4).integers(1, 20, 300)
    plan = _plan(sizes, counts_path=path)
    plan.count_in_background(0).join()
    plan.count_in_background(1).join()
    self.assertIsNone(plan.count_in_background(0))
    total = plan.count(2)
    lengths = Lengths(sizes)
    again = _plan(lengths, counts_path=path)
    self.assertEqual(again.count(2), total)
    self.assertEqual(lengths.asked, 0)
    _row(again, total - 1)
    self.assertEqual(lengths.asked, 5)
    other = _plan(sizes, counts_path=path, seed=4)
    self.assertIsNone(other.num_rows(0))

  def test_an_interrupted_count_resumes(self):
    path = os.path.join(self.create_tempdir().full_path, "index")
    sizes = np.random.default_rng(5).integers(1, 20, 300)
    plan = _plan(sizes, counts_path=path)
    plan.count_rows(0, 30)
    thread = plan.count_in_background(0)
    plan.close()
    thread.join()
    lengths = Lengths(sizes)
    again = _plan(lengths, counts_path=path)
    self.assertEqual(again.count(1), _plan(sizes).count(1))
    self.assertLess(lengths.asked, len(sizes))

  def test_damaged_counts_are_counted_again(self):
    directory = self.create_tempdir().full_path
    plan = _plan(np.arange(1, 50), counts_path=os.path.join(directory, "index"))
    plan.count_in_background(0).join()
    (name,) = os.listdir(directory)
    path = pathlib.Path(directory, name)
    whole = path.read_bytes()
    for damage in (
        lambda: path.write_bytes(whole[:-1] + b"x"),
        lambda: path.write_bytes(100_000 * b"[" + b"\n"),
        lambda: os.mkfifo(path),
        lambda: os.mkdir(path),
    ):
      path.unlink()
      damage()
      with self.assertLogs(level="WARNING") as logs:
        again = _plan(np.arange(1, 50), counts_path=os.path.join(directory, "index"))
        self.assertIsNone(again.num_rows(0))
      self.assertIn("counted again", "".join(logs.output))
      self.assertEqual(again.count(1), plan.count(1))

  def test_counting_ahead_begins_with_the_epoch_of_the_position(self):
    directory = self.create_tempdir().full_path
    path = os.path.join(directory, "index")
    plan = _plan(np.full(40, 3), window=10, counts_path=path)
    total = plan.count(1)
    plan.count_ahead(total, 3)

    def written():
      return sorted(name.split(".")[-2] for name in os.listdir(directory) if name.endswith(".rows"))

    while len(written()) < 2:
      time.sleep(0.01)
    names = written()
    self.assertEqual(names, ["epoch-1", "epoch-2"])

  def test_an_unwritable_path_for_counts_is_a_warning(self):
    plan = _plan(np.full(10, 3), counts_path="/nowhere/at/all")
    with self.assertLogs(level="WARNING") as logs:
      plan.count_in_background(0).join()
    self.assertIn("cannot be stored", "".join(logs.output))

  def test_it_survives_pickling(self):
    plan = _plan(np.arange(1, 50))
    plan.count(1)
    again = pickle.loads(pickle.dumps(plan))
    for got, expected in zip(_row(again, 7), _row(plan, 7)):
      np.testing.assert_array_equal(got, expected)

  def test_a_long_document_is_an_error_on_request(self):
    with self.assertRaisesRegex(errors.CorpusError, "Document 1 has 9 tokens, but a row holds 8"):
      _plan([3, 9], long_documents="error").count(1)

  def test_documents_without_any_token_are_an_error_not_an_endless_search(self):
    with self.assertRaisesRegex(errors.CorpusError, "nothing to pack"):
      _row(_plan([0, 0]), 0)


if __name__ == "__main__":
  absltest.main()
