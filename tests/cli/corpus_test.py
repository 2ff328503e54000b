"""Tests of `maxtext-olmo corpus make` and `corpus copy`."""

import gzip
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
from absl.testing import absltest

from maxtext_olmo.corpus import documents as documents_lib
from maxtext_olmo.corpus import index_builder as index_lib
from tests import texts
from tests.cli import runner

STARTS_PROCESSES = True


class CorpusMakeTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)
    (self.dir / "docs").mkdir()
    (self.dir / "docs" / "a.txt").write_text("first")
    (self.dir / "docs" / "b.txt").write_text("second")
    (self.dir / "more.jsonl").write_text('{"body": "third"}\n{"body": ""}\n')
    self.out = self.dir / "out"

  def test_text_becomes_a_corpus_and_the_next_command_works_as_it_is_printed(self):
    code, out, err = runner.run(
        "corpus",
        "make",
        "--output",
        self.out,
        "--text-field",
        "body",
        self.dir / "docs",
        f"x={self.dir}/more.jsonl",
    )
    self.assertEqual((code, err), (0, ""))
    self.assertStartsWith(
        out,
        "3 documents (1 empty one left out), 19 tokens of uint16 in 2 files; vocab_size 258, EOS"
        " 256.\n"
        f"The manifest is {self.out}/mix.txt. Next, build an index, with your sequence length:\n"
        f"  maxtext-olmo index build --mix-file {self.out}/mix.txt --tokenizer bytes",
    )
    self.assertEqual(
        (self.out / "mix.txt").read_text(),
        "docs,{TOKENIZER}/docs/part-00000.npy\nx,{TOKENIZER}/x/part-00000.npy\n",
    )
    command = out.splitlines()[-1].split()[1:]
    command[command.index("--sequence-length") + 1] = "4"
    code, out, err = runner.run(*command)
    self.assertEqual((code, err), (0, ""))
    self.assertEndsWith(out, f"Wrote {self.out}/index.json.\n")

  def test_files_without_a_label_have_their_own_name(self):
    runner.run(
        "corpus",
        "make",
        "--output",
        self.out,
        self.dir / "docs" / "a.txt",
        self.dir / "docs" / "b.txt",
    )
    self.assertEqual(
        (self.out / "mix.txt").read_text(),
        "a,{TOKENIZER}/a/part-00000.npy\nb,{TOKENIZER}/b/part-00000.npy\n",
    )

  def test_inputs_with_one_label_go_together(self):
    runner.run(
        "corpus",
        "make",
        "--output",
        self.out,
        f"l={self.dir}/docs/b.txt",
        f"l={self.dir}/docs/a.txt",
    )
    tokens = np.fromfile(self.out / "bytes" / "l" / "part-00000.npy", np.uint16)
    self.assertEqual(bytes(tokens[tokens < 256].astype(np.uint8)), b"secondfirst")

  def test_a_pattern_a_separator_and_a_file_size(self):
    (self.dir / "docs" / "c.md").write_text("1\n##\n2\n##\n3\n")
    code, out, _ = runner.run(
        *("corpus", "make", "--output", self.out, "--pattern", "*.md", "--separator", "##"),
        *("--tokens-per-file", "4", self.dir / "docs"),
    )
    self.assertEqual(code, 0)
    self.assertStartsWith(out, "3 documents, 9 tokens of uint16 in 2 files;")

  def test_patterns_and_exceptions_for_all_labels_and_for_one(self):
    (self.dir / "docs" / "c.md").write_text("third")
    code, _, err = runner.run(
        *("corpus", "make", "--output", self.out, "--pattern", "*.txt", "--pattern", "*.md"),
        *("--exclude", "y=*.md", "--exclude", "a.*", f"x={self.dir}/docs", f"y={self.dir}/docs/*"),
    )
    self.assertEqual((code, err), (0, ""))
    for label, text in (("x", b"secondthird"), ("y", b"second")):
      tokens = np.fromfile(self.out / "bytes" / label / "part-00000.npy", np.uint16)
      self.assertEqual(bytes(tokens[tokens < 256].astype(np.uint8)), text)

  def test_files_that_cannot_be_read_are_left_out_and_listed(self):
    (self.dir / "docs" / "c.txt").write_bytes(b"\xff")
    (self.dir / "docs" / "d.jsonl").write_text('{"text": "x"}\n[]\n')
    code, out, err = runner.run(
        "corpus", "make", "--output", self.out, "--skip-unreadable", self.dir / "docs"
    )
    self.assertEqual(code, 0, err)
    self.assertStartsWith(out, "2 documents (2 unreadable files left out), 13 tokens of uint16")
    self.assertRegex(err, r"^left out: .*c\.txt is not UTF-8 .*\nleft out: .*d\.jsonl:2: expected")

  def test_parts_of_the_work_and_their_merge(self):
    argv = ("corpus", "make", "--output", self.out, self.dir / "docs", f"x={self.dir}/docs/a.txt")
    for part in (1, 0):
      code, out, err = runner.run(*argv, "--part", part, "--of", 2)
      self.assertEqual((code, err), (0, ""))
      self.assertIn(f"Part {part} of 2 is done.", out)
      self.assertFalse(self.out.exists())
    code, out, err = runner.run(*argv, "--merge")
    self.assertEqual((code, err), (0, ""))
    self.assertStartsWith(out, "3 documents, 19 tokens")
    self.assertFalse(self.out.with_name("out.work").exists())

  def test_parts_list_files_that_cannot_be_read_and_the_merge_can_leave_them_out(self):
    damaged = self.dir / "damaged.jsonl.gz"
    lines = texts.json_lines(texts.random_texts(1_000_000, 1)).encode()
    damaged.write_bytes(gzip.compress(lines)[:-1000])
    argv = ("corpus", "make", "--output", self.out, f"x={self.dir}/docs", f"x={damaged}")
    argv += (f"y={self.dir}/docs/a.txt",)
    codes = []
    for part in (0, 1):
      code, out, err = runner.run(*argv, "--part", part, "--of", 2)
      codes.append(code)
      if code:
        self.assertRegex(err, r"damaged\.jsonl\.gz.* use --skip-unreadable")
        self.assertEmpty(out)
        code, out, err = runner.run(*argv, "--part", part, "--of", 2, "--skip-unreadable")
        self.assertEqual(code, 0, err)
        self.assertRegex(err, r"^left out: .*damaged\.jsonl\.gz")
        self.assertIn(f"Part {part} of 2 is done.", out)
    self.assertCountEqual(codes, [0, 2])
    code, _, err = runner.run(*argv, "--merge")
    self.assertEqual(code, 2)
    self.assertRegex(err, r"damaged\.jsonl\.gz.* use --skip-unreadable")
    code, out, err = runner.run(*argv, "--merge", "--skip-unreadable")
    self.assertEqual(code, 0, err)
    self.assertStartsWith(out, "3 documents (1 unreadable file left out), 19 tokens")

  def test_a_file_that_is_bad_from_the_start_does_not_keep_parts_from_their_work(self):
    bad = self.dir / "bad.jsonl.gz"
    bad.write_bytes(b"not compressed")
    argv = ("corpus", "make", "--output", self.out, f"x={self.dir}/docs", f"x={bad}")
    for part in (0, 1):
      code, _, err = runner.run(*argv, "--part", part, "--of", 2)
      self.assertEqual(code, 2)
      self.assertRegex(err, r"bad\.jsonl\.gz.* use --skip-unreadable")
    code, out, err = runner.run(*argv, "--merge", "--skip-unreadable")
    self.assertEqual(code, 0, err)
    self.assertIn("1 unreadable file left out", out)

  def test_a_hugging_face_tokenizer(self):
    import tokenizers

    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<unk>": 0, "first": 1}, unk_token="<unk>")
    )
    made.add_special_tokens(["</s>"])
    made.save(str(self.dir / "tokenizer.json"))
    code, out, _ = runner.run(
        *("corpus", "make", "--output", self.out, "--tokenizer", self.dir / "tokenizer.json"),
        *("--tokenizer-name", "org/words", self.dir / "docs"),
    )
    self.assertEqual(code, 0)
    self.assertIn("--tokenizer org/words --dtype uint8", out)
    tokens = np.fromfile(self.out / "org" / "words" / "docs" / "part-00000.npy", np.uint8)
    self.assertEqual(tokens.tolist(), [1, 2, 0, 2])

  def test_a_corpus_is_replaced_only_with_overwrite(self):
    argv = ("corpus", "make", "--output", self.out, self.dir / "docs")
    self.assertEqual(runner.run(*argv)[0], 0)
    code, _, err = runner.run(*argv)
    self.assertEqual(code, 2)
    self.assertRegex(err, r"^error: .* already contains a corpus .*\(--overwrite\)\.\n$")
    self.assertEqual(runner.run(*argv, "--overwrite")[0], 0)

  def test_documents_have_names_in_the_document_index(self):
    (self.dir / "more.jsonl").write_text('{"body": "third", "key": "k"}\n{"body": "fourth"}\n')
    runner.run(
        *("corpus", "make", "--output", self.out, "--text-field", "body", "--id-field", "key"),
        *(self.dir / "docs", f"x={self.dir}/more.jsonl"),
    )
    index_path = self.out / "index.json"
    runner.run(
        *("index", "build", "--mix-file", self.out / "mix.txt", "--tokenizer", "bytes"),
        *("--dtype", "uint16", "--sequence-length", "4", "--output", index_path),
    )
    code, out, _ = runner.run("index", "documents", index_path, "--eos-id", "256", "--hashes")
    self.assertEqual(code, 0)
    self.assertIn("4 documents have a name; with hashes.", out)
    index = index_lib.load_index(str(index_path))
    documents = documents_lib.load_documents(f"{index_path}.documents", index, 256)
    self.assertEqual(
        [tuple(name) for name in documents.describe(np.arange(4))],
        [
            (f"{self.dir}/docs/a.txt:1", f"{self.dir}/docs/a.txt", 1),
            (f"{self.dir}/docs/b.txt:1", f"{self.dir}/docs/b.txt", 1),
            ("k", f"{self.dir}/more.jsonl", 1),
            (f"{self.dir}/more.jsonl:2", f"{self.dir}/more.jsonl", 2),
        ],
    )
    # They are the documents that the EOS would give.
    for path in self.out.rglob("*.csv.gz"):
      path.unlink()
    by_eos = documents_lib.build_documents(index, self.out / "by_eos", 256)
    self.assertEqual(by_eos.checksum, documents.checksum)

  def test_an_input_that_cannot_be_read_leaves_nothing(self):
    (self.dir / "docs" / "c.txt").write_bytes(b"\xff")
    argv = ("corpus", "make", "--output", self.out, "--tokens-per-file", 4, self.dir / "docs")
    code, _, err = runner.run(*argv)
    self.assertEqual(code, 2)
    self.assertRegex(
        err, r"c\.txt is not UTF-8 text .*No corpus was written to .*run the command again\.\n$"
    )
    self.assertFalse(self.out.exists())

  def test_a_full_disk_leaves_nothing(self):
    disk = self.dir / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], capture_output=True
    )
    if mounted.returncode:
      self.skipTest(f"No tmpfs can be mounted: {mounted.stderr.decode()}")
    self.addCleanup(subprocess.run, ["umount", disk], check=True)
    (self.dir / "docs" / "c.txt").write_text("long " * 100_000)
    argv = ("corpus", "make", "--output", disk / "out", "--tokens-per-file", 4, self.dir / "docs")
    code, _, err = runner.run(*argv)
    self.assertEqual(code, 2)
    self.assertRegex(err, "No space left on device.* Free some space.* No corpus was written to ")
    self.assertEmpty(list(disk.iterdir()))

  def test_an_interrupt_leaves_nothing(self):
    (self.dir / "many.jsonl").write_text('{"text": "a few words"}\n' * 200_000)
    argv = ("--output", self.out, "--tokens-per-file", 10, self.dir / "many.jsonl")
    # A shell may have made this process ignore interrupts, which the child would inherit.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    self.addCleanup(signal.signal, signal.SIGINT, before)
    process = subprocess.Popen(
        [sys.executable, "-m", "maxtext_olmo", "corpus", "make", *map(str, argv)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    while not list(self.out.rglob("part-00003.npy")) and process.poll() is None:
      time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    self.assertEqual(process.returncode, 130, err)
    self.assertIn(b"interrupted", err)
    self.assertFalse(self.out.exists())

  def test_a_missing_input_is_an_error(self):
    code, _, err = runner.run("corpus", "make", "--output", self.out, self.dir / "none")
    self.assertEqual(
        (code, err), (2, f"error: There is no file or directory {self.dir}/none. Check the path.\n")
    )


class CorpusCopyTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)
    for name in ("a", "b", "c"):
      (self.dir / "data" / name).mkdir(parents=True)
      np.arange(100, dtype="<u4").tofile(self.dir / "data" / name / "x.npy")
    lines = "".join(f"{name},{name}/x.npy\n" for name in ("a", "b", "c"))
    (self.dir / "data" / "mix.txt").write_text(lines)
    self.out = self.dir / "out"

  def copy(self, *words):
    return runner.run("corpus", "copy", *words, "--output", self.out)

  def test_a_slice_of_a_manifest_is_copied_and_the_next_command_works(self):
    code, out, err = self.copy(self.dir / "data" / "mix.txt", "--label", "[ab]")
    self.assertEqual((code, err), (0, ""))
    self.assertStartsWith(out, "Copied 2 of 3 files, 800 bytes.\n")
    self.assertEqual((self.out / "mix.txt").read_text(), "a,a/x.npy\nb,b/x.npy\n")
    self.assertIn("Next, build an index, with the dtype and sequence length of the corpus:\n", out)
    # A manifest names neither, so the command has placeholders for them.
    command = out.splitlines()[-1].replace("DTYPE", "uint32").replace("LENGTH", "10").split()
    code, out, err = runner.run(*command[1:])
    self.assertEqual((code, err), (0, ""))
    index = index_lib.load_index(self.out / "index.json")
    self.assertEqual([entry.path for entry in index.files], ["a/x.npy", "b/x.npy"])
    self.assertEqual((index.dtype, index.sequence_length), ("uint32", 10))

  def test_the_copy_of_an_index_has_its_fingerprint(self):
    index = index_lib.build_index(
        [(f"{name}/x.npy", name) for name in ("a", "b", "c")],
        10,
        tokenizer="none",
        base=str(self.dir / "data"),
        checksums="xxh3",
    )
    index.save(self.dir / "index.json")
    code, out, err = self.copy(self.dir / "index.json", "--reread")
    self.assertEqual((code, err), (0, ""))
    self.assertIn("checksum of 3 files, and 3 copies by reading them again.", out)
    self.assertEqual(runner.run(*out.splitlines()[-1].split()[1:])[0], 0)
    copied = index_lib.load_index(self.out / "index.json")
    self.assertEqual(copied.fingerprint, index.fingerprint)
    again = self.copy(self.dir / "index.json")[1]
    self.assertStartsWith(again, "Copied 0 of 3 files, 0 bytes, 3 were already there.\n")

  def test_selections_that_are_wrong_are_errors(self):
    mix = self.dir / "data" / "mix.txt"
    for words, message in (
        (("--label", "d"), "'d' matches no label"),
        (("--files-per-label", "0"), "--files-per-label must be at least 1"),
        (("--base", self.dir / "none"), "3 of 3 files were not copied"),
    ):
      code, _, err = self.copy(mix, *words)
      self.assertEqual(code, 2)
      self.assertIn(message, err)


if __name__ == "__main__":
  absltest.main()
