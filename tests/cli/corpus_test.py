"""Tests of `maxtext-olmo corpus make`."""

import pathlib

import numpy as np
from absl.testing import absltest

from tests.cli import runner


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
        "3 documents (1 empty ones left out), 19 tokens of uint16 in 2 files; vocab_size 258, EOS"
        " 256.\n"
        f"The manifest is {self.out}/mix.txt. Next:\n  maxtext-olmo index build ",
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
    self.assertRegex(err, r"^error: There is a corpus in .* already .*\(--overwrite\)\.\n$")
    self.assertEqual(runner.run(*argv, "--overwrite")[0], 0)

  def test_a_missing_input_is_an_error(self):
    code, _, err = runner.run("corpus", "make", "--output", self.out, self.dir / "none")
    self.assertEqual((code, err), (2, f"error: There is no file or directory {self.dir}/none.\n"))


if __name__ == "__main__":
  absltest.main()
