"""Tests of the statistics that judge whether an id is the EOS."""

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from maxtext_olmo.corpus import document_lengths


def _lengths(tokens, cuts=()) -> document_lengths.DocumentLengths:
  """Returns the lengths of the documents of one file, which end with zeros, added in pieces."""
  lengths = document_lengths.DocumentLengths()
  for piece in np.split(np.asarray(tokens), sorted(cuts)):
    part = document_lengths.DocumentLengths.of_ends(np.flatnonzero(piece == 0), len(piece))
    lengths.append(document_lengths.DocumentLengths.from_result(part.to_result()))
  return lengths


def _file(*documents: int, rest: int = 0) -> np.ndarray:
  parts = [np.append(np.ones(length - 1, np.uint16), np.uint16(0)) for length in documents]
  return np.concatenate([*parts, np.ones(rest, np.uint16)])


class DocumentLengthsTest(parameterized.TestCase):

  @settings(deadline=None, max_examples=50)
  @given(st.lists(st.integers(0, 3), max_size=60), st.lists(st.integers(0, 60), max_size=4))
  def test_the_result_does_not_depend_on_the_pieces(self, tokens, cuts):
    whole, pieces = _lengths(tokens), _lengths(tokens, cuts)
    self.assertEqual(pieces.describe(), whole.describe())
    self.assertEqual(whole.documents, tokens.count(0))
    self.assertEqual(whole.rest, [*reversed(tokens), 0].index(0) if 0 in tokens else len(tokens))

  @parameterized.parameters(1, 7, 64, 1000, 123_456)
  def test_the_median_is_accurate_to_a_tenth(self, length):
    median = _lengths(_file(2 * length, length, length)).median
    self.assertBetween(median, 0.9 * length - 0.5, 1.1 * length + 0.5)

  @settings(deadline=None, max_examples=50)
  @given(st.lists(st.integers(1, 100) | st.integers(16_300, 16_400) | st.integers(1, 1 << 40)))
  def test_octaves_count_documents_of_every_length(self, lengths):
    ends = np.cumsum([1, *lengths]) - 1
    found = document_lengths.DocumentLengths.of_ends(ends, int(ends[-1]) + 1)
    powers, counts = found.octaves()
    expected = [sum(p <= length < 2 * p for length in [1, *lengths]) for p in powers.tolist()]
    self.assertEqual(counts.tolist(), expected)
    self.assertEqual(counts.sum(), len(lengths) + 1)

  def test_several_files_add_up(self):
    total = document_lengths.DocumentLengths.total(
        [_lengths(_file(100, 300)), _lengths(_file(100, rest=100)), _lengths([])]
    )
    self.assertEqual(
        total.describe(),
        "3 documents, median about 103 tokens, longest 300; 1 of 2 files do not end with the EOS,"
        " 16.7% of the tokens come after the last EOS",
    )

  @parameterized.parameters(
      ((_file(100, 2000),), []),
      ((_file(100, rest=5), _file(100), _file(300)), []),
      ((_file(100, rest=5),), ["most files do not end with it"]),
      ((_file(5, 5, 200),), []),
      ((_file(*[5, 5, 200] * 4),), ["most documents would be very short"]),
      ((_file(10_000_001),), ["a document would be very long"]),
      ((_file(),), []),
  )
  def test_unlikely_documents_give_doubts(self, files, doubts):
    total = document_lengths.DocumentLengths.total([_lengths(file) for file in files])
    self.assertEqual(total.doubts(), doubts)


if __name__ == "__main__":
  absltest.main()
