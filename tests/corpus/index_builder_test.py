"""Tests of building an index."""

import dataclasses
import os
import pathlib
import shutil

import numpy as np
import xxhash
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError


def _write(
    path: pathlib.Path, n_tokens: int, dtype: str = "uint32", *, header: bool = False
) -> str:
  path.parent.mkdir(parents=True, exist_ok=True)
  tokens = np.arange(n_tokens).astype(dtype)
  np.save(path, tokens) if header else tokens.tofile(path)
  return str(path)


class BuildIndexTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)

  def _corpus(self, base: pathlib.Path | None = None) -> list[tuple[str, str]]:
    base = base or self.dir
    return [
        (_write(base / "web" / "a.npy", 11), "web"),
        (_write(base / "web" / "b.npy", 3), "web"),
        (_write(base / "code" / "c.npy", 9, header=True), "code"),
    ]

  def test_each_file_gives_the_instances_that_fit_in_manifest_order(self):
    index = index_lib.build_index(self._corpus(), 4, tokenizer="t")
    self.assertEqual(
        index.files,
        (
            index_lib.OlmoNpyFileEntry("web/a.npy", "web", 11, 2, 0, 44, 0),
            index_lib.OlmoNpyFileEntry("web/b.npy", "web", 3, 0, 2, 12, 0),
            index_lib.OlmoNpyFileEntry("code/c.npy", "code", 9, 2, 2, 164, 128),
        ),
    )
    self.assertEqual((index.total_instances, index.total_tokens), (4, 23))
    self.assertEqual((index.base, index.dtype), (str(self.dir), "uint32"))
    self.assertEqual((index.format_version, index.tokenizer), ("2", "t"))
    self.assertEqual([index.resolve(i) for i in range(3)], [path for path, _ in self._corpus()])

  def test_windows_of_the_longest_length_are_cut_first(self):
    index = index_lib.build_index(self._corpus(), 2, tokenizer="t", max_target_sequence_length=8)
    self.assertEqual([entry.n_instances for entry in index.files], [4, 0, 4])
    self.assertEqual((index.chunk_size, index.num_windows), (4, 2))

  def test_the_fingerprint_does_not_depend_on_the_mount(self):
    first = index_lib.build_index(self._corpus(), 4, tokenizer="t")
    shutil.copytree(
        self.dir, moved := self.dir / "moved" / "here", ignore=shutil.ignore_patterns("moved")
    )
    second = index_lib.build_index(self._corpus(moved), 4, tokenizer="t")
    self.assertEqual(first.fingerprint, second.fingerprint)
    self.assertEqual(first.split_key, second.split_key)
    self.assertNotEqual(first.base, second.base)

  def test_the_fingerprint_covers_what_decides_the_stream(self):
    files = self._corpus()
    build = lambda files, s=4, **kwargs: index_lib.build_index(  # noqa: E731
        files, s, **{"tokenizer": "t", "base": self.dir, **kwargs}
    )
    index = build(files)
    same = [
        build([(path, "other label") for path, _ in files]),
        build(files, checksums="xxh3"),
        build(files, workers=1),
        build(files, max_target_sequence_length=4),
        build(files, 2, max_target_sequence_length=4),
        build([(os.path.relpath(path, self.dir), label) for path, label in files]),
    ]
    other = [
        build(files, 2),
        build(files, tokenizer="u"),
        build(files, max_target_sequence_length=8),
        build(files[::-1]),
        build(files[:2]),
        build([(_write(self.dir / "web" / "d.npy", 11), "web"), *files[1:]]),
        build([(_write(self.dir / "web" / "a.npy", 12), "web"), *files[1:]]),
        build(
            [(_write(self.dir / "web" / "a.npy", 11, "uint16"), "web"), files[1]], dtype="uint16"
        ),
    ]
    self.assertEqual({found.fingerprint for found in same}, {index.fingerprint})
    self.assertLen({found.fingerprint for found in other} | {index.fingerprint}, len(other) + 1)
    self.assertRegex(index.fingerprint, r"^sha256:[0-9a-f]{64}$")

  def test_the_fingerprint_is_the_same_in_every_version_of_this_library(self):
    entry = index_lib.OlmoNpyFileEntry("wéb/a.npy", "web", 3, 0, 0, 13, 1)
    self.assertEqual(
        index_lib.compute_fingerprint(4, "uint32", "allenai/t", [entry]),
        "sha256:f6d8cf186030d074c27b9fc44df98d5646341442c7861d45403ecf3f39527f43",
    )

  @parameterized.parameters("uint8", "uint16", "uint32", "uint64")
  def test_every_dtype_and_odd_bytes_at_the_end(self, dtype):
    itemsize = np.dtype(dtype).itemsize
    path = self.dir / "x.npy"
    path.write_bytes(b"x" * (10 * itemsize + itemsize - 1))
    index = index_lib.build_index([(str(path), "l")], 4, tokenizer="t", dtype=dtype)
    self.assertEqual(index.files[0].n_tokens, 10)
    self.assertEqual(index.files[0].size_bytes, 11 * itemsize - 1)

  def test_a_header_of_another_dtype_is_an_error(self):
    path = _write(self.dir / "x.npy", 4, "uint16", header=True)
    with self.assertRaisesRegex(
        CorpusError, "x.npy has a .npy header that says dtype uint16; expected uint32"
    ):
      index_lib.build_index([(path, "l")], 4, tokenizer="t")

  def test_signed_headers_of_the_same_size_are_fine(self):
    path = _write(self.dir / "x.npy", 4, "int32", header=True)
    index = index_lib.build_index([(path, "l")], 4, tokenizer="t")
    self.assertEqual((index.dtype, index.total_instances), ("uint32", 1))

  def test_files_beyond_four_gigabytes(self):
    path = self.dir / "big.npy"
    with open(path, "wb") as file:
      file.truncate((5 << 30) + 6)
    index = index_lib.build_index([(str(path), "l")] * 2, 8192, tokenizer="t")
    self.assertEqual(index.files[0].size_bytes, (5 << 30) + 6)
    self.assertEqual(index.total_instances, 2 * (5 << 30) // 4 // 8192)
    files, offsets = index.locate(np.array([index.total_instances - 1]))
    self.assertEqual((files[0], offsets[0]), (1, (5 << 30) - 8192 * 4))

  def test_a_file_may_occur_twice(self):
    path = _write(self.dir / "x.npy", 8)
    index = index_lib.build_index([(path, "l"), (path, "l")], 4, tokenizer="t")
    self.assertEqual(index.total_instances, 4)

  def test_files_outside_the_base_keep_their_full_path(self):
    inside, outside = _write(self.dir / "a" / "x.npy", 4), _write(self.dir / "b" / "y.npy", 4)
    index = index_lib.build_index(
        [(inside, "l"), (outside, "l"), ("../b/y.npy", "l")], 4, tokenizer="t", base=self.dir / "a"
    )
    self.assertEqual([entry.path for entry in index.files], ["x.npy", outside, outside])
    self.assertEqual(index.resolve(1), outside)

  def test_relative_paths_count_from_the_working_directory_without_a_base(self):
    _write(self.dir / "x.npy", 4)
    before = os.getcwd()
    self.addCleanup(os.chdir, before)
    os.chdir(self.dir)
    index = index_lib.build_index([("x.npy", "l")], 4, tokenizer="t")
    os.chdir(before)
    self.assertTrue(os.path.exists(index.resolve(0)))

  def test_checksums_are_recorded(self):
    files = self._corpus()
    index = index_lib.build_index(files, 4, tokenizer="t", checksums="xxh3")
    content = pathlib.Path(files[2][0]).read_bytes()
    self.assertEqual(index.files[2].checksum, "xxh3:" + xxhash.xxh3_128(content).hexdigest())

  @parameterized.parameters(
      (0, None, "sequence_length must be positive, got 0"),
      (4, 2, "max_target_sequence_length must be a multiple of sequence_length, got 2 and 4"),
      (4, 6, "max_target_sequence_length must be a multiple of sequence_length, got 6 and 4"),
  )
  def test_lengths_must_fit(self, length, longest, message):
    with self.assertRaisesRegex(ConfigError, message):
      index_lib.build_index([("x", "l")], length, tokenizer="t", max_target_sequence_length=longest)

  def test_no_files_is_an_error(self):
    with self.assertRaisesRegex(CorpusError, "There are no files to index"):
      index_lib.build_index([], 4, tokenizer="t")

  def test_missing_files_are_all_named(self):
    with self.assertRaisesRegex(
        CorpusError, r"(?s)\(2 of 2 files\).*/no/a: No such.*/no/b: No such"
    ):
      index_lib.build_index([("/no/a", "l"), ("/no/b", "l")], 4, tokenizer="t")


class HeaderReaderTest(parameterized.TestCase):

  def test_a_reader_serves_for_files_that_cannot_be_opened_here(self):
    shapes = {"gs://b/a.npy": (11,), "gs://b/c/b.npy": (9,)}
    index = index_lib.build_index(
        [(path, "l") for path in shapes],
        4,
        tokenizer="t",
        header_reader=lambda path: ("uint16", shapes[path]),
    )
    self.assertEqual((index.dtype, index.base, index.total_instances), ("uint16", "gs://b", 4))
    self.assertEqual([entry.path for entry in index.files], ["a.npy", "c/b.npy"])
    self.assertEqual([entry.size_bytes for entry in index.files], [22, 18])

  def test_a_reader_gets_the_paths_as_they_were_given(self):
    seen = []
    index_lib.build_index(
        [("a.npy", "l")],
        4,
        tokenizer="t",
        header_reader=lambda path: seen.append(path) or ("uint32", (8,)),
    )
    self.assertEqual(seen, ["a.npy"])

  def test_a_local_file_must_agree_with_the_reader(self):
    directory = pathlib.Path(self.create_tempdir().full_path)
    path = _write(directory / "x.npy", 8, header=True)
    build = lambda reader: index_lib.build_index(  # noqa: E731
        [(path, "l")], 4, tokenizer="t", header_reader=reader
    )
    self.assertEqual(build(index_lib.read_npy_header_from_path).files[0].data_offset, 128)
    with self.assertRaisesRegex(
        CorpusError, "x.npy: the header reader says 9 tokens of uint32, the file holds 8"
    ):
      build(lambda _: ("uint32", (9,)))

  def test_dtypes_may_not_differ(self):
    dtypes = {"gs://b/x": "uint32", "gs://b/y": "uint16"}
    with self.assertRaisesRegex(CorpusError, "one dtype: gs://b/x has uint32, gs://b/y has uint16"):
      index_lib.build_index(
          [(path, "l") for path in dtypes],
          4,
          tokenizer="t",
          header_reader=lambda p: (dtypes[p], (4,)),
      )

  def test_shapes_must_be_flat(self):
    with self.assertRaisesRegex(
        CorpusError, r"gs://b/x has shape \(2, 2\); expected one dimension"
    ):
      index_lib.build_index(
          [("gs://b/x", "l")], 4, tokenizer="t", header_reader=lambda _: ("uint32", (2, 2))
      )


class ExtendsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)
    self.files = [(_write(self.dir / f"{i}" / "x.npy", 8), "l") for i in range(3)]
    self.older = index_lib.build_index(self.files[:2], 4, tokenizer="t", base=self.dir)

  def test_appended_files_keep_the_split(self):
    longer = index_lib.build_index(self.files, 4, tokenizer="t", extends=self.older)
    self.assertEqual(longer.split_key, self.older.split_key)
    self.assertEqual((longer.split_windows, longer.num_windows), (4, 6))
    self.assertNotEqual(longer.fingerprint, self.older.fingerprint)
    longer.save(path := self.dir / "index.json")
    self.assertEqual(index_lib.load_index(path), longer)
    fresh = index_lib.build_index(self.files, 4, tokenizer="t", base=self.dir)
    self.assertEqual(fresh.fingerprint, longer.fingerprint)
    self.assertNotEqual(fresh.split_key, longer.split_key)
    self.assertEqual(fresh.split_windows, 6)

  @parameterized.parameters(
      ({"tokenizer": "u"}, "tokenizer was 't', now 'u'"),
      ({"dtype": "uint16"}, "dtype was 'uint32', now 'uint16'"),
      ({"max_target_sequence_length": 8}, "its windows had 4 tokens, now 8"),
  )
  def test_another_stream_does_not_continue_the_older_one(self, changed, message):
    with self.assertRaisesRegex(CorpusError, f"does not continue the older index: {message}"):
      index_lib.build_index(self.files, 4, **{"tokenizer": "t", "extends": self.older, **changed})

  def test_files_go_behind_the_old_ones(self):
    with self.assertRaisesRegex(
        CorpusError,
        r"file 0 was 0/x.npy \(32 bytes, tokens from byte 0\), now 1/x.npy \(32 bytes",
    ):
      index_lib.build_index(self.files[1:], 4, tokenizer="t", extends=self.older)
    with self.assertRaisesRegex(CorpusError, r"file 1 was 1/x.npy .*, now missing\."):
      index_lib.build_index(self.files[:1], 4, tokenizer="t", extends=self.older)

  def test_another_sequence_length_of_the_same_windows_continues(self):
    older = index_lib.build_index(
        self.files[:2], 4, tokenizer="t", base=self.dir, max_target_sequence_length=8
    )
    longer = index_lib.build_index(
        self.files, 2, tokenizer="t", max_target_sequence_length=8, extends=older
    )
    self.assertEqual((longer.split_key, longer.split_windows), (older.split_key, 2))
    self.assertEqual(dataclasses.replace(longer, files=()).num_windows, 3)


if __name__ == "__main__":
  absltest.main()
