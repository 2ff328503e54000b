"""Tests of `maxtext-olmo index`."""

import os
import pathlib

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.corpus import documents as documents_lib
from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.corpus.storage import stores
from tests import corpora
from tests import object_server
from tests.cli import runner


class IndexTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)
    for i, count in enumerate((33, 20, 7)):
      corpora.write_tokens(self.dir / "tok" / f"{i}.npy", count, seed=i, dtype="uint32")
    self.mix = self.dir / "mix.txt"
    self._write_mix(2)
    self.output = self.dir / "index.json"

  def _write_mix(self, count: int) -> None:
    self.mix.write_text("".join(f"l{i % 2},{{TOKENIZER}}/{i}.npy\n" for i in range(count)))

  def _build(self, *flags) -> tuple[int, str, str]:
    argv = {
        "--mix-file": self.mix,
        "--tokenizer": "tok",
        "--sequence-length": 4,
        "--output": self.output,
    }
    return runner.run("index", "build", *(word for pair in argv.items() for word in pair), *flags)

  def test_an_index_is_built_and_shown(self):
    code, out, err = self._build()
    self.assertEqual((code, err), (0, ""))
    index = index_lib.load_index(self.output)
    self.assertEqual([entry.path for entry in index.files], ["tok/0.npy", "tok/1.npy"])
    self.assertEqual((index.base, index.tokenizer, index.dtype), (str(self.dir), "tok", "uint32"))
    self.assertEndsWith(out, f"Wrote {self.output}.\n")
    code, shown, err = runner.run("index", "show", self.output)
    self.assertEqual((code, err), (0, ""))
    self.assertEqual(out, shown + f"Wrote {self.output}.\n")
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in shown.splitlines()
        if "│" in line
    ]
    self.assertEqual(
        rows,
        [
            ["l0", "1", "33", "8", "61.54%"],
            ["l1", "1", "20", "5", "38.46%"],
            ["total", "2", "53", "13", ""],
        ],
    )
    self.assertIn("sequence length 4, uint32, tokenizer tok\n", shown)
    self.assertIn(f"base {self.dir}\nfingerprint {index.fingerprint}\n", shown)

  def test_each_file_can_be_shown(self):
    self._build("--checksums", "sha256", "--workers", "1")
    code, out, _ = runner.run("index", "show", "--files", self.output)
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line
    ]
    self.assertEqual(code, 0)
    self.assertEqual(
        [row[:8] for row in rows],
        [
            ["0", "tok/0.npy", "l0", "132", "0", "33", "0", "8"],
            ["1", "tok/1.npy", "l1", "80", "0", "20", "8", "5"],
        ],
    )
    self.assertRegex(rows[0][8], r"^sha256:[0-9a-f]{64}$")

  def test_brackets_in_names_are_shown_as_they_are(self):
    self.mix.write_text("[bold]l[/bold],tok/0.npy\n")
    self.assertIn("[bold]l[/bold]", self._build()[1])

  def test_base_and_windows_may_be_given(self):
    code, out, _ = self._build(
        "--base", self.dir / "tok" / "..", "--max-target-sequence-length", "16"
    )
    self.assertEqual(code, 0)
    self.assertIn("sequence length 4 (windows of 16)", out)
    self.assertEqual(index_lib.load_index(self.output).total_instances, 12)

  @parameterized.parameters("--base", "--gcs-base")
  def test_the_base_may_be_a_bucket(self, option):
    files = {f"b/{name}": (self.dir / name).read_bytes() for name in ("tok/0.npy", "tok/1.npy")}
    server = self.enter_context(object_server.ObjectServer(files))
    self.addCleanup(stores.use_by_default, stores.StoreOptions())
    there = ("--endpoint", server.url, "--anonymous")
    code, _, err = self._build(option, "gs://b", "--dtype", "uint32", *there)
    self.assertEqual(code, 0, err)
    index = index_lib.load_index(self.output)
    self.assertEqual(index.base, "gs://b")
    self.assertEqual([entry.etag for entry in index.files], [server.etag(name) for name in files])

  def test_a_longer_mix_keeps_the_split_of_the_index_it_replaces(self):
    self._build()
    older = index_lib.load_index(self.output)
    self._write_mix(3)
    self.assertEqual(self._build()[2], "")
    index = index_lib.load_index(self.output)
    self.assertLen(index.files, 3)
    self.assertEqual((index.split_key, index.split_windows), (older.split_key, older.split_windows))

  def test_a_longer_mix_keeps_the_split_of_the_index_it_extends(self):
    self._build()
    older = index_lib.load_index(self.output)
    self._write_mix(3)
    other = self.dir / "other.json"
    self.assertEqual(self._build("--extends", self.output, "--output", other)[0], 0)
    self.assertEqual(index_lib.load_index(other).split_key, older.split_key)
    self._write_mix(1)
    code, _, err = self._build("--extends", self.output, "--output", other)
    self.assertEqual(code, 2)
    self.assertStartsWith(err, "error: The corpus does not extend the older index:\n  removed: ")

  def test_another_corpus_in_place_of_an_index_is_noted(self):
    self._build()
    self._write_mix(1)
    code, _, err = self._build()
    self.assertEqual(code, 0)
    self.assertRegex(
        err,
        r"^note: .*index\.json is replaced, with a new held-out split\. The corpus does not"
        r" extend",
    )

  def test_a_likely_wrong_dtype_is_a_warning(self):
    corpora.write_tokens(
        self.dir / "tok" / "0.npy", 4000, seed=1, vocab_size=50_000, dtype="uint16"
    )
    code, _, err = self._build()
    self.assertEqual(code, 0)
    self.assertEqual(
        err,
        f"warning: {self.dir}/tok/0.npy looks like uint16, not uint32: if it is, build the index"
        " again with --dtype uint16.\n",
    )

  def test_a_corpus_without_an_instance_is_an_error(self):
    code, _, err = self._build("--sequence-length", "64")
    self.assertEqual(code, 2)
    self.assertEqual(
        err,
        "error: The corpus has no instances: each needs 64 tokens, but the longest file has 33."
        " Choose a shorter --sequence-length.\n",
    )
    self.assertFalse(self.output.exists())

  def test_a_wrong_tokenizer_names_the_files_that_are_not_there(self):
    code, _, err = self._build("--tokenizer", "other")
    self.assertEqual(code, 2)
    self.assertStartsWith(err, "error: Token files cannot be indexed (2 of 2 files):\n")
    self.assertIn(f"  {self.dir}/other/0.npy: No such file or directory\n", err)
    self.assertEndsWith(
        err,
        "Check the base (--base), the tokenizer's name in the paths (--tokenizer), and the"
        " mount.\n",
    )

  def test_a_malformed_mix_is_an_error_with_the_line(self):
    self.mix.write_text("l,tok/0.npy\noops\n")
    code, _, err = self._build()
    self.assertEqual(code, 2)
    self.assertIn(f"{self.mix}:2: expected exactly one comma, found 0: 'oops'", err)

  def test_files_outside_the_base_are_used_only_where_that_is_allowed(self):
    arguments = ("--base", self.dir / "tok")
    self.mix.write_text(f"l,0.npy\nl,{self.dir}/tok/1.npy\nl,../tok/0.npy\n")
    self.assertEqual(self._build(*arguments)[0], 0)
    corpora.write_tokens(self.dir / "2.npy", 20, seed=0, dtype="uint32")
    self.mix.write_text("l,0.npy\nl,../2.npy\n")
    code, _, err = self._build(*arguments)
    self.assertEqual(code, 2)
    self.assertIn(f"{self.mix}:2: ../2.npy\n", err)
    self.assertEqual(self._build(*arguments, "--allow-outside")[0], 0)
    self.assertEqual(index_lib.load_index(self.output).files[1].path, f"{self.dir}/2.npy")

  def test_files_that_are_listed_twice_are_reported(self):
    self.mix.write_text("l,tok/0.npy\nl,tok/1.npy\nl,tok/0.npy\n")
    code, _, err = self._build()
    self.assertEqual(code, 0)
    self.assertStartsWith(err, "note: 1 of 2 files are listed more than once (tok/0.npy 2 times)")

  def test_an_output_that_cannot_be_written_is_an_error_before_the_scan(self):
    code, _, err = self._build("--output", self.dir / "none" / "x.json", "--tokenizer", "other")
    self.assertEqual(
        (code, err),
        (
            2,
            f"error: The directory of --output, {self.dir}/none, does not exist. Create it.\n",
        ),
    )

  def test_an_output_that_is_a_directory_is_an_error_before_the_scan(self):
    code, _, err = self._build("--output", self.dir, "--tokenizer", "other")
    self.assertEqual(
        (code, err),
        (2, f"error: The output {self.dir} is a directory. Give a file, such as index.json.\n"),
    )

  def test_files_with_headers(self):
    np.save(self.dir / "tok" / "0.npy", np.arange(8, dtype=np.uint32))
    self._build()
    self.assertEqual(index_lib.load_index(self.output).files[0].data_offset, 128)


class DocumentsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.path, _ = corpora.write_corpus(self.create_tempdir().full_path)

  def run_command(self, *args) -> tuple[int, str, str]:
    return runner.run("index", "documents", self.path, *args)

  def test_it_writes_the_sidecar_file_and_checks_it(self):
    code, out, _ = self.run_command("--eos-id", "0", "--workers", "2")
    self.assertEqual(code, 0)
    documents = documents_lib.load_documents(
        self.path + ".documents", index_lib.load_index(self.path), 0
    )
    self.assertIn(f"{documents.num_documents:,} documents, {documents.num_tokens:,} tokens", out)
    self.assertIn("the median length is", out)
    self.assertIn(f"Wrote {self.path}.documents: ", out)
    code, out, _ = self.run_command("--eos-id", "0", "--verify")
    self.assertEqual(code, 0)
    self.assertIn("is intact", out)

  def test_documents_of_padded_rows_have_a_file_of_their_own(self):
    flags = ("--eos-id", "0", "--boundaries", "eos")
    _, out, _ = self.run_command(*flags)
    self.assertIn(f"Wrote {self.path}.documents.eos: ", out)
    code, out, _ = self.run_command(*flags, "--verify")
    self.assertEqual(code, 0)
    self.assertIn("is intact", out)

  def test_damage_and_wrong_places_are_one_line_on_stderr(self):
    code, _, err = self.run_command("--eos-id", "0", "--verify")
    self.assertEqual(code, 2)
    self.assertIn("makes one", err)
    code, _, err = self.run_command("--eos-id", "0", "--output", "/nowhere/at/all")
    self.assertEqual(code, 2)
    self.assertIn("does not exist", err)
    self.run_command("--eos-id", "0")
    with open(self.path + ".documents", "r+b") as file:
      file.seek(-1, os.SEEK_END)
      file.write(b"\xff")
    code, _, err = self.run_command("--eos-id", "0", "--verify")
    self.assertEqual(code, 2)
    self.assertIn("is damaged", err)


if __name__ == "__main__":
  absltest.main()
