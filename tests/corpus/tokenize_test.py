"""Tests of making a corpus from text."""

import csv
import gzip
import itertools
import os
import pathlib
import tracemalloc

import hypothesis
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import strategies as st

from maxtext_olmo.corpus import manifest as manifest_lib
from maxtext_olmo.corpus import tokenize
from maxtext_olmo.corpus import tokenizer as tokenizer_lib
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.errors import WriteError

_BYTES = tokenizer_lib.ByteTokenizer()


class MakeCorpusTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)

  def _tokens(self, mix_file: str) -> dict[str, list[np.ndarray]]:
    found: dict[str, list[np.ndarray]] = {}
    for entry in manifest_lib.read_mix(mix_file, tokenizer="bytes"):
      tokens = np.fromfile(pathlib.Path(mix_file).parent / entry.path, "<u2")
      found.setdefault(entry.label, []).append(tokens)
    return found

  def test_documents_become_raw_token_files_and_a_manifest(self):
    summary = tokenize.make_corpus(
        {"web": ["hi", "", "é"], "code": iter(["x"])}, self.dir / "out", _BYTES, tokens_per_file=3
    )
    self.assertEqual(
        (self.dir / "out" / "mix.txt").read_text(),
        "web,{TOKENIZER}/web/part-00000.npy\n"
        "web,{TOKENIZER}/web/part-00001.npy\n"
        "code,{TOKENIZER}/code/part-00000.npy\n",
    )
    self.assertEqual(
        (self.dir / "out" / "bytes" / "web" / "part-00000.npy").read_bytes(), b"h\0i\0\0\x01"
    )
    tokens = self._tokens(summary.mix_file)
    self.assertEqual([part.tolist() for part in tokens["web"]], [[104, 105, 256], [195, 169, 256]])
    self.assertEqual(
        summary,
        tokenize.CorpusSummary(
            mix_file=str(self.dir / "out" / "mix.txt"),
            tokenizer="bytes",
            dtype="uint16",
            vocab_size=258,
            eos_id=256,
            files=3,
            documents=3,
            empty_documents=1,
            tokens=8,
        ),
    )

  @hypothesis.given(
      documents=st.lists(
          st.text(st.characters(exclude_categories=["Cs"]), max_size=9), min_size=1
      ).filter(any),
      tokens_per_file=st.integers(1, 30),
  )
  @hypothesis.settings(max_examples=40, deadline=None)
  def test_parts_contain_all_documents_whole_and_in_order(self, documents, tokens_per_file):
    summary = tokenize.make_corpus(
        {"l": documents}, self.dir / "out", _BYTES, tokens_per_file=tokens_per_file, overwrite=True
    )
    parts = self._tokens(summary.mix_file)["l"]
    expected = [[*document.encode(), 256] for document in documents if document]
    self.assertEqual(np.concatenate(parts).tolist(), list(itertools.chain(*expected)))
    for part in parts:
      self.assertEqual(part[-1], 256)
      last = part[:-1].tolist()
      before = len(last) - last[::-1].index(256) if 256 in last else 0
      self.assertLess(before, tokens_per_file)  # It was not full before its last document.
    self.assertTrue(all(len(part) >= tokens_per_file for part in parts[:-1]))

  def test_memory_does_not_grow_with_the_corpus(self):
    document = "x" * 10_000
    tokenize.make_corpus({"l": [document]}, self.dir / "warm", _BYTES)
    tracemalloc.start()
    self.addCleanup(tracemalloc.stop)
    tokenize.make_corpus({"l": (document for _ in range(3000))}, self.dir / "out", _BYTES)
    self.assertLess(tracemalloc.get_traced_memory()[1], 12 << 20)
    self.assertGreater(
        (self.dir / "out" / "bytes" / "l" / "part-00000.npy").stat().st_size, 60_000_000
    )

  def test_a_failed_corpus_leaves_no_files(self):
    def broken():
      yield "a" * 100
      yield "b" * (2 << 20)
      raise RuntimeError("no more")

    with self.assertRaisesRegex(RuntimeError, "no more"):
      tokenize.make_corpus({"l": broken()}, self.dir / "new" / "out", _BYTES, tokens_per_file=50)
    self.assertEmpty(os.listdir(self.dir))

  def test_an_existing_directory_is_kept(self):
    (self.dir / "out").mkdir()
    with self.assertRaisesRegex(CorpusError, r"no document .* No corpus was written to .*\. Fix"):
      tokenize.make_corpus({"l": [""]}, self.dir / "out", _BYTES)
    self.assertEmpty(os.listdir(self.dir / "out"))

  def test_documents_have_boundaries_names_sources_and_lines(self):
    some = [tokenize.TextDocument("hi", "id,1", "a\n.txt", 7), "", "é", tokenize.TextDocument("x")]
    tokenize.make_corpus({"web": some}, self.dir, _BYTES, tokens_per_file=4)
    folder = self.dir / "bytes" / "web"
    self.assertCountEqual(
        os.listdir(folder),
        ["part-00000.csv.gz", "part-00000.npy", "part-00001.csv.gz", "part-00001.npy"],
    )
    with gzip.open(folder / "part-00000.csv.gz", "rt", newline="") as file:
      self.assertEqual(
          list(csv.reader(file)), [["0", "3", "id,1", "a\n.txt", "7"], ["3", "6", "", "", ""]]
      )
    with gzip.open(folder / "part-00001.csv.gz", "rt", newline="") as file:
      self.assertEqual(list(csv.reader(file)), [["0", "2", "", "", ""]])

  def test_equal_documents_give_equal_files(self):
    made = []
    for name in ("one", "two"):
      tokenize.make_corpus(
          {"l": [tokenize.TextDocument("x", "n", "s", 1)]}, self.dir / name, _BYTES
      )
      files = sorted(path for path in (self.dir / name).rglob("*") if path.is_file())
      made.append([path.read_bytes() for path in files])
    self.assertLen(made[0], 3)
    self.assertEqual(*made)

  def test_a_corpus_is_replaced_only_with_overwrite(self):
    tokenize.make_corpus({"l": ["old"]}, self.dir, _BYTES)
    with self.assertRaisesRegex(ConfigError, r"already contains a corpus \(it has a mix\.txt\)"):
      tokenize.make_corpus({"l": ["new"]}, self.dir, _BYTES)
    summary = tokenize.make_corpus({"l": ["new"]}, self.dir, _BYTES, overwrite=True)
    self.assertEqual(self._tokens(summary.mix_file)["l"][0].tobytes(), b"n\0e\0w\0\0\x01")

  def test_a_failed_replacement_leaves_the_old_corpus_unchanged(self):
    summary = tokenize.make_corpus({"l": ["old"]}, self.dir, _BYTES)
    before = {path: path.read_bytes() for path in self.dir.rglob("*") if path.is_file()}
    with self.assertRaisesRegex(CorpusError, "The label 'm' has no document with text in it"):
      tokenize.make_corpus({"l": ["new"], "m": [""]}, self.dir, _BYTES, overwrite=True)
    after = {path: path.read_bytes() for path in self.dir.rglob("*") if path.is_file()}
    self.assertEqual(after, before)
    self.assertLen(self._tokens(summary.mix_file)["l"], 1)

  def test_a_path_in_the_way_is_an_error_and_writes_no_manifest(self):
    (self.dir / "bytes" / "l" / "part-00000.npy").mkdir(parents=True)
    with self.assertRaisesRegex(WriteError, "not a regular file.* No corpus was written"):
      tokenize.make_corpus({"l": ["new"]}, self.dir, _BYTES)
    self.assertEqual(os.listdir(self.dir), ["bytes"])

  def test_no_documents_are_an_error(self):
    with self.assertRaisesRegex(CorpusError, "There are no documents to make a corpus from"):
      tokenize.make_corpus({}, self.dir, _BYTES)

  @parameterized.parameters("", "a,b", "a/b", "..", "a b", "{TOKENIZER}", "#a")
  def test_labels_that_a_manifest_cannot_hold_are_errors(self, label):
    with self.assertRaisesRegex(ConfigError, r"cannot be a label: .*\(LABEL=PATH\)"):
      tokenize.make_corpus({label: ["x"]}, self.dir, _BYTES)

  def test_tokens_per_file_must_be_positive(self):
    with self.assertRaisesRegex(ConfigError, "tokens_per_file must be positive, got 0"):
      tokenize.make_corpus({"l": ["x"]}, self.dir, _BYTES, tokens_per_file=0)


if __name__ == "__main__":
  absltest.main()
