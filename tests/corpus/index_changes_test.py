import dataclasses
import pathlib

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.corpus import index_builder
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
    return index_builder.build_index(
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
        ["reordered: b came before c, and now comes after it"],
    )

  def test_a_replaced_file_of_the_same_size_shows_in_its_checksum(self):
    old = self.index("a", "b", "c", checksums="xxh3")
    corpora.write_tokens(self.directory / "b", 30, seed=2)
    new = self.index("a", "b", "c", checksums="xxh3")
    self.assertEqual(old.fingerprint, new.fingerprint)
    self.assertEqual(
        index_changes.describe_changes(old, new), ["replaced: b (same size, different content)"]
    )
    self.assertEmpty(index_changes.describe_changes(self.old, new))

  def test_checksums_of_two_algorithms_are_not_compared(self):
    old, new = (self.index("a", "b", "c", checksums=name) for name in ("sha256", "xxh3"))
    self.assertEmpty(index_changes.describe_changes(old, new))

  def test_other_windows_dtype_and_tokenizer_are_named(self):
    lines = index_changes.describe_changes(
        self.old, self.index("a", "b", "c", sequence_length=4, tokenizer="other", dtype="uint8")
    )
    self.assertStartsWith(lines[0], "dtype: was 'uint16', is 'uint8'")
    self.assertStartsWith(lines[1], "tokenizer: was 'test', is 'other'")
    self.assertIn("windows of 8 tokens, and are now cut into windows of 4", lines[2])

  def test_long_lists_are_shortened(self):
    many = dataclasses.replace(
        self.old,
        files=self.old.files
        + tuple(dataclasses.replace(self.old.files[0], path=f"n{i}") for i in range(13)),
    )
    lines = index_changes.describe_changes(self.old, many)
    self.assertLen(lines, 11)
    self.assertEqual(lines[-1], "added: 3 more files")

  def test_an_extended_corpus_keeps_its_split(self):
    corpora.write_tokens(self.directory / "d", 10, seed=1)
    kept = index_changes.keep_split(self.index("a", "b", "c", "d"), self.old)
    self.assertEqual(kept.split_key, self.old.split_key)
    self.assertEqual(kept.split_windows, self.old.split_windows)

  def test_a_corpus_that_does_not_extend_the_older_one_is_refused(self):
    with self.assertRaisesRegex(errors.CorpusError, "removed: b (.|\n)*add new files after them"):
      index_changes.keep_split(self.index("a", "c"), self.old)


if __name__ == "__main__":
  absltest.main()
