"""Tests of packing documents into rows."""

import numpy as np
from absl.testing import absltest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from maxtext_olmo import errors
from maxtext_olmo.rows import packing


class BestFitTest(absltest.TestCase):

  @settings(deadline=None, max_examples=100)
  @given(st.integers(1, 30).flatmap(lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c)))))
  def test_every_piece_is_in_one_bin_and_no_bin_is_overfull(self, case):
    capacity, lengths = case
    bins, count = packing.best_fit(np.array(lengths, np.int64), capacity)
    self.assertLen(bins, len(lengths))
    used = np.bincount(bins, weights=lengths, minlength=count) if lengths else np.zeros(0)
    self.assertLen(used, count)
    self.assertTrue((used <= capacity).all() and (used > 0).all())
    # Best fit never opens a bin while two half-empty ones could be one.
    self.assertLessEqual((used <= capacity / 2).sum(), 1)

  def test_each_piece_goes_into_the_fullest_bin_that_has_room(self):
    # Bins of 6 and 5 are open when the 3 and the 2 come: 5 + 3 and 6 + 2 fill them.
    bins, count = packing.best_fit(np.array([5, 3, 6, 2]), 8)
    self.assertEqual(count, 2)
    self.assertEqual(bins[0], bins[1])
    self.assertEqual(bins[2], bins[3])

  def test_bins_are_the_same_once_it_is_compiled(self):
    rng = np.random.default_rng(0)
    cases = [rng.integers(1, 300, size) for size in (0, 1, 50, 400)]
    before = [packing.best_fit(lengths, 299) for lengths in cases]
    in_order = [packing.best_fit_in_order(lengths, 299, queues=True)[0] for lengths in cases]
    if not packing.compile_best_fit():
      self.skipTest("numba is not installed")
    for lengths, (bins, count) in zip(cases, before):
      again, same = packing.best_fit(lengths, 299)
      self.assertEqual(same, count)
      np.testing.assert_array_equal(again, bins)
    for lengths, bins in zip(cases, in_order):
      again, _ = packing.best_fit_in_order(lengths, 299, queues=True)
      np.testing.assert_array_equal(again, bins)

  @settings(deadline=None, max_examples=100)
  @given(
      st.integers(1, 30).flatmap(lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c)))),
      st.booleans(),
  )
  def test_of_bins_with_equal_room_the_oldest_or_the_newest_is_taken(self, case, queues):
    capacity, lengths = case
    room: list[tuple[int, int]] = []  # The room and number of each open bin, the oldest first.
    expected, count = [], 0
    for length in lengths:
      fitting = [bin for bin in room if bin[0] >= length]
      if fitting:
        least = min(fitting)[0]
        space, number = [bin for bin in fitting if bin[0] == least][0 if queues else -1]
        room.remove((space, number))
      else:
        space, number, count = capacity, count, count + 1
      expected.append(number)
      if space > length:
        room.append((space - length, number))
    found = packing.best_fit_in_order(np.array(lengths, np.int64), capacity, queues=queues)
    self.assertEqual((found[0].tolist(), found[1]), (expected, count))

  def test_a_piece_longer_than_a_bin_is_an_error(self):
    for wrong in (9, 0):
      with self.assertRaisesRegex(errors.ConfigError, "pieces of 1 to 8"):
        packing.best_fit(np.array([wrong]), 8)


class LongDocumentsTest(absltest.TestCase):

  def test_an_unknown_choice_for_long_documents_names_the_known_ones(self):
    with self.assertRaisesRegex(errors.ConfigError, "'wrap' is unknown.*error, truncate, split"):
      packing.check_long_documents("wrap")


if __name__ == "__main__":
  absltest.main()
