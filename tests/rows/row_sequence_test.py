"""Tests of rows in sequence."""

import pickle

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from maxtext_olmo import errors
from maxtext_olmo.order import permutations
from maxtext_olmo.rows import parts as parts_lib
from maxtext_olmo.rows import row_sequence
from maxtext_olmo.rows import row_source


class _Rows(row_source.RowSourceDefaults):
  """Rows by epoch; row r of epoch e is token r of file e.

  Args:
    counts: Number of rows of each epoch; the last one applies to later epochs.
    lazily: Whether rows are counted as they are requested, two at a time.
  """

  row_length = 4
  fingerprint = "rows"

  def __init__(self, counts, lazily=False):
    self.counts = counts
    self.lazily = lazily
    self.counted = {}
    self.background = []

  def all_rows(self, epoch):
    return self.counts[min(epoch, len(self.counts) - 1)]

  def num_rows(self, epoch):
    if self.lazily and self.counted.get(epoch, -1) < self.all_rows(epoch):
      return None
    return self.all_rows(epoch)

  def count_rows(self, epoch, row):
    self.counted[epoch] = min(self.all_rows(epoch), (row // 2 + 1) * 2)
    return self.counted[epoch]

  def parts(self, epoch, rows):
    ones = np.ones(len(rows), np.int64)
    return parts_lib.Parts.one_per_row(ones * epoch, rows, ones)

  def look_ahead(self, position, num_epochs=None):
    self.background.append((position, num_epochs))

  def close(self):
    self.background.append("closed")


def _sequence(counts, *, lazily=False, **arguments):
  return row_sequence.RowSequence(_Rows(counts, lazily), name="test", seed=3, **arguments)


class RowSequenceTest(parameterized.TestCase):

  @parameterized.parameters(False, True)
  def test_the_table_of_the_docstring(self, lazily):
    epochs, rows = _sequence([3, 4], lazily=lazily).locate(np.arange(8))
    self.assertEqual(epochs.tolist(), [0, 0, 0, 1, 1, 1, 1, 2])
    self.assertEqual(rows.tolist(), [0, 1, 2, 0, 1, 2, 3, 0])

  @given(
      st.lists(st.integers(1, 9), min_size=1, max_size=4),
      st.lists(st.integers(0, 40), max_size=10),
      st.booleans(),
  )
  @settings(max_examples=100, deadline=None)
  def test_positions_run_through_the_epochs(self, counts, positions, lazily):
    stream = _sequence(counts, lazily=lazily)
    places = [(e, r) for e in range(41) for r in range(counts[min(e, len(counts) - 1)])]
    epochs, rows = stream.locate(np.array(positions, np.int64))
    found = list(zip(epochs.tolist(), rows.tolist()))
    self.assertEqual(found, [places[position] for position in positions])

  @given(
      st.lists(st.integers(1, 9), min_size=1, max_size=4),
      st.integers(1, 5),
      st.integers(0, 60),
      st.booleans(),
  )
  @settings(max_examples=100, deadline=None)
  def test_it_ends_after_its_epochs(self, counts, num_epochs, position, lazily):
    stream = _sequence(counts, lazily=lazily, num_epochs=num_epochs)
    end = sum(counts[min(e, len(counts) - 1)] for e in range(num_epochs))
    self.assertEqual(stream.has(position), position < end)
    if position >= end:
      # Now that all rows have been counted, the end is known.
      self.assertEqual(stream.num_positions, end)
    self.assertFalse(stream.endless)

  def test_the_end_is_unknown_until_it_has_been_counted(self):
    stream = _sequence([5, 7], lazily=True, num_epochs=2)
    self.assertIsNone(stream.num_positions)
    self.assertTrue(stream.has(6))
    self.assertIsNone(stream.num_positions)
    self.assertFalse(stream.has(12))
    self.assertEqual(stream.num_positions, 12)

  def test_no_row_is_counted_that_does_not_belong_to_the_stream(self):
    stream = _sequence([5], lazily=True, num_epochs=2)
    self.assertFalse(stream.has(10**9))
    self.assertEqual(stream.source.counted, {0: 5, 1: 5})

  def test_only_what_is_needed_is_counted(self):
    stream = _sequence([100], lazily=True, num_epochs=3)
    stream.locate(np.array([2]))
    self.assertTrue(stream.has(5))
    self.assertEqual(stream.source.counted, {0: 6})

  def test_an_endless_stream_has_every_position(self):
    stream = _sequence([5])
    self.assertTrue(stream.endless and stream.has(10**12))
    self.assertIsNone(stream.num_positions)

  def test_an_order_shuffles_the_rows_of_each_epoch(self):
    order = permutations.FeistelOrder(num_instances=20, seed=1)
    stream = _sequence([20], num_epochs=2, order=order)
    epochs, rows = stream.locate(np.arange(40))
    self.assertEqual(epochs.tolist(), [0] * 20 + [1] * 20)
    np.testing.assert_array_equal(rows[:20], order.ids(0, np.arange(20)))
    np.testing.assert_array_equal(rows[20:], order.ids(1, np.arange(20)))
    self.assertNotEqual(rows[:20].tolist(), rows[20:].tolist())
    self.assertEqual(stream.num_positions, 40)
    self.assertEqual([stream.has(39), stream.has(40)], [True, False])
    self.assertIs(stream.epochs, order.epochs)

  @parameterized.parameters(False, True)
  def test_no_positions_have_no_rows(self, shuffled):
    order = permutations.FeistelOrder(num_instances=20, seed=1) if shuffled else None
    for found in _sequence([20], order=order).locate(np.zeros(0, np.int64)):
      self.assertEqual(found.tolist(), [])

  @parameterized.parameters(None, 2)
  def test_rows_without_a_token_are_an_error_and_not_an_endless_search(self, num_epochs):
    stream = _sequence([0], num_epochs=num_epochs)
    with self.assertRaisesRegex(errors.CorpusError, "nothing to pack"):
      stream.locate(np.array([0]))
    stream = _sequence([0], lazily=True, num_epochs=num_epochs)
    with self.assertRaisesRegex(errors.CorpusError, "nothing to pack"):
      stream.has(0)
      stream.locate(np.array([0]))

  def test_a_source_that_never_counts_has_one_endless_epoch(self):
    source = _Rows([5])
    source.num_rows = lambda epoch: None
    source.count_rows = None
    epochs, rows = row_sequence.RowSequence(source, name="t", seed=0).locate(np.array([3, 10**9]))
    self.assertEqual((epochs.tolist(), rows.tolist()), ([0, 0], [3, 10**9]))

  def test_its_identity_is_what_decides_the_rows(self):
    self.assertEqual(_sequence([5]).identity(), {"fingerprint": "rows", "order": "test", "seed": 3})
    self.assertEqual(_sequence([5]).sequence_length, 4)

  def test_the_source_may_prepare_and_end_what_runs_in_the_background(self):
    stream = _sequence([5], num_epochs=2)
    stream.prepare(3)
    stream.look_ahead(3)
    stream.close()
    self.assertEqual(stream.source.background, [(3, 2), "closed"])

  def test_it_survives_pickling(self):
    again = pickle.loads(pickle.dumps(_sequence([3, 4], num_epochs=2)))
    self.assertEqual(again.locate(np.array([5]))[1].tolist(), [2])


if __name__ == "__main__":
  absltest.main()
