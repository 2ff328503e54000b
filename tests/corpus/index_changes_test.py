"""Tests of what became of a corpus."""

import dataclasses
import pathlib

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.corpus import index_changes
from tests import corpora


class ChangesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = pathlib.Path(self.create_tempdir().full_path)
    for name, count in (("a", 40), ("b", 30), ("c", 20)):
      corpora.write_tokens(self.directory / name, count, seed=1)
    self.old = self.index("a", "b", "c")

  def index(self, *names, **values):
    kwargs = {"tokenizer": "test", "dtype": "uint16", "base": str(self.directory), **values}
    length = kwargs.pop("sequence_length", 8)
    return index_lib.build_index(
        [(str(self.directory / name), "x") for name in names], length, **kwargs
    )

  def test_the_same_corpus_has_no_changes(self):
    self.assertEmpty(index_changes.describe_changes(self.old, self.index("a", "b", "c")))

  @parameterized.parameters((31, "grown"), (29, "shrunk"))
  def test_a_file_of_another_size_is_named_with_both(self, count, word):
    corpora.write_tokens(self.directory / "b", count, seed=1)
    self.assertEqual(
        index_changes.describe_changes(self.old, self.index("a", "b", "c")),
        [f"{word}: b (60 to {2 * count} bytes)"],
    )

  def test_added_removed_and_reordered_files_are_named(self):
    corpora.write_tokens(self.directory / "d", 10, seed=1)
    self.assertEqual(
        index_changes.describe_changes(self.old, self.index("a", "b", "c", "d")),
        ["added: d (20 bytes, at the end)"],
    )
    self.assertEqual(
        index_changes.describe_changes(self.old, self.index("a", "d", "b", "c")),
        ["added: d (20 bytes, at place 1)"],
    )
    self.assertEqual(
        index_changes.describe_changes(self.old, self.index("a", "c")), ["removed: b (60 bytes)"]
    )
    self.assertEqual(
        index_changes.describe_changes(self.old, self.index("a", "c", "b")),
        ["reordered: b came before c, now it comes after"],
    )

  def test_a_replaced_file_of_the_same_size_shows_in_its_checksum(self):
    old = self.index("a", "b", "c", checksums="xxh3")
    corpora.write_tokens(self.directory / "b", 30, seed=2)
    new = self.index("a", "b", "c", checksums="xxh3")
    self.assertEqual(old.fingerprint, new.fingerprint)
    self.assertEqual(
        index_changes.describe_changes(old, new), ["replaced: b (the same size, another content)"]
    )
    self.assertEmpty(index_changes.describe_changes(self.old, new))

  def test_other_windows_dtype_and_tokenizer_are_named(self):
    lines = index_changes.describe_changes(
        self.old, self.index("a", "b", "c", sequence_length=4, tokenizer="other", dtype="uint8")
    )
    self.assertStartsWith(lines[0], "dtype: was 'uint16', is 'uint8'")
    self.assertStartsWith(lines[1], "tokenizer: was 'test', is 'other'")
    self.assertIn("windows of 8 tokens, now of 4", lines[2])

  def test_long_lists_are_cut(self):
    many = dataclasses.replace(
        self.old,
        files=self.old.files
        + tuple(dataclasses.replace(self.old.files[0], path=f"n{i}") for i in range(13)),
    )
    lines = index_changes.describe_changes(self.old, many)
    self.assertLen(lines, 11)
    self.assertEqual(lines[-1], "added: 3 more files")

  def test_a_prefix_is_found_by_its_fingerprint(self):
    for count, names in ((0, ()), (1, ("a",)), (2, ("a", "b")), (3, ("a", "b", "c"))):
      if names:
        self.assertEqual(index_changes.find_prefix(self.old, self.index(*names).fingerprint), count)
      windows = sum(n // 8 for n in (40, 30, 20)[:count])
      self.assertEqual(index_changes.windows_of_prefix(self.old, count), windows)
    self.assertIsNone(index_changes.find_prefix(self.old, self.index("b").fingerprint))


if __name__ == "__main__":
  absltest.main()
