"""Boundary files: reading what dolma writes, and writing the same."""

import gzip
import io
import pathlib
import tracemalloc

from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from maxtext_olmo import errors
from maxtext_olmo.corpus import boundaries
from maxtext_olmo.corpus.storage import LocalStorage

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_DOCUMENTS = st.lists(
    st.tuples(st.integers(0, 9), _TEXT, _TEXT, st.none() | st.integers(0, 2**63 - 1)), max_size=20
)


class BoundariesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.path = str(pathlib.Path(self.create_tempdir().full_path, "part-0.csv.gz"))

  def read(self, text, n_tokens):
    pathlib.Path(self.path).write_bytes(gzip.compress(text.encode()))
    return self.rows(n_tokens)

  def rows(self, n_tokens):
    blocks = boundaries.read_boundaries(LocalStorage(), self.path, n_tokens)
    return [
        row
        for some in blocks
        for row in zip(
            some.starts.tolist(), some.lengths.tolist(), some.names, some.sources, some.lines
        )
    ]

  def test_the_path_follows_from_that_of_the_token_file(self):
    self.assertEqual(boundaries.boundary_path("gs://b/x.y/part-0.npy"), "gs://b/x.y/part-0.csv.gz")

  def test_all_columns_of_dolma_are_read(self):
    text = '0,3,<urn:uuid:1>,s3://b/x.jsonl.gz,41\n3,5,"a,b",y,1\n'
    expected = [(0, 3, "<urn:uuid:1>", "s3://b/x.jsonl.gz", 41), (3, 2, "a,b", "y", 1)]
    self.assertEqual(self.read(text, 5), expected)

  def test_an_endless_line_is_an_error_and_not_held_in_memory(self):
    pathlib.Path(self.path).write_bytes(gzip.compress(b"1" * (64 << 20), compresslevel=1))
    tracemalloc.start()
    try:
      with self.assertRaisesRegex(errors.CorpusError, "cannot be read"):
        self.rows(5)
      self.assertLess(tracemalloc.get_traced_memory()[1], 24 << 20)
    finally:
      tracemalloc.stop()

  def test_columns_after_the_second_may_be_missing_or_have_another_meaning(self):
    text = "0,1\n1,2,id\n2,3,id,source\n3,4,i,s,line\n4,5,i,s,-7\n5,6,i,s," + "9" * 30 + ",more\n"
    self.assertEqual(
        self.read(text, 6),
        [
            (0, 1, "", "", -1),
            (1, 1, "id", "", -1),
            (2, 1, "id", "source", -1),
            (3, 1, "i", "s", -1),
            (4, 1, "i", "s", -1),
            (5, 1, "i", "s", -1),
        ],
    )

  @settings(deadline=None, max_examples=60)
  @given(_DOCUMENTS)
  def test_documents_round_trip_through_a_file(self, documents):
    out = io.BytesIO()
    writer = boundaries.BoundaryWriter(out)
    for document in documents:
      writer.add(*document)
    writer.close()
    pathlib.Path(self.path).write_bytes(out.getvalue())
    expected, start = [], 0
    for length, name, source, line in documents:
      expected.append((start, length, name, source, -1 if line is None else line))
      start += length
    self.assertEqual(self.rows(start), expected)

  def test_the_line_number_of_an_error_counts_all_blocks(self):
    text = "".join(f"{i},{i + 1}\n" for i in range(3000)) + "3000,2999\n"
    with self.assertRaisesRegex(errors.CorpusError, "part-0.csv.gz:3001: .*after token 3000"):
      self.read(text, 9000)

  def test_memory_does_not_grow_with_the_file(self):
    count = 100_000
    text = "".join(f"{i},{i + 1},id-{i:040},source-{i:040},{i}\n" for i in range(count))
    pathlib.Path(self.path).write_bytes(gzip.compress(text.encode(), 1))
    del text
    tracemalloc.start()
    self.addCleanup(tracemalloc.stop)
    blocks = boundaries.read_boundaries(LocalStorage(), self.path, count)
    self.assertEqual(sum(len(some.names) for some in blocks), count)
    self.assertLess(tracemalloc.get_traced_memory()[1], 6 << 20)


if __name__ == "__main__":
  absltest.main()
