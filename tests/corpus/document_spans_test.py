"""Tests of finding documents by OLMo-core's rules."""

import gzip
import pathlib
import tempfile

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from maxtext_olmo import errors
from maxtext_olmo.corpus import document_spans
from maxtext_olmo.corpus import scan
from maxtext_olmo.corpus import token_files
from maxtext_olmo.corpus.storage import LocalStorage

_EOS, _BOS = 0, 1


def _files(folder: str, tokens: np.ndarray) -> token_files.TokenFiles:
  path = f"{folder}/part.npy"
  tokens.tofile(path)
  return token_files.TokenFiles((path,), np.zeros(1, np.int64), tokens.dtype, LocalStorage())


def _slowly(tokens: list[int], bos_id: int) -> list[tuple[int, int]]:
  found, begin = [], 0
  for place, token in enumerate(tokens):
    following = tokens[place + 1] if place + 1 < len(tokens) else bos_id
    if token == _EOS and (bos_id < 0 or following == bos_id):
      found.append((begin, place + 1 - begin))
      begin = place + 1
  return found


class FindSpansTest(parameterized.TestCase):

  @parameterized.parameters(-1, _BOS)
  def test_documents_end_at_an_eos_and_the_rest_is_dropped(self, bos_id):
    @settings(deadline=None, max_examples=60)
    @given(st.lists(st.integers(0, 4), min_size=1, max_size=60))
    def check(tokens):
      with tempfile.TemporaryDirectory() as folder:
        files = _files(folder, np.array(tokens, np.uint16))
        rule = document_spans.BoundaryRule("eos", _EOS, bos_id)
        found = document_spans.find_spans(files, 0, len(tokens), rule)
      self.assertEqual(list(zip(*(column.tolist() for column in found))), _slowly(tokens, bos_id))

    check()

  @parameterized.parameters(-1, _BOS)
  def test_pieces_of_a_file_are_joined_at_any_token(self, bos_id):
    count = scan.CHUNK_BYTES // 2
    tokens = np.full(2 * count + 5, 7, np.uint16)
    # An EOS before a BOS, on both sides of the ends of pieces, and one that ends the file.
    for place in (count - 1, 2 * count - 2, 2 * count + 4):
      tokens[place] = _EOS
    tokens[count] = tokens[2 * count - 1] = _BOS
    read = []
    with tempfile.TemporaryDirectory() as folder:
      rule = document_spans.BoundaryRule("eos", _EOS, bos_id)
      files = _files(folder, tokens)
      starts, lengths = document_spans.find_spans(files, 0, len(tokens), rule, read.append)
    self.assertEqual(starts.tolist(), [0, count, 2 * count - 1])
    self.assertEqual((starts + lengths).tolist(), [count, 2 * count - 1, len(tokens)])
    self.assertEqual(sum(read), tokens.nbytes)

  def _csv(self, lines: str) -> tuple[np.ndarray, np.ndarray]:
    folder = self.create_tempdir().full_path
    files = _files(folder, np.arange(10, dtype=np.uint16))
    pathlib.Path(f"{folder}/part.csv.gz").write_bytes(gzip.compress(lines.encode()))
    rule = document_spans.BoundaryRule("csv", _EOS)
    return document_spans.find_spans(files, 0, 10, rule)

  def test_a_boundary_file_is_used_as_it_is(self):
    starts, lengths = self._csv("5,7,b\n0,2\n8,9,c,src,1\n")
    self.assertEqual((starts.tolist(), lengths.tolist()), ([5, 0, 8], [2, 2, 1]))

  @parameterized.parameters("0,11\n", "0,2\n3,3\n", "4,2\n", "-1,2\n", "a,b\n", "5\n")
  def test_an_impossible_document_names_the_line(self, lines):
    number = lines.count("\n")
    with self.assertRaisesRegex(errors.CorpusError, rf"part.csv.gz:{number}: .*10 tokens"):
      self._csv(lines)

  def test_a_missing_boundary_file_is_named(self):
    files = _files(self.create_tempdir().full_path, np.arange(10, dtype=np.uint16))
    with self.assertRaisesRegex(errors.CorpusError, "part.csv.gz"):
      document_spans.find_spans(files, 0, 10, document_spans.BoundaryRule("csv", _EOS))

  @parameterized.parameters((70_000, -1, "EOS"), (-1, -1, "EOS"), (3, 70_000, "BOS"))
  def test_an_id_that_cannot_occur_is_an_error(self, eos_id, bos_id, name):
    rule = document_spans.BoundaryRule("eos", eos_id, bos_id)
    with self.assertRaisesRegex(errors.CorpusError, f"The {name} .*olmo_{name.lower()}_id"):
      document_spans.check_rule(rule, np.dtype("<u2"))


if __name__ == "__main__":
  absltest.main()
