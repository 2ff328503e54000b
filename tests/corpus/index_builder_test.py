"""Tests of building an index, and of index files."""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import shutil

import numpy as np
import xxhash
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.corpus import npy_header
from maxtext_olmo.corpus.index import compute_fingerprint
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.errors import MissingFileError
from tests import corpora

_MAXTEXT = pathlib.Path(__file__).parent.parent / "testdata" / "maxtext_index_v1.json"


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
        compute_fingerprint(4, "uint32", "allenai/t", [entry]),
        "sha256:f6d8cf186030d074c27b9fc44df98d5646341442c7861d45403ecf3f39527f43",
    )

  def test_the_fingerprint_covers_the_tokens_of_entries_without_a_size(self):
    prints = [
        compute_fingerprint(4, "uint32", "t", [index_lib.OlmoNpyFileEntry("a", "l", n, 0, 0)])
        for n in (0, 3, 4)
    ]
    self.assertLen(set(prints), 3)
    sized = index_lib.OlmoNpyFileEntry("a", "l", 4, 0, 0, size_bytes=16)
    self.assertEqual(compute_fingerprint(4, "uint32", "t", [sized]), prints[2])

  def test_only_regular_files_are_indexed(self):
    os.mkfifo(self.dir / "fifo")
    for path in (self.dir, self.dir / "fifo", "/dev/zero"):
      with self.assertRaisesRegex(CorpusError, f"{path} is not a regular file"):
        index_lib.build_index([(str(path), "l")], 4, tokenizer="t")

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
        MissingFileError, r"(?s)\(2 of 2 files\).*/no/a: No such.*/no/b: No such"
    ):
      index_lib.build_index([("/no/a", "l"), ("/no/b", "l")], 4, tokenizer="t")


class HeaderReaderTest(parameterized.TestCase):

  def test_a_header_reader_replaces_files_that_cannot_be_opened(self):
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

  def test_a_header_reader_receives_the_paths_as_given(self):
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
    self.assertEqual(build(npy_header.read_npy_header_from_path).files[0].data_offset, 128)
    with self.assertRaisesRegex(
        CorpusError, "x.npy: the header reader reports 9 tokens of uint32, but the file has 8"
    ):
      build(lambda _: ("uint32", (9,)))

  def test_dtypes_may_not_differ(self):
    dtypes = {"gs://b/x": "uint32", "gs://b/y": "uint16"}
    with self.assertRaisesRegex(CorpusError, "dtype: gs://b/x has uint32, gs://b/y has uint16"):
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
      ({"tokenizer": "u"}, "tokenizer: was 't', is 'u'"),
      ({"dtype": "uint16"}, "dtype: was 'uint32', is 'uint16'"),
      (
          {"max_target_sequence_length": 8},
          "windows: files were cut into windows of 4 tokens, and are now cut into windows of 8",
      ),
  )
  def test_another_stream_does_not_extend_the_older_one(self, changed, message):
    with self.assertRaisesRegex(CorpusError, rf"does not extend the older index:\n  {message}"):
      index_lib.build_index(self.files, 4, **{"tokenizer": "t", "extends": self.older, **changed})

  def test_new_files_must_come_after_the_old_ones(self):
    with self.assertRaisesRegex(
        CorpusError, r"removed: 0/x.npy \(32 bytes\)\n.*\nKeep the old files"
    ):
      index_lib.build_index(self.files[1:], 4, tokenizer="t", extends=self.older)
    with self.assertRaisesRegex(CorpusError, r"removed: 1/x.npy"):
      index_lib.build_index(self.files[:1], 4, tokenizer="t", extends=self.older)

  def test_another_sequence_length_with_the_same_windows_extends_it(self):
    older = index_lib.build_index(
        self.files[:2], 4, tokenizer="t", base=self.dir, max_target_sequence_length=8
    )
    longer = index_lib.build_index(
        self.files, 2, tokenizer="t", max_target_sequence_length=8, extends=older
    )
    self.assertEqual((longer.split_key, longer.split_windows), (older.split_key, 2))
    self.assertEqual(dataclasses.replace(longer, files=()).num_windows, 3)


class IndexFileTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)

  def _saved(self, **kwargs) -> pathlib.Path:
    path, _ = corpora.write_corpus(self.dir, **kwargs)
    return pathlib.Path(path)

  def _changed(self, change, source: pathlib.Path | None = None) -> pathlib.Path:
    values = json.loads((source or self._saved()).read_text())
    change(values)
    path = self.dir / "changed.json"
    path.write_text(json.dumps(values))
    return path

  def _error(self, path: pathlib.Path) -> str:
    with self.assertRaises(CorpusError) as caught:
      index_lib.load_index(path)
    return str(caught.exception)


class OwnFormatTest(IndexFileTest):

  @parameterized.parameters(None, "xxh3")
  def test_an_index_round_trips_through_a_file(self, checksums):
    files = [(corpora.write_tokens(self.dir / f"{i}.npy", 20 + i, seed=i), i) for i in range(3)]
    index = index_lib.build_index(
        [(str(self.dir / f"{i}.npy"), f"l{i}") for _, i in files],
        4,
        tokenizer="t",
        dtype="uint16",
        max_target_sequence_length=8,
        checksums=checksums,
    )
    index.save(path := self.dir / "index.json")
    self.assertEqual(index_lib.load_index(path), index)
    self.assertEqual(index_lib.load_index(str(path)), index)

  def test_a_file_is_one_line(self):
    lines = self._saved().read_text().splitlines()
    self.assertLen([line for line in lines if '"path"' in line], 4)

  def test_saving_leaves_no_other_files(self):
    self.assertCountEqual(os.listdir(self._saved().parent), ["data", "index.json"])

  def test_another_base_changes_only_the_location_of_files(self):
    path = self._saved()
    index, moved = index_lib.load_index(path), index_lib.load_index(path, base="/elsewhere/")
    self.assertEqual(moved.resolve(0), "/elsewhere/part-000.npy")
    self.assertEqual(moved.fingerprint, index.fingerprint)

  @parameterized.parameters(
      lambda values: values.update(sequence_length=4),
      lambda values: values.update(tokenizer="other"),
      lambda values: values.update(dtype="uint32"),
      lambda values: values.update(max_target_sequence_length=16),
      lambda values: values.update(fingerprint="sha256:0"),
      lambda values: values["files"].reverse(),
      lambda values: values["files"].pop(),
      lambda values: values["files"][1].update(path="part-009.npy"),
      lambda values: values["files"][1].update(size_bytes=4),
      lambda values: values["files"][1].update(data_offset=2),
  )
  def test_a_change_of_the_stream_is_detected(self, change):
    message = self._error(self._changed(change))
    self.assertRegex(
        message,
        "^The index .* is damaged or was edited by hand: its content has the fingerprint sha256:",
    )
    self.assertIn("Build the index again", message)

  @parameterized.parameters(
      (lambda v: v["files"][1].update(n_tokens=1), "n_tokens of part-001.npy must be 150, found 1"),
      (
          lambda v: v["files"][1].update(n_instances=2),
          "n_instances of part-001.npy must be 18, found 2",
      ),
      (
          lambda v: v["files"][1].update(instance_offset=9),
          "instance_offset of part-001.npy must be 41, found 9",
      ),
      (lambda v: v.update(total_instances=5), "total_instances must be 123, found 5"),
      (lambda v: v.update(total_tokens=5), "total_tokens must be 1004, found 5"),
      (
          lambda v: v.update(split_key="0" * 64),
          "the split key '000*' over 123 windows matches neither",
      ),
      (lambda v: v.update(split_windows=122), "the split key '[0-9a-f]*' over 122 windows"),
      (lambda v: v.update(sequence_length=0), "sequence_length must be positive, got 0"),
      (
          lambda v: v.update(max_target_sequence_length=12),
          "must be a multiple of sequence_length, got 12 and 8",
      ),
      (lambda v: v.update(dtype="float32"), "cannot have dtype 'float32'"),
  )
  def test_inconsistent_numbers_are_detected(self, change, message):
    self.assertRegex(self._error(self._changed(change)), f"^The index .* is damaged: .*{message}")

  @parameterized.parameters(
      (lambda v: v.update(surprise=1), "^Unknown field 'surprise' in the index .*/changed.json"),
      (
          lambda v: v["files"][2].update(surprise=1),
          "^Unknown field 'surprise' in file 2 of the index",
      ),
      (lambda v: v.pop("dtype"), "^Missing in the index .*: dtype"),
      (lambda v: v["files"][2].pop("label"), "^Missing in file 2 of the index .*: label"),
      (lambda v: v.update(sequence_length="8"), "^'sequence_length' cannot be '8' in the index"),
      (
          lambda v: v["files"][0].update(n_tokens=-1),
          "^'n_tokens' cannot be -1 in file 0 of the index",
      ),
      (lambda v: v["files"][0].update(path=None), "^'path' cannot be None in file 0"),
      (lambda v: v["files"][0].update(path="a\0b"), "^'path' cannot be .* in file 0"),
      (lambda v: v["files"][0].update(path="\ud800"), "^'path' cannot be .* in file 0"),
      (lambda v: v["files"][0].update(n_tokens=True), "^'n_tokens' cannot be True in file 0"),
      (lambda v: v["files"][0].update(size_bytes=1 << 63), "^'size_bytes' cannot be 9223"),
      (lambda v: v["files"][0].update(n_tokens=1.5), "^'n_tokens' cannot be 1.5 in file 0"),
      (lambda v: v.update(dtype="(1,i4"), "is damaged: Token files cannot have dtype"),
      (lambda v: v.update(files={}), "is not an index: expected an object with `files`"),
      (lambda v: v["files"].append([[[]]]), "^Expected an object for file 4"),
      (
          lambda v: v["files"].append("x"),
          "^Expected an object for file 4 of the index .*, found 'x'",
      ),
      (lambda v: v.pop("files"), "is not an index: expected an object with `files`"),
      (
          lambda v: v.update(format_version="7"),
          "has format_version '7'; expected '2', or MaxText's '1'",
      ),
  )
  def test_invalid_fields_are_detected(self, change, message):
    self.assertRegex(self._error(self._changed(change)), message)

  @parameterized.parameters("", "{", "[]", "7", "\x00\x01", 100_000 * "[", 100_000 * '{"files":')
  def test_a_file_that_is_not_an_index_is_an_error(self, content):
    path = self.dir / "x.json"
    path.write_text(content)
    self.assertRegex(self._error(path), r"^The index .*x\.json is not (valid JSON|an index): ")

  @parameterized.parameters("1", "2")
  def test_any_value_of_any_field_is_read_or_refused(self, version):
    source = self._saved() if version == "2" else _MAXTEXT
    values = json.loads(source.read_text())
    odd = (None, True, -1, 0, 1, 1 << 70, 1.5, float("inf"), "", "\0", "\ud800", [], {}, [[]])
    for field in values:
      for value in odd:
        path = self._changed(lambda v, f=field, o=value: v.update({f: o}), source)
        with contextlib.suppress(CorpusError):
          index_lib.load_index(path)
    for field in values["files"][0]:
      for value in odd:
        path = self._changed(lambda v, f=field, o=value: v["files"][0].update({f: o}), source)
        with contextlib.suppress(CorpusError):
          index_lib.load_index(path)

  def test_a_flipped_bit_changes_nothing_but_the_base(self):
    whole = self._saved().read_bytes()
    index = index_lib.load_index(self.dir / "index.json")
    path = self.dir / "flipped.json"
    for bit in np.random.default_rng(0).integers(0, 8 * len(whole), 100).tolist():
      flipped = bytearray(whole)
      flipped[bit // 8] ^= 1 << bit % 8
      path.write_bytes(flipped)
      with contextlib.suppress(CorpusError):
        found = index_lib.load_index(path)
        self.assertEqual(dataclasses.replace(found, base=index.base), index)

  @parameterized.parameters("label", "checksum")
  def test_labels_and_checksums_are_covered_too(self, field):
    change = lambda v: v["files"][1].update({field: "other"})  # noqa: E731
    self.assertRegex(self._error(self._changed(change)), "its labels and checksums have the hash")

  def test_an_index_of_the_first_releases_is_read(self):
    path = self._changed(lambda v: v.pop("annotations"))
    self.assertEqual(index_lib.load_index(path), index_lib.load_index(self.dir / "index.json"))

  def test_a_directory_or_fifo_is_not_an_index(self):
    os.mkfifo(self.dir / "fifo")
    for path in (self.dir, self.dir / "fifo"):
      self.assertRegex(self._error(path), "^Cannot read the index .* is not a regular file")

  def test_a_missing_index_is_an_error(self):
    with self.assertRaises(FileNotFoundError):
      index_lib.load_index(self.dir / "none" / "none.json")
    self.assertRegex(
        self._error(self.dir / "none.json"),
        r"^Cannot read the index .*none\.json: No such file or directory\. `maxtext-olmo index"
        r" build` makes one",
    )


class MaxTextFormatTest(IndexFileTest):

  def test_maxtexts_own_index_is_loaded(self):
    index = index_lib.load_index(_MAXTEXT)
    self.assertEqual(index.base, "/corpus")
    self.assertEqual(
        index.files,
        (
            index_lib.OlmoNpyFileEntry("web/a.npy", "web", 1000, 15, 0, 4000, 0),
            index_lib.OlmoNpyFileEntry("web/b.npy", "web", 7, 0, 15, 28, 0),
            index_lib.OlmoNpyFileEntry("code/c.npy", "code", 4096, 64, 15, 16384, 0),
        ),
    )
    self.assertEqual(
        (index.format_version, index.total_instances, index.total_tokens), ("2", 79, 5103)
    )
    self.assertEqual(index.split_windows, 79)

  def test_it_has_the_fingerprint_of_an_index_built_by_this_library(self):
    loaded = index_lib.load_index(_MAXTEXT, base=self.dir)
    for entry in loaded.files:
      corpora.write_tokens(self.dir / entry.path, entry.n_tokens, seed=0, dtype="uint32")
    built = index_lib.build_index(
        [(entry.path, entry.label) for entry in loaded.files],
        64,
        tokenizer="allenai/dolma3-tokenizer",
        base=self.dir,
    )
    self.assertEqual(built, loaded)

  def test_it_can_be_saved_in_our_format(self):
    index = index_lib.load_index(_MAXTEXT)
    index.save(path := self.dir / "own.json")
    self.assertEqual(index_lib.load_index(path), index)

  def test_the_header_of_an_existing_file_is_skipped(self):
    index = index_lib.load_index(_MAXTEXT)
    for entry in index.files:
      (self.dir / entry.path).parent.mkdir(exist_ok=True)
      np.save(self.dir / entry.path, np.zeros(entry.n_tokens, np.uint32))
    there = index_lib.load_index(_MAXTEXT, base=self.dir)
    self.assertEqual([entry.data_offset for entry in there.files], [128] * 3)
    self.assertEqual([entry.size_bytes for entry in there.files], [4128, 156, 16512])
    np.save(self.dir / "web" / "a.npy", np.zeros(1000, np.uint16))
    with self.assertRaisesRegex(
        CorpusError, r"(?s)cannot be used \(1 of 3 files\).*web/a\.npy has a .*says dtype uint16"
    ):
      index_lib.load_index(_MAXTEXT, base=self.dir)

  @parameterized.parameters(
      lambda values: values.update(sequence_length=32),
      lambda values: values["files"][0].update(n_tokens=1001),
      lambda values: values["files"][0].update(path="/corpus/other.npy"),
  )
  def test_damage_is_found_by_maxtexts_own_fingerprint(self, change):
    self.assertRegex(
        self._error(self._changed(change, _MAXTEXT)),
        "is damaged or was edited by hand: .* sha256:584bdaa9",
    )

  def test_inconsistent_numbers_are_detected(self):
    path = self._changed(lambda values: values["files"][2].update(instance_offset=16), _MAXTEXT)
    self.assertRegex(
        self._error(path), "instance_offset of code/c.npy must be 15, found 16|must be 15, found 16"
    )

  def test_a_url_is_only_a_prefix(self):
    def change(values):
      for entry in values["files"]:
        entry["path"] = entry["path"].replace("/corpus", "gs://bucket/olmo")
      values["fingerprint"] = _maxtext_fingerprint(values)

    index = index_lib.load_index(self._changed(change, _MAXTEXT))
    self.assertEqual((index.base, index.files[0].path), ("gs://bucket/olmo", "web/a.npy"))
    self.assertEqual(index.fingerprint, index_lib.load_index(_MAXTEXT).fingerprint)


def _maxtext_fingerprint(values) -> str:
  digest = hashlib.sha256()
  for part in ("1", str(values["sequence_length"]), values["dtype"], values["tokenizer"]):
    digest.update(part.encode() + b"\x00")
  for entry in values["files"]:
    digest.update(entry["path"].encode() + b"\x00" + str(entry["n_tokens"]).encode() + b"\x00")
  return "sha256:" + digest.hexdigest()


if __name__ == "__main__":
  absltest.main()
