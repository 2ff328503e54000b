"""Tests of index files."""

import hashlib
import json
import os
import pathlib

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.errors import CorpusError
from tests import corpora

_MAXTEXT = pathlib.Path(__file__).parent.parent / "testdata" / "maxtext_index_v1.json"


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
  def test_what_is_saved_is_loaded(self, checksums):
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

  def test_saving_leaves_nothing_else_behind(self):
    self.assertCountEqual(os.listdir(self._saved().parent), ["data", "index.json"])

  def test_another_base_changes_only_where_files_are(self):
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
  def test_a_change_of_the_stream_is_found(self, change):
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
      (lambda v: v.update(split_key="0" * 64), "the split key '000*' over 123 windows is neither"),
      (lambda v: v.update(split_windows=122), "the split key '[0-9a-f]*' over 122 windows"),
      (lambda v: v.update(sequence_length=0), "sequence_length must be positive, got 0"),
      (
          lambda v: v.update(max_target_sequence_length=12),
          "must be a multiple of sequence_length, got 12 and 8",
      ),
      (lambda v: v.update(dtype="float32"), "cannot have dtype 'float32'"),
  )
  def test_numbers_that_do_not_follow_are_found(self, change, message):
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
      (
          lambda v: v["files"].append("x"),
          "^Expected an object for file 4 of the index .*, found 'x'",
      ),
      (lambda v: v.pop("files"), "is not an index: expected an object with `files`"),
      (
          lambda v: v.update(format_version="7"),
          "has format_version '7'; '2' and MaxText's '1' can be read",
      ),
  )
  def test_fields_that_cannot_be_are_found(self, change, message):
    self.assertRegex(self._error(self._changed(change)), message)

  @parameterized.parameters("", "{", "[]", "\x00\x01")
  def test_what_is_no_index_is_an_error(self, content):
    path = self.dir / "x.json"
    path.write_text(content)
    self.assertRegex(self._error(path), r"^The index .*x\.json is not (valid JSON|an index): ")

  def test_a_missing_index_is_an_error(self):
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

  def test_it_has_the_fingerprint_of_an_index_that_is_built_here(self):
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

  def test_it_can_be_saved_as_ours(self):
    index = index_lib.load_index(_MAXTEXT)
    index.save(path := self.dir / "own.json")
    self.assertEqual(index_lib.load_index(path), index)

  def test_a_header_of_a_file_that_is_there_is_skipped(self):
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

  def test_numbers_that_do_not_follow_are_found(self):
    path = self._changed(lambda values: values["files"][2].update(instance_offset=16), _MAXTEXT)
    self.assertRegex(
        self._error(path), "instance_offset of code/c.npy must be 15, found 16|must be 15, found 16"
    )

  def test_an_object_store_is_only_a_prefix(self):
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
