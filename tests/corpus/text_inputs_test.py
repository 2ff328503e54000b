"""Tests of finding the text files of each label."""

import os
import pathlib

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.corpus import text_inputs
from maxtext_olmo.corpus.storage import stores
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.errors import MissingFileError
from tests import object_server


class FindInputsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)
    for name in ("b.txt", "a/z.txt", "a/y.md", ".git/x.txt", "a/.hidden", "c/z.txt"):
      (self.dir / name).parent.mkdir(exist_ok=True)
      (self.dir / name).write_text("x")

  def find(self, *inputs, **settings):
    found = text_inputs.find_inputs([f"{given}" for given in inputs], **settings)
    return {
        label: [os.path.relpath(path, self.dir) for path in paths] for label, paths in found.items()
    }

  def test_directories_are_walked_in_order_without_hidden_files(self):
    name = self.dir.name
    self.assertEqual(self.find(self.dir), {name: ["a/y.md", "a/z.txt", "b.txt", "c/z.txt"]})
    found = self.find(self.dir, include=["*.txt"])
    self.assertEqual(found, {name: ["a/z.txt", "b.txt", "c/z.txt"]})
    with self.assertRaisesRegex(CorpusError, r"No file below .* matches the pattern '\*\.rst'"):
      self.find(self.dir, include=["*.rst"])

  def test_files_are_used_as_given(self):
    self.assertEqual(self.find(self.dir / "b.txt", include=["*.md"]), {"b": ["b.txt"]})
    with self.assertRaisesRegex(MissingFileError, "There is no file or directory .*none"):
      self.find(self.dir / "none")

  def test_labels_and_patterns_in_paths(self):
    found = self.find(f"x={self.dir}/*/*.txt", f"x={self.dir}/b.txt", f"{self.dir}/a/*.md")
    self.assertEqual(found, {"x": ["a/z.txt", "c/z.txt", "b.txt"], "a": ["a/y.md"]})
    found = self.find(f"{self.dir}/**/*.txt", exclude=["c/*"], label="l")
    self.assertEqual(found, {"l": ["a/z.txt", "b.txt"]})
    self.assertEqual(self.find(f"{self.dir}/.git/*.txt", label="l"), {"l": [".git/x.txt"]})
    with self.assertRaisesRegex(MissingFileError, "matches only hidden files"):
      self.find(f"{self.dir}/a/.h*")

  def test_a_path_that_contains_an_equals_sign_needs_no_label(self):
    (self.dir / "k=v.txt").write_text("x")
    self.assertEqual(self.find(self.dir / "k=v.txt"), {"k=v": ["k=v.txt"]})

  @parameterized.parameters(
      (["*.md"], [], ["a/y.md"], ["a/y.md"]),
      (["*.md", "b.*"], [], ["a/y.md", "b.txt"], ["a/y.md", "b.txt"]),
      (["x=*.md"], [], ["a/y.md"], ["a/y.md", "a/z.txt", "b.txt", "c/z.txt"]),
      (["x=*.md", "b.txt"], [], ["a/y.md", "b.txt"], ["b.txt"]),
      ([], ["z.txt"], ["a/y.md", "b.txt"], ["a/y.md", "b.txt"]),
      ([], ["a/*", "y=c/*"], ["b.txt", "c/z.txt"], ["b.txt"]),
      ([], ["=*y.md", "y=*.txt", "x=a/*"], ["b.txt", "c/z.txt"], None),
      (["*.txt"], ["x=?/z.txt"], ["b.txt"], ["a/z.txt", "b.txt", "c/z.txt"]),
  )
  def test_filters_for_all_labels_and_for_one(self, include, exclude, of_x, of_y):
    inputs = (f"x={self.dir}", f"y={self.dir}")
    if of_y is None:
      with self.assertRaisesRegex(CorpusError, r"\(--exclude\) leave no file of "):
        self.find(*inputs, include=include, exclude=exclude)
      return
    self.assertEqual(self.find(*inputs, include=include, exclude=exclude), {"x": of_x, "y": of_y})

  def test_a_filter_for_a_label_that_does_not_exist_is_an_error(self):
    with self.assertRaisesRegex(
        ConfigError, r"--exclude wki=\*: no input has the label 'wki'\. Labels: wiki\. .*'=wki=\*'"
    ):
      self.find(f"wiki={self.dir}", exclude=["wki=*"])

  def test_only_files_with_certain_suffixes(self):
    self.assertEqual(self.find(f"x={self.dir}", suffixes=(".md",)), {"x": ["a/y.md"]})
    with self.assertRaisesRegex(CorpusError, r"has one of the suffixes \.a, \.b\."):
      self.find(self.dir, suffixes=(".a", ".b"))


class BucketTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    names = ("b.txt", "a/z.txt", "a/y.md", ".git/x.txt", "a/.hidden", "k=v.txt")
    self.server = self.enter_context(
        object_server.ObjectServer({f"b/text/{name}": b"x" for name in names})
    )
    self.addCleanup(stores.use_by_default, stores.StoreOptions())
    stores.use_by_default(stores.StoreOptions(self.server.url, "here", anonymous=True))

  def find(self, *inputs, **settings):
    found = text_inputs.find_inputs(inputs, **settings)
    return {
        label: [path.removeprefix("s3://b/text/") for path in paths]
        for label, paths in found.items()
    }

  @parameterized.parameters("s3://b/text", "s3://b/text/")
  def test_a_prefix_is_a_directory(self, url):
    expected = ["a/y.md", "a/z.txt", "b.txt", "k=v.txt"]
    self.assertEqual(self.find(url), {"text": expected})
    self.assertEqual(self.find(f"x={url}", include=["a/*"], exclude=["*.md"]), {"x": ["a/z.txt"]})

  def test_objects_and_patterns(self):
    self.assertEqual(self.find("s3://b/text/k=v.txt"), {"k=v": ["k=v.txt"]})
    self.assertEqual(self.find("s3://b/text/*/*.txt"), {"text": ["a/z.txt"]})
    url = f"{self.server.url}/b/text/b.txt"
    self.assertEqual(self.find(f"x={url}"), {"x": [url]})

  def test_what_does_not_exist_is_an_error(self):
    with self.assertRaisesRegex(MissingFileError, "There is no object s3://b/none, and none below"):
      self.find("s3://b/none")
    with self.assertRaisesRegex(MissingFileError, "There is no file or directory http://"):
      self.find(f"{self.server.url}/b/none")


if __name__ == "__main__":
  absltest.main()
