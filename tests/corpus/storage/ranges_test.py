"""Tests of how byte ranges become requests."""

import hypothesis
import numpy as np
from absl.testing import absltest
from hypothesis import strategies as st

from maxtext_olmo.corpus.storage import ranges

_RANGES = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 300), st.integers(0, 60)), max_size=30
)


def _arrays(found):
  sources, offsets, sizes = (np.array(column, np.int64) for column in zip(*found))
  return sources, offsets, sizes, np.cumsum(sizes) - sizes


class RangesTest(absltest.TestCase):

  @hypothesis.given(_RANGES.filter(bool), st.integers(1, 100))
  def test_requests_bring_every_byte_and_no_other(self, found, most):
    sources, offsets, sizes, places = _arrays(found)
    files = [np.random.default_rng(i).integers(0, 256, 400, np.uint8) for i in range(3)]
    out = np.zeros(int(sizes.sum()), np.uint8)
    for request in ranges.plan_requests(sources, offsets, sizes, places, most):
      self.assertBetween(request.end - request.start, 1, most)
      data = files[request.source][request.start : request.end]
      touched = np.zeros(len(data), bool)
      for start, size, place in request.copies:
        inside = slice(start - request.start, start - request.start + size)
        out[place : place + size] = data[inside]
        touched[inside] = True
      self.assertTrue(touched.all())
    expected = [files[s][o : o + n] for s, o, n in found]
    np.testing.assert_array_equal(out, np.concatenate(expected))

  def test_ranges_with_a_gap_stay_apart(self):
    sources, offsets = np.zeros(3, np.int64), np.array([0, 101, 201])
    requests = ranges.plan_requests(sources, offsets, np.full(3, 100), np.arange(3) * 100)
    self.assertEqual([(r.start, r.end) for r in requests], [(0, 100), (101, 301)])

  def test_requests_come_in_the_order_of_their_ranges(self):
    sources = np.array([1, 0, 1])
    requests = ranges.plan_requests(
        sources, np.array([900, 5, 0]), np.full(3, 10), np.arange(3) * 10
    )
    self.assertEqual([(r.source, r.start) for r in requests], [(1, 900), (0, 5), (1, 0)])

  def test_an_output_that_does_not_fit_is_refused(self):
    for out, size in ((np.zeros(4, np.uint8), 5), (np.zeros(4, np.int8), 4)):
      with self.assertRaises(ValueError):
        ranges.check_output(out, np.array([size]), np.array([0]))


if __name__ == "__main__":
  absltest.main()
