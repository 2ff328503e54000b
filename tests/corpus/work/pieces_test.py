"""Tests of cutting token files into pieces."""

import pickle

from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import given
from hypothesis import strategies as st

from maxtext_olmo.corpus.work import pieces
from maxtext_olmo.errors import ConfigError
from tests.corpus.work import sample_work


def _source(n_tokens: int, offset: int = 0, dtype: str = "uint16", rest: int = 0):
  size = offset + n_tokens * int(dtype[4:]) // 8 + rest
  return pieces.SourceFile(3, "/x.npy", "l", dtype, n_tokens, offset, size)


class CutTest(parameterized.TestCase):

  @given(
      st.integers(0, 300),
      st.integers(0, 40),
      st.sampled_from(["uint8", "uint16", "uint32", "uint64"]),
      st.integers(8, 100),
      st.integers(0, 7),
  )
  def test_pieces_cover_the_tokens_of_a_file_without_gaps(self, count, offset, dtype, size, rest):
    source = _source(count, offset, dtype, rest % source_width(dtype))
    found = pieces.cut(source, size)
    self.assertTrue(found[0].is_first and found[-1].is_last)
    self.assertEqual(found[0].start, offset)
    for before, after in zip(found, found[1:]):
      self.assertEqual(before.end, after.start)
      self.assertGreater(after.count, 0)
      self.assertLess(after.start % size, source_width(dtype))
    self.assertEqual(sum(piece.count for piece in found), count)
    self.assertLen({piece.key for piece in found}, len(found))
    for piece in found:
      self.assertLess(piece.weight, size + source_width(dtype))

  def test_a_file_without_tokens_has_one_empty_piece(self):
    self.assertEqual([piece.count for piece in pieces.cut(_source(0))], [0])

  def test_a_piece_smaller_than_a_token_is_an_error(self):
    with self.assertRaisesRegex(ConfigError, "at least one token, got 1 bytes"):
      pieces.cut(_source(5), 1)

  def test_pieces_follow_files_remaps_and_survive_pickling(self):
    directory = self.create_tempdir().full_path
    index = sample_work.write_corpus(directory)
    found = pieces.pieces_of(index, piece_bytes=1 << 10, path_remap={directory: "/elsewhere"})
    self.assertEqual([piece.file for piece in found], [0, 0, 1, 2, 2, 2, 2, 2, 2, 3])
    self.assertEqual(found[0].inputs, ("/elsewhere/data/part-000.npy",))
    self.assertEqual(found[-1].source.label, "b")
    self.assertEqual(pickle.loads(pickle.dumps(found)), found)
    self.assertEqual(str(found[1]), "tokens 512 to 1000 of /elsewhere/data/part-000.npy")


def source_width(dtype: str) -> int:
  return int(dtype[4:]) // 8


if __name__ == "__main__":
  absltest.main()
