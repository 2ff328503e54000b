"""Tests of writing a corpus completely or not at all."""

import os
import pathlib

from absl.testing import absltest

from maxtext_olmo.corpus import publish
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.errors import WriteError


class PublishTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)
    self.out = self.dir / "new" / "out"

  def make(self, content="a", name="x/part.npy", **settings):
    with publish.new_corpus(self.out, **{"overwrite": False, **settings}) as corpus:
      path = pathlib.Path(corpus.directory, name)
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_text(content)
      self.assertFalse((self.out / name).exists() and content not in (self.out / name).read_text())
      corpus.lines.append(f"l,{name}\n")
    return corpus

  def files(self):
    return sorted(str(path.relative_to(self.out)) for path in self.out.rglob("*") if path.is_file())

  def test_files_are_published_with_their_manifest(self):
    corpus = self.make()
    self.assertEqual(corpus.mix_file, str(self.out / "mix.txt"))
    self.assertEqual(self.files(), ["mix.txt", "x/part.npy"])
    self.assertEqual((self.out / "mix.txt").read_text(), "l,x/part.npy\n")

  def test_after_an_error_nothing_is_left_and_an_old_corpus_is_unchanged(self):
    for error in (RuntimeError, KeyboardInterrupt):
      with self.assertRaises(error), publish.new_corpus(self.out, overwrite=False) as corpus:
        pathlib.Path(corpus.directory, "part.npy").write_text("a")
        raise error
      self.assertEmpty(os.listdir(self.dir))
    self.make()
    with (
        self.assertRaisesRegex(CorpusError, r"Bad\. No corpus was written to .*out\. Fix"),
        publish.new_corpus(self.out, overwrite=True, replaces=["x/*.npy"]),
    ):
      raise CorpusError("Bad.")
    self.assertEqual(self.files(), ["mix.txt", "x/part.npy"])

  def test_a_corpus_is_replaced_only_if_asked_with_the_files_that_it_replaces(self):
    self.make()
    with self.assertRaisesRegex(ConfigError, "already contains a corpus"):
      self.make()
    self.make(name="x/other.npy", overwrite=True, replaces=["x/*.npy", "none/*.npy"])
    self.assertEqual(self.files(), ["mix.txt", "x/other.npy"])

  def test_a_directory_that_cannot_be_written_is_found_before_anything_is_made(self):
    publish.check_writable(str(self.out))
    self.assertEmpty(os.listdir(self.out))
    (self.out / "file").write_text("")
    with self.assertRaisesRegex(WriteError, "Cannot write .*file/x: Not a directory"):
      publish.check_writable(str(self.out / "file" / "x"))

  def test_a_named_directory_is_found_again_after_a_kill(self):
    (self.out / ".unfinished_n").mkdir(parents=True)
    (self.out / ".unfinished_n" / "a.npy").write_text("a")
    with publish.new_corpus(self.out, overwrite=False, name="n") as corpus:
      self.assertEqual(os.listdir(corpus.directory), ["a.npy"])
      corpus.lines.append("l,a.npy\n")
    self.assertEqual(self.files(), ["a.npy", "mix.txt"])

  def test_a_corpus_without_files_is_an_error(self):
    with (
        self.assertRaisesRegex(CorpusError, "no documents"),
        publish.new_corpus(self.out, overwrite=False),
    ):
      pass
    self.assertEmpty(os.listdir(self.dir))


if __name__ == "__main__":
  absltest.main()
