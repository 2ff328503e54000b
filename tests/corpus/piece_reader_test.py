"""Tests of reading pieces as one stream."""

import io

import hypothesis
from absl.testing import absltest
from hypothesis import strategies as st

from maxtext_olmo.corpus import piece_reader


class PieceReaderTest(absltest.TestCase):

  @hypothesis.given(pieces=st.lists(st.binary(max_size=6)), size=st.integers(1, 9))
  def test_the_stream_has_all_bytes_in_order(self, pieces, size):
    file = io.BufferedReader(piece_reader.PieceReader(iter(pieces)), 4)
    found = []
    while data := file.read(size):
      found.append(data)
    self.assertEqual(b"".join(found), b"".join(pieces))
    self.assertTrue(all(len(data) == size for data in found[:-1]))


if __name__ == "__main__":
  absltest.main()
