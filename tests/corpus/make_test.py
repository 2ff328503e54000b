"""Tests of making a corpus from text files, with many workers."""

import importlib.util
import os
import pathlib

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.corpus import make
from maxtext_olmo.corpus import text_files
from maxtext_olmo.corpus import text_inputs
from maxtext_olmo.corpus import tokenize
from maxtext_olmo.corpus import tokenizer as tokenizer_lib
from maxtext_olmo.corpus.storage import stores
from maxtext_olmo.corpus.work import options as options_lib
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.errors import StoreUnavailableError
from maxtext_olmo.errors import WriteError
from tests import object_server
from tests import texts

STARTS_PROCESSES = True

_BYTES = tokenizer_lib.TokenizerSource.find("bytes")


class MakeFromFilesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)

  def make(self, files, name="out", workers=1, overwrite=False, **settings):
    out = self.dir / name
    given = {"tokenizer": _BYTES, **settings}
    options = options_lib.WorkOptions(
        workers=workers, results=options_lib.default_results(str(out))
    )
    return make.make_from_files(
        files, out, make.MakeSettings(**given), options, overwrite=overwrite
    )

  def reference(self, files, name, settings):
    """Makes a corpus with one writer of all documents."""
    form = settings.get("form", text_files.TextFormat())
    documents = {
        label: [
            document
            for path in some
            for document in text_files.read_documents(
                path, separator=form.separator, text_field=form.text_field, id_field=form.id_field
            )
        ]
        for label, some in files.items()
    }
    tokenizer = settings.get("tokenizer", _BYTES).load()
    tokens_per_file = settings.get("tokens_per_file", tokenize.DEFAULT_TOKENS_PER_FILE)
    return tokenize.make_corpus(
        documents, self.dir / name, tokenizer, tokens_per_file=tokens_per_file
    )

  def test_ten_megabytes_are_the_same_with_any_number_of_workers(self):
    files = texts.write_texts(self.dir / "text", 10_000_000)
    source = tokenizer_lib.TokenizerSource.find(texts.save_tokenizer(self.dir / "words"))
    settings = {
        "tokenizer": source,
        "form": text_files.TextFormat(separator="##"),
        "tokens_per_file": 300_000,
    }
    expected = self.reference(files, "reference", settings)
    wanted = texts.read_tree(self.dir / "reference")
    self.assertGreater(len(wanted), 10)
    for workers in (1, 4):
      summary = self.make(files, f"out{workers}", workers, unit_bytes=1 << 20, **settings)
      self.assertEqual(texts.read_tree(self.dir / f"out{workers}"), wanted)
      self.assertEqual(summary.tokens, expected.tokens)
      self.assertEqual(summary.documents, expected.documents)
      self.assertEqual(summary.files, expected.files)

  def serve(self, folder, **options):
    """Serves the files below a directory as `s3://b/...`."""
    content = {f"b/{name}": data for name, data in texts.read_tree(folder).items()}
    server = self.enter_context(object_server.ObjectServer(content))
    self.addCleanup(stores.use_by_default, stores.StoreOptions())
    stores.use_by_default(stores.StoreOptions(server.url, "here", anonymous=True, **options))
    return server

  @parameterized.parameters(1, 2)
  def test_text_in_a_bucket_gives_the_tokens_of_local_text(self, workers):
    folder = self.dir / "text"
    texts.write_texts(folder, 4000)
    if importlib.util.find_spec("pyarrow") is not None:
      import pyarrow
      from pyarrow import parquet

      table = pyarrow.table({"text": list(texts.random_texts(3000, 10))})
      parquet.write_table(table, folder / "x.parquet", row_group_size=2)
    self.make(text_inputs.find_inputs([f"l={folder}"]), "local", unit_bytes=300)
    self.serve(folder)
    self.make(text_inputs.find_inputs(["l=s3://b"]), workers=workers, unit_bytes=300)
    found, expected = (texts.read_tree(self.dir / name) for name in ("out", "local"))
    tokens = [name for name in expected if name.endswith(".npy")]
    self.assertNotEmpty(tokens)
    self.assertEqual(found.keys(), expected.keys())
    self.assertEqual([found[name] for name in tokens], [expected[name] for name in tokens])

  @parameterized.parameters("HEAD", "GET")
  def test_a_silent_store_leaves_no_text_out(self, method):
    folder = self.dir / "text"
    texts.write_texts(folder, 4000)
    server = self.serve(folder, patience=0.2, first_patience=0.2)
    files = text_inputs.find_inputs(["l=s3://b"])
    server.faults = lambda number, path: "503" if server.requests[number][0] == method else ""
    with self.assertRaises(StoreUnavailableError):
      self.make(files, skip_unreadable=True)
    server.faults = lambda number, path: ""
    self.assertEmpty(self.make(files, skip_unreadable=True).skipped)

  @parameterized.parameters((40, 60), (300, 1 << 28), (None, 700))
  def test_files_are_those_of_one_writer(self, unit_bytes, tokens_per_file):
    files = texts.write_texts(self.dir / "text", 2000)
    form = text_files.TextFormat(separator="##")
    settings = {"form": form, "tokens_per_file": tokens_per_file}
    expected = self.reference(files, "reference", settings)
    summary = self.make(files, unit_bytes=unit_bytes, **settings)
    self.assertEqual(texts.read_tree(self.dir / "out"), texts.read_tree(self.dir / "reference"))
    self.assertEqual(
        (summary.documents, summary.empty_documents, summary.tokens, summary.files),
        (expected.documents, expected.empty_documents, expected.tokens, expected.files),
    )
    self.assertCountEqual(os.listdir(self.dir), ["out", "reference", "text"])

  @absltest.skipIf(
      importlib.util.find_spec("pyarrow") is None or importlib.util.find_spec("zstandard") is None,
      "pyarrow or zstandard is not installed",
  )
  def test_all_formats_in_one_label(self):
    import pyarrow
    import zstandard
    from pyarrow import parquet

    files = texts.write_texts(self.dir / "text", 4000)
    lines = texts.json_lines(texts.random_texts(2000, 9))
    packed = self.dir / "text" / "x.jsonl.zst"
    packed.write_bytes(zstandard.ZstdCompressor().compress(lines.encode()))
    table = pyarrow.table({"text": list(texts.random_texts(3000, 10))})
    parquet.write_table(table, self.dir / "text" / "x.parquet", row_group_size=2)
    files = {"all": [*files["web"], str(packed), str(self.dir / "text" / "x.parquet")]}
    self.reference(files, "reference", {})
    self.make(files, workers=2, unit_bytes=200)
    self.assertEqual(texts.read_tree(self.dir / "out"), texts.read_tree(self.dir / "reference"))

  def write_unreadable(self):
    """Writes files, two of which cannot be read to the end, and returns all and the good ones."""
    (self.dir / "text").mkdir()
    contents = {
        "a.txt": b"first",
        "b.jsonl": b'{"text": "b"}\n' * 20 + b"{}\n" + b'{"text": "b"}\n' * 20,
        "c.txt": b"a" * (1 << 17) + b"\xff",
        "d.txt": b"last",
    }
    for name, content in contents.items():
      (self.dir / "text" / name).write_bytes(content)
    paths = [str(self.dir / "text" / name) for name in contents]
    return {"l": paths}, {"l": [paths[0], paths[3]]}

  @parameterized.parameters(50, 1 << 20)
  def test_unreadable_files_are_left_out_whole_if_asked(self, unit_bytes):
    files, good = self.write_unreadable()
    self.reference(good, "reference", {})
    summary = self.make(files, skip_unreadable=True, unit_bytes=unit_bytes)
    self.assertEqual(texts.read_tree(self.dir / "out"), texts.read_tree(self.dir / "reference"))
    self.assertLen(summary.skipped, 2)
    self.assertRegex(summary.skipped[0], r"b\.jsonl:21: expected a JSON object")
    self.assertRegex(summary.skipped[1], r"c\.txt is not UTF-8 text")

  def test_unreadable_files_are_otherwise_listed_and_the_rest_is_not_done_again(self):
    files, _ = self.write_unreadable()
    with self.assertRaisesRegex(
        CorpusError, r"(?s)2 files cannot be read:.*b\.jsonl:21.*c\.txt.*--skip-unreadable\. No"
    ):
      self.make(files, unit_bytes=50)
    self.assertFalse((self.dir / "out").exists())
    kept = set((self.dir / "out.work").rglob("*.npy"))
    self.assertNotEmpty(kept)
    # Repaired, as its size and time show.
    pathlib.Path(files["l"][1]).write_bytes(b'{"text": "b"}\n' * 41)
    pathlib.Path(files["l"][2]).write_bytes(b"c")
    self.reference(files, "reference", {})
    self.make(files, unit_bytes=50)
    self.assertEqual(texts.read_tree(self.dir / "out"), texts.read_tree(self.dir / "reference"))
    self.assertFalse((self.dir / "out.work").exists())

  def test_files_unreadable_from_the_start_are_errors_before_anything_is_tokenized(self):
    files, _ = self.write_unreadable()
    pathlib.Path(files["l"][0]).write_bytes(b"\xff")
    with self.assertRaisesRegex(CorpusError, r"a\.txt is not UTF-8 .*--skip-unreadable\. No"):
      self.make(files)
    self.assertEqual(os.listdir(self.dir), ["text"])

  def test_a_file_with_two_labels_is_tokenized_once(self):
    (self.dir / "a.txt").write_text("abc")
    path = str(self.dir / "a.txt")
    self.make({"x": [path, path], "y": [path]})
    for label, count in (("x", 8), ("y", 4)):
      found = np.fromfile(self.dir / "out" / "bytes" / label / "part-00000.npy", np.uint16)
      self.assertLen(found, count)

  def test_a_corpus_is_replaced_only_with_overwrite(self):
    (self.dir / "a.txt").write_text("abc")
    files = {"x": [str(self.dir / "a.txt")]}
    self.make(files)
    with self.assertRaisesRegex(ConfigError, "already contains a corpus"):
      self.make(files)
    (self.dir / "a.txt").write_text("other text")
    self.make(files, overwrite=True)
    part = self.dir / "out" / "bytes" / "x" / "part-00000.npy"
    self.assertEqual(part.stat().st_size, 2 * (len("other text") + 1))

  def test_an_output_that_cannot_be_written_is_an_error_before_anything_is_tokenized(self):
    (self.dir / "a.txt").write_text("abc")
    with self.assertRaisesRegex(WriteError, "Cannot write .*a.txt/out: Not a directory.* No"):
      self.make({"x": [str(self.dir / "a.txt")]}, "a.txt/out")
    self.assertEqual(os.listdir(self.dir), ["a.txt"])

  def test_a_label_without_text_is_an_error_and_leaves_nothing(self):
    (self.dir / "a.txt").write_text("")
    with self.assertRaisesRegex(CorpusError, "The label 'x' has no document with text in it"):
      self.make({"x": [str(self.dir / "a.txt")]}, "new/dir/out")
    self.assertFalse((self.dir / "new" / "dir" / "out").exists())

  def test_parts_on_several_machines_and_their_merge(self):
    files = texts.write_texts(self.dir / "text", 4000)
    settings = make.MakeSettings(_BYTES, tokens_per_file=1000, unit_bytes=500)
    self.reference(files, "reference", {"tokens_per_file": 1000})
    results = str(self.dir / "results")
    out = self.dir / "out"
    merge = options_lib.WorkOptions(results=results, merge=True)
    for part in (0, 2):
      options = options_lib.WorkOptions(results=results, part=(part, 3))
      done = make.make_from_files(files, out, settings, options)
      self.assertEqual(done, make.PartSummary(()))
    with self.assertRaisesRegex(CorpusError, "pieces have no result yet"):
      make.make_from_files(files, out, settings, merge)
    options = options_lib.WorkOptions(results=results, part=(1, 3))
    make.make_from_files(files, out, settings, options)
    self.assertFalse(out.exists())
    make.make_from_files(files, out, settings, merge)
    self.assertEqual(texts.read_tree(out), texts.read_tree(self.dir / "reference"))
    self.assertEmpty(texts.read_tree(self.dir / "results"))

  def make_part(self, files, part=None, *, skip_unreadable=False, **changes):
    """Tokenizes a part of two, or merges both."""
    options = options_lib.WorkOptions(
        workers=1, results=str(self.dir / "results"), part=part, merge=part is None, **changes
    )
    settings = make.MakeSettings(_BYTES, unit_bytes=50, skip_unreadable=skip_unreadable)
    return make.make_from_files(files, self.dir / "out", settings, options)

  def test_a_merge_can_leave_out_unreadable_files_after_it_has_refused_them(self):
    files, good = self.write_unreadable()
    self.reference(good, "reference", {})
    refused = 0
    for part in ((0, 2), (1, 2)):
      try:
        self.make_part(files, part)
      except CorpusError as error:
        self.assertRegex(str(error), r"b\.jsonl:21|c\.txt is not UTF-8")
        refused += 1
    self.assertGreater(refused, 0)
    for _ in range(2):
      with self.assertRaisesRegex(CorpusError, r"(?s)2 files cannot be read:.*b\.jsonl:21.*c\.txt"):
        self.make_part(files)
    summary = self.make_part(files, skip_unreadable=True)
    self.assertLen(summary.skipped, 2)
    self.assertEqual(texts.read_tree(self.dir / "out"), texts.read_tree(self.dir / "reference"))

  def test_a_part_lists_the_files_that_it_leaves_out(self):
    files, _ = self.write_unreadable()
    skipped = []
    for part in ((0, 2), (1, 2)):
      skipped += self.make_part(files, part, skip_unreadable=True).skipped
    self.assertLen({reason.partition(":")[0] for reason in skipped}, 2)

  def test_a_part_reads_unreadable_files_again_if_asked(self):
    files, _ = self.write_unreadable()
    path = pathlib.Path(files["l"][1])
    bad, time_ns = path.read_bytes(), path.stat().st_mtime_ns
    self.make_part(files, (0, 1), skip_unreadable=True)
    # As after an error of the disk that is gone: the file has not changed.
    path.write_bytes(b'{"text": "b"}\n' * 40 + b" \n\n")
    self.assertLen(path.read_bytes(), len(bad))
    os.utime(path, ns=(time_ns, time_ns))
    again = self.make_part(files, (0, 1), skip_unreadable=True)
    self.assertLen(again.skipped, 2)
    again = self.make_part(files, (0, 1), skip_unreadable=True, retry_failed=True)
    self.assertLen(again.skipped, 1)

  def test_tokens_per_file_must_be_positive(self):
    with self.assertRaisesRegex(ConfigError, "tokens_per_file must be positive, got 0"):
      self.make({"l": ["x"]}, tokens_per_file=0)


if __name__ == "__main__":
  absltest.main()
