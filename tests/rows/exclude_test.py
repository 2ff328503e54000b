"""Tests of exclusions: which tokens of a row take no loss."""

import json
import pathlib

import hypothesis
import numpy as np
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
      ({"rows": [3, 3]}, "the index has rows 0 to 123"),
      ({"rows": [0, 2**70]}, "the index has rows 0 to 123"),
      ({"document": 3}, "only where there is a document index"),
      ("[" * 100_000, "recursion"),
  )
  def test_a_line_that_cannot_be_used_is_a_config_error(self, line, message):
    with self.assertRaisesRegex(errors.ConfigError, f"line 2 of {self.path}, .*{message}"):
      self.read("# first", line)

  def test_bytes_outside_the_tokens_are_a_config_error(self):
    with self.assertRaisesRegex(errors.ConfigError, "tokens of this file are bytes 0 to 300"):
      self.read({"file": self.index.files[1].path, "bytes": [298, 302]})


if __name__ == "__main__":
  absltest.main()
