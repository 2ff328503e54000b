"""Tests of patterns for paths."""

import os
import pathlib

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.corpus import patterns
from maxtext_olmo.corpus import storage as storage_lib
from maxtext_olmo.corpus.storage import stores
from tests import object_server


class PatternsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    for name in ("a/1.npy", "a/10.npy", "a/2.npy", "a/.hidden.npy", "a/b/3.npy", "a/b/c/4.npy"):
      path = self.folder / name
      path.parent.mkdir(parents=True, exist_ok=True)
      path.touch()

  @parameterized.parameters(
      ("a/*.npy", ["a/.hidden.npy", "a/1.npy", "a/10.npy", "a/2.npy"]),
      ("a/1*", ["a/1.npy", "a/10.npy"]),
      ("a/*/3.npy", ["a/b/3.npy"]),
      ("a/b/**/*.npy", ["a/b/3.npy", "a/b/c/4.npy"]),
      ("a/**/**/4.npy", ["a/b/c/4.npy"]),
      ("a/1.npy", ["a/1.npy"]),
  )
  def test_matches_are_sorted_as_text(self, pattern, expected):
    found = patterns.expand(f"{self.folder}/{pattern}")
    self.assertEqual([os.path.relpath(path, self.folder) for path in found], expected)

  def test_other_wildcards_have_no_meaning(self):
    for pattern in ("a/?.npy", "a/[12].npy"):
      with self.assertRaisesRegex(errors.MissingFileError, "No file matches"):
        patterns.expand(f"{self.folder}/{pattern}")

  def test_a_web_server_cannot_list_files(self):
    with self.assertRaisesRegex(errors.ConfigError, "cannot list its files. Name each file"):
      patterns.expand("https://127.0.0.1:1/data/*.npy")

  def test_a_relative_pattern_starts_in_the_current_directory(self):
    before = os.getcwd()
    self.addCleanup(os.chdir, before)
    os.chdir(self.folder / "a")
    self.assertEqual(patterns.expand("1*.npy"), ["1.npy", "10.npy"])

  @parameterized.parameters(
      ("data/*.npy", ["data/1.npy", "data/10.npy"]),
      ("data/**/*.npy", ["data/1.npy", "data/10.npy", "data/b/3.npy"]),
  )
  def test_objects_of_a_store_match_in_the_same_way(self, pattern, expected):
    names = ("data/10.npy", "data/1.npy", "data/b/3.npy", "data/1.csv", "database/1.npy")
    server = self.enter_context(
        object_server.ObjectServer({f"bucket/{name}": b"x" for name in names})
    )
    options = stores.StoreOptions(endpoint=server.url, anonymous=True)
    storage = storage_lib.open_storage(options)
    self.addCleanup(storage.close)
    found = patterns.expand(f"s3://bucket/{pattern}", storage)
    self.assertEqual(found, [f"s3://bucket/{name}" for name in expected])
    with self.assertRaisesRegex(errors.MissingFileError, "No file matches s3://bucket/data/x"):
      patterns.expand("s3://bucket/data/x*", storage)

  @parameterized.parameters(
      ("/data/*.npy", "/data"),
      ("/*.npy", "/"),
      ("*.npy", ""),
      ("a/b/c.npy", "a/b"),
      ("gs://bucket/x/**/y", "gs://bucket/x"),
  )
  def test_the_directory_before_the_first_wildcard(self, pattern, expected):
    self.assertEqual(patterns.fixed_directory(pattern), expected)


if __name__ == "__main__":
  absltest.main()
