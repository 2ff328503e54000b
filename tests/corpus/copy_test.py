"""Tests of copying token files between disks and object stores."""

import os
import pathlib

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.corpus import checksums
from maxtext_olmo.corpus import copy as copy_lib
from maxtext_olmo.corpus import copy_targets
from maxtext_olmo.corpus.storage import open_storage
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.errors import MissingFileError
from tests import object_server

_FILES = {
    "wiki/a.npy": os.urandom(5000),
    "wiki/b.npy": os.urandom(1),
    "code/c.npy": os.urandom(copy_targets.PIECE_BYTES + 17),
    "code/empty.npy": b"",
}
_SOURCES = [copy_lib.SourceFile(path, path.split("/")[0]) for path in _FILES]


def _checksum(content: bytes, algorithm: str = "xxh3") -> str:
  digest = checksums.new_hash(algorithm)
  digest.update(content)
  return f"{algorithm}:{digest.hexdigest()}"


class SelectTest(absltest.TestCase):

  def test_labels_patterns_and_numbers_of_files(self):
    def chosen(**options):
      return [file.path for file in copy_lib.select(_SOURCES, **options)]

    self.assertEqual(chosen(), list(_FILES))
    self.assertEqual(chosen(labels=["w*"]), ["wiki/a.npy", "wiki/b.npy"])
    self.assertEqual(chosen(patterns=["*/c.npy", "wiki/b*"]), ["wiki/b.npy", "code/c.npy"])
    self.assertEqual(chosen(first=1), ["wiki/a.npy", "code/c.npy"])
    self.assertEqual(chosen(labels=["wiki"], patterns=["*.npy"], first=1), ["wiki/a.npy"])

  def test_what_matches_nothing_is_an_error_with_examples(self):
    with self.assertRaisesRegex(ConfigError, "'web' matches no label.*code, wiki"):
      copy_lib.select(_SOURCES, labels=["wiki", "web"])
    with self.assertRaisesRegex(ConfigError, "'x' matches no file.*code/c.npy"):
      copy_lib.select(_SOURCES, patterns=["x"])


class CopyTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.base = pathlib.Path(self.create_tempdir().full_path)
    self.output = pathlib.Path(self.create_tempdir().full_path, "new", "folder")
    for path, content in _FILES.items():
      (self.base / path).parent.mkdir(exist_ok=True)
      (self.base / path).write_bytes(content)

  def copy(self, files=_SOURCES, base=None, **options):
    return copy_lib.copy_files(
        files, str(base or self.base), str(self.output), open_storage(), **options
    )

  def assert_copied(self):
    for path, content in _FILES.items():
      self.assertEqual((self.output / path).read_bytes(), content)
    self.assertEmpty(list(self.output.rglob("*.part")))

  def test_copies_have_the_paths_and_bytes_of_the_files(self):
    summary = self.copy(reread=True)
    self.assert_copied()
    total = sum(map(len, _FILES.values()))
    self.assertEqual(summary, copy_lib.CopySummary(copied=4, bytes=total, reread=4))

  def test_from_a_server_with_faults(self):
    objects = {f"bucket/{path}": content for path, content in _FILES.items()}
    with object_server.ObjectServer(objects) as server:
      server.faults = lambda number, path: "503" if number % 3 == 0 else ""
      self.copy(base=f"{server.url}/bucket")
    self.assert_copied()

  def test_a_second_run_copies_only_what_has_changed_or_is_missing(self):
    self.copy()
    os.unlink(self.output / "wiki/b.npy")
    (self.base / "code/empty.npy").write_bytes(b"new")
    summary = self.copy(reread=True)
    self.assertEqual((summary.copied, summary.skipped, summary.reread), (2, 2, 4))
    self.assertEqual((self.output / "code/empty.npy").read_bytes(), b"new")
    # A copy of the wrong size is not a copy.
    (self.output / "wiki/a.npy").write_bytes(b"short")
    self.assertEqual(self.copy().copied, 1)

  def test_a_partial_copy_is_continued(self):
    piece, content = copy_targets.PIECE_BYTES, os.urandom(2 * copy_targets.PIECE_BYTES + 17)
    large = [copy_lib.SourceFile("code/c.npy", "code")]
    with object_server.ObjectServer({"bucket/code/c.npy": content}) as server:
      third = f"bytes={2 * piece}-"
      server.faults = lambda n, path: "403" if server.requests[n][2].startswith(third) else ""
      with self.assertRaisesRegex(CorpusError, "1 of 1 files were not copied"):
        self.copy(large, base=f"{server.url}/bucket")
      (part,) = self.output.rglob("*.part")
      self.assertFalse((self.output / "code/c.npy").exists())
      # A power cut may lose what was written last, although the file has its size.
      with open(part, "r+b") as file:
        file.seek(piece)
        file.write(bytes(piece))
      server.faults = lambda number, path: ""
      summary = self.copy(large, base=f"{server.url}/bucket")
    self.assertEqual((summary.copied, summary.bytes), (1, piece + 17))
    self.assertEqual((self.output / "code/c.npy").read_bytes(), content)

  @parameterized.parameters("xxh3", "sha256")
  def test_checksums_of_an_index_are_compared(self, algorithm):
    right = _checksum(_FILES["wiki/a.npy"], algorithm)
    good = copy_lib.SourceFile("wiki/a.npy", "wiki", 5000, right)
    self.assertEqual(self.copy([good]).checked, 1)
    wrong = copy_lib.SourceFile("wiki/b.npy", "wiki", 1, _checksum(b"other", algorithm))
    with self.assertRaisesRegex(CorpusError, f"b.npy does not match .* expected {algorithm}:"):
      self.copy([wrong])
    self.assertFalse((self.output / "wiki/b.npy").exists())

  def test_a_file_that_is_not_the_one_of_the_index_is_an_error(self):
    with self.assertRaisesRegex(CorpusError, "a.npy has 5000 bytes, but the index recorded 4999"):
      self.copy([copy_lib.SourceFile("wiki/a.npy", "wiki", 4999)])
    with object_server.ObjectServer({"bucket/a.npy": b"0123"}) as server:
      with self.assertRaisesRegex(CorpusError, 'but the index recorded "old"'):
        self.copy([copy_lib.SourceFile("a.npy", "x", etag='"old"')], base=f"{server.url}/bucket")
      tag = server.etag("bucket/a.npy")
      self.copy([copy_lib.SourceFile("a.npy", "x", etag=tag)], base=f"{server.url}/bucket")

  def test_a_copy_that_differs_is_removed_and_reported(self):
    self.copy()
    (self.output / "wiki/a.npy").write_bytes(b"x" * 5000)
    with self.assertRaisesRegex(CorpusError, "a.npy differs from the source: expected xxh3:"):
      self.copy(reread=True)
    self.assertFalse((self.output / "wiki/a.npy").exists())
    self.assertEqual(self.copy().copied, 1)

  def test_missing_files_are_named_and_the_others_copied(self):
    missing = copy_lib.SourceFile("wiki/none.npy", "wiki")
    with self.assertRaisesRegex(MissingFileError, "(?s)1 of 5 files .*none.npy"):
      self.copy([missing, *_SOURCES])
    self.assert_copied()

  def test_sidecars_are_copied_where_they_are(self):
    (self.base / "wiki/a.csv.gz").write_bytes(b"names")
    self.copy(copy_lib.with_sidecars(_SOURCES))
    self.assert_copied()
    self.assertEqual((self.output / "wiki/a.csv.gz").read_bytes(), b"names")
    self.assertLen(list(self.output.rglob("*.csv.gz")), 1)

  def test_a_file_listed_twice_is_copied_once(self):
    self.assertEqual(self.copy([*_SOURCES, *_SOURCES]).copied, 4)

  @parameterized.parameters("../x.npy", "/abs/x.npy", "gs://bucket/x.npy")
  def test_files_outside_the_base_are_refused(self, path):
    with self.assertRaisesRegex(ConfigError, "not below the base"):
      self.copy([copy_lib.SourceFile(path, "x")])

  def test_the_manifest_lists_the_files_in_order(self):
    self.output.mkdir(parents=True)
    path = copy_lib.write_manifest(_SOURCES[:2], str(self.output))
    self.assertEqual(pathlib.Path(path).read_text(), "wiki,wiki/a.npy\nwiki,wiki/b.npy\n")


if __name__ == "__main__":
  absltest.main()
