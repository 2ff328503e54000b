"""Tests of documents inside a window."""

import hypothesis
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from maxtext_olmo.rows import segments as segments_lib


def _slowly(tokens, eos_id):
  """Segment ids and positions of one window, one token at a time."""
  segments, positions = [], []
  segment, position = 1, 0
  for token in tokens:
    segments.append(segment)
    positions.append(position)
    position += 1
    if token == eos_id:
      segment, position = segment + 1, 0
  return segments, positions


class DocumentsTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("several_documents", [5, 6, 0, 7, 0, 0, 8], [1, 1, 1, 2, 2, 3, 4], [0, 1, 2, 0, 1, 0, 0]),
      ("no_eos", [5, 6, 7], [1, 1, 1], [0, 1, 2]),
      ("only_eos", [0, 0, 0], [1, 2, 3], [0, 0, 0]),
      ("eos_first", [0, 5, 6], [1, 2, 2], [0, 0, 1]),
      ("eos_last", [5, 6, 0], [1, 1, 1], [0, 1, 2]),
      ("one_token", [5], [1], [0]),
      ("nothing", [], [], []),
  )
  def test_an_eos_ends_its_document_and_belongs_to_it(self, tokens, segments, positions):
    tokens = np.array(tokens, np.uint32)
    np.testing.assert_array_equal(segments_lib.segment_ids(tokens, 0), segments)
    np.testing.assert_array_equal(segments_lib.positions(tokens, 0), positions)

  @hypothesis.given(
      tokens=hnp.arrays(
          dtype=st.sampled_from([np.uint8, np.uint16, np.uint32, np.int32, np.int64, np.uint64]),
          shape=hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=40),
          elements=st.integers(0, 3),
      )
  )
  @hypothesis.settings(max_examples=100, deadline=None)
  def test_every_row_is_treated_alone_and_as_if_token_by_token(self, tokens):
    before = tokens.copy()
    segments = segments_lib.segment_ids(tokens, 2)
    positions = segments_lib.positions(tokens, 2)
    self.assertEqual((segments.dtype, positions.dtype), (np.int32, np.int32))
    for row in range(len(tokens)):
      expected = _slowly(tokens[row].tolist(), 2)
      self.assertEqual((segments[row].tolist(), positions[row].tolist()), expected)
      np.testing.assert_array_equal(segments_lib.segment_ids(tokens[row], 2), segments[row])
      np.testing.assert_array_equal(segments_lib.positions(tokens[row], 2), positions[row])
    np.testing.assert_array_equal(tokens, before)

  def test_an_eos_that_the_dtype_cannot_hold_never_occurs(self):
    tokens = np.array([255, 1, 255], np.uint8)
    np.testing.assert_array_equal(segments_lib.segment_ids(tokens, -1), [1, 1, 1])
    np.testing.assert_array_equal(segments_lib.positions(tokens, 100257), [0, 1, 2])


if __name__ == "__main__":
  absltest.main()
