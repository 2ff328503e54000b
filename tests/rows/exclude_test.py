"""Tests of exclusions, the tokens that are left out of the loss."""

import gzip
import json
import pathlib

import hypothesis
import numpy as np
import xxhash
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import strategies as st

from maxtext_olmo import errors
from maxtext_olmo.corpus import documents as documents_lib
from maxtext_olmo.corpus import index_builder
from maxtext_olmo.rows import exclude
from maxtext_olmo.rows import parts as parts_lib
from maxtext_olmo.rows import segments
from tests import corpora

_LENGTH = 8


@st.composite
def _cases(draw):
  file_tokens = draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))

  def token_range():
    file = draw(st.integers(0, len(file_tokens) - 1))
    first = draw(st.integers(0, file_tokens[file] - 1))
    return file, first, draw(st.integers(first + 1, file_tokens[file]))

  listed = [token_range() for _ in range(draw(st.integers(0, 6)))]
  rows = []
  for _ in range(draw(st.integers(0, 5))):
    row, left = [], _LENGTH
    while left and draw(st.booleans()):
      file, first, end = token_range()
      row.append((file, first, min(end - first, left)))
      left -= row[-1][2]
    rows.append(row)
  return file_tokens, listed, rows


class ExclusionsTest(parameterized.TestCase):

  @hypothesis.given(_cases())
  @hypothesis.settings(deadline=None, max_examples=300)
  def test_it_equals_looking_at_each_token(self, case):
    file_tokens, listed, rows = case
    some = exclude.Exclusions.of_ranges(file_tokens, listed)
    outside = {(file, token) for file, first, end in listed for token in range(first, end)}
    self.assertEqual(some.num_tokens, len(outside))
    flat = [part for row in rows for part in row]
    source, first, count = (np.array([part[i] for part in flat], np.int64) for i in range(3))
    bounds = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    parts = parts_lib.Parts(bounds, source.astype(np.int32), first, count.astype(np.int32))
    expected = np.zeros((len(rows), _LENGTH), np.bool_)
    for number, row in enumerate(rows):
      tokens = [(file, first + i) for file, first, count in row for i in range(count)]
      expected[number, : len(tokens)] = [token in outside for token in tokens]
    np.testing.assert_array_equal(some.excluded(parts, _LENGTH), expected)
    bits = segments.unpack_bits(some.loss_bits(parts, _LENGTH), _LENGTH)
    np.testing.assert_array_equal(bits, ~expected)

  def test_equal_tokens_have_equal_digests(self):
    a = exclude.Exclusions.of_ranges([10, 10], [(0, 2, 8), (0, 6, 10), (1, 0, 3)])
    b = exclude.Exclusions.of_ranges([10, 10], [(1, 0, 3), (0, 2, 10)])
    c = exclude.Exclusions.of_ranges([10, 10], [(1, 0, 4), (0, 2, 10)])
    self.assertEqual(a.digest, b.digest)
    self.assertNotEqual(a.digest, c.digest)


class ReadExclusionsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    path, self.rows = corpora.write_corpus(self.folder)
    self.index = index_builder.load_index(path)
    self.path = str(self.folder / "exclude.jsonl")

  def read(self, *lines, documents=None):
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    pathlib.Path(self.path).write_text(text)
    return exclude.read_exclusions(self.path, self.index, documents=documents)

  def assert_excludes(self, some, *ranges):
    file_tokens = [entry.n_tokens for entry in self.index.files]
    expected = exclude.Exclusions.of_ranges(file_tokens, ranges)
    self.assertEqual(some.digest, expected.digest)

  def test_labels_and_files_stand_for_all_their_tokens(self):
    self.assert_excludes(self.read({"label": "label-1"}), (1, 0, 150), (3, 0, 514))
    name = self.index.files[2].path
    self.assert_excludes(self.read({"file": name}), (2, 0, 7))
    self.assert_excludes(self.read({"file": self.index.resolve(2)}), (2, 0, 7))

  def test_bytes_cover_every_token_they_touch(self):
    name = self.index.files[1].path
    self.assert_excludes(self.read({"file": name, "bytes": [5, 9]}), (1, 2, 5))

  def test_rows_are_windows_of_the_index(self):
    # File 0 has 41 windows of 8 tokens, file 1 has 18, file 2 has none.
    self.assert_excludes(self.read({"rows": [40, 60]}), (0, 320, 328), (1, 0, 144), (3, 0, 8))

  def test_documents_are_found_through_their_index(self):
    path = str(self.folder / "documents")
    documents_lib.build_documents(self.index, path, eos_id=0)
    documents = documents_lib.load_documents(path, self.index)
    files, firsts = documents.locate(np.array([7]))
    length = int(documents.lengths(np.array([7]))[0])
    self.assert_excludes(
        self.read({"document": 7}, documents=lambda: documents),
        (int(files[0]), int(firsts[0]), int(firsts[0]) + length),
    )

  def named_documents(self, **options):
    """Builds and opens a document index whose second file has names."""
    boundaries = pathlib.Path(self.index.resolve(1)).with_suffix(".csv.gz")
    boundaries.write_bytes(gzip.compress(b"0,20,a,s,1\n20,90,b,s,2\n90,90,b,s,3\n90,150,b,s,4\n"))
    return documents_lib.build_documents(
        self.index, str(self.folder / "documents"), eos_id=0, **options
    )

  def test_a_name_stands_for_all_documents_that_have_it(self):
    documents = self.named_documents()
    some = self.read({"document": "b"}, documents=lambda: documents)
    self.assert_excludes(some, (1, 20, 90), (1, 90, 150))
    both = self.read({"document": "a"}, {"document": "b"}, documents=lambda: documents)
    self.assert_excludes(both, (1, 0, 150))

  def test_a_hash_stands_for_all_documents_with_the_same_tokens(self):
    tokens = np.fromfile(self.index.resolve(1), np.uint16)
    np.concatenate([tokens[:20], tokens[20:40], tokens[20:40], tokens[60:]]).tofile(
        self.index.resolve(1)
    )
    boundaries = pathlib.Path(self.index.resolve(1)).with_suffix(".csv.gz")
    boundaries.write_bytes(gzip.compress(b"0,20\n20,40\n40,60\n60,150\n"))
    path = str(self.folder / "documents")
    documents = documents_lib.build_documents(self.index, path, eos_id=0, hashes=True)
    text = xxhash.xxh3_128_hexdigest(tokens[20:40].tobytes())
    some = self.read({"hash": text}, documents=lambda: documents)
    self.assert_excludes(some, (1, 20, 60))

  @parameterized.parameters(
      ({"document": "c"}, "no document has the name 'c'. Document .* has the name 'a'"),
      ({"document": "0"}, "no document has the name '0'"),
      ({"document": -1}, "expected a document number from 0 to"),
      ({"document": 10**30}, "expected a document number from 0 to"),
      ({"document": True}, "expected a document number from 0 to"),
      ({"document": ["a"]}, "expected a document number from 0 to"),
      ({"document": None}, "expected a document number from 0 to"),
      ({"hash": 7}, "32 hexadecimal digits, found 7"),
      ({"hash": "xyz"}, "32 hexadecimal digits, found 'xyz'"),
      ({"hash": "0" * 32}, "no document has the hash '0000"),
      ({"document": 1, "hash": "0" * 32}, "expected one of these forms"),
  )
  def test_a_document_that_does_not_exist_is_a_config_error(self, line, message):
    documents = self.named_documents(hashes=True)
    with self.assertRaisesRegex(errors.ConfigError, f"line 2 of {self.path}, .*{message}"):
      self.read({"document": 1}, line, documents=lambda: documents)

  def test_hashes_need_a_document_index_that_has_them(self):
    documents = self.named_documents()
    with self.assertRaisesRegex(errors.ConfigError, "line 1 .* index documents --hashes"):
      self.read({"hash": "0" * 32}, documents=lambda: documents)

  def test_a_damaged_document_index_is_a_corpus_error(self):
    def documents():
      raise errors.CorpusError("damaged")

    with self.assertRaisesRegex(errors.CorpusError, "damaged"):
      self.read({"document": "a"}, documents=documents)

  def test_a_file_may_be_named_by_the_end_of_its_path(self):
    self.assert_excludes(self.read({"file": "data/part-002.npy"}), (2, 0, 7))
    self.assert_excludes(self.read({"file": "part-002.npy", "bytes": [0, 3]}), (2, 0, 2))
    for name in ("art-002.npy", "part-002"):
      with self.assertRaisesRegex(errors.ConfigError, f"has no file '{name}'"):
        self.read({"file": name})

  def test_the_end_of_several_paths_names_no_file(self):
    for label in ("a", "b"):
      corpora.write_tokens(self.folder / label / "part.npy", 50, seed=0)
    entries = [(str(self.folder / label / "part.npy"), label) for label in ("a", "b", "a")]
    self.index = index_builder.build_index(entries, 8, tokenizer="t", dtype="uint16")
    with self.assertRaisesRegex(
        errors.ConfigError, "2 paths .* end with 'part.npy': give a longer"
    ):
      self.read({"file": "part.npy"})
    # The mix repeats this one.
    self.assert_excludes(self.read({"file": "a/part.npy"}), (0, 0, 50), (2, 0, 50))

  def test_a_long_list_of_names_is_found(self):
    count = 3000
    np.arange(count, dtype=np.uint16).tofile(self.folder / "many.npy")
    rows = "".join(f"{i},{i + 1},id-{i}\n" for i in range(count))
    (self.folder / "many.csv.gz").write_bytes(gzip.compress(rows.encode()))
    self.index = index_builder.build_index(
        [(str(self.folder / "many.npy"), "a")], 8, tokenizer="t", dtype="uint16"
    )
    built = documents_lib.build_documents(self.index, str(self.folder / "documents"), eos_id=0)
    lines = [{"document": f"id-{i}"} for i in range(0, count, 2)]
    some = self.read(*lines, documents=lambda: built)
    self.assertEqual(some.num_tokens, count // 2)
    self.assertLen(some.firsts, count // 2)

  def test_comments_and_empty_lines_are_ignored(self):
    self.assert_excludes(self.read("# bad rows", "", '  {"rows": [0, 1]}'), (0, 0, 8))
    self.assert_excludes(self.read(""))

  @parameterized.parameters(
      ("{", "Expecting property name"),
      ("[1]", "expected one of these forms: label, file"),
      ({"labels": "a"}, "expected one of these forms"),
      ({"label": "wiki"}, "the index has no label 'wiki'"),
      ({"label": ["wiki"]}, "unhashable"),
      ({"file": "x"}, "the index has no file 'x'"),
      ({"rows": [3]}, "expected a pair of whole numbers, found .3."),
      ({"rows": [3, True]}, "expected a pair of whole numbers"),
      ({"rows": [3, 3]}, "the index has 123 rows"),
      ({"rows": [0, 2**70]}, "the index has 123 rows"),
      ({"document": 3}, "only if there is a document index"),
      ("[" * 100_000, "recursion"),
  )
  def test_a_line_that_cannot_be_used_is_a_config_error(self, line, message):
    with self.assertRaisesRegex(errors.ConfigError, f"line 2 of {self.path}, .*{message}"):
      self.read("# first", line)

  def test_bytes_outside_the_tokens_are_a_config_error(self):
    with self.assertRaisesRegex(errors.ConfigError, "tokens of this file are in bytes 0 to 300"):
      self.read({"file": self.index.files[1].path, "bytes": [298, 302]})


if __name__ == "__main__":
  absltest.main()
