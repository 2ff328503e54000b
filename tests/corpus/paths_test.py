"""Tests of path arithmetic."""

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.corpus import paths


class PathsTest(parameterized.TestCase):

  @parameterized.parameters(
      (["/d/a/x", "/d/b/y"], "/d"),
      (["/d/a/x"], "/d/a"),
      (["/d/ab/x", "/d/a/y"], "/d"),
      (["/x", "/d/y"], "/"),
      (["gs://b/a/x", "gs://b/y"], "gs://b"),
      (["gs://b/x", "gs://c/y"], ""),
      (["gs://b/x", "/d/y"], ""),
      ([], ""),
  )
  def test_common_base(self, given, expected):
    self.assertEqual(paths.common_base(given), expected)
    for path in given:
      self.assertEqual(paths.join(expected, paths.relative_to(expected, path)), path)

  @parameterized.parameters(
      (["/d/a/x", "/d/b/y"], ["/d/a/x", "/d/a/x"], "/d", {"/d/a/x": "a/x"}),
      (["/d/x", "/d/x"], ["/d/x"], "/d", {"/d/x": "x"}),
      # "--file a/x" could be either of these.
      (["/d/a/x", "/d/b/a/x"], ["/d/a/x"], "/d", {"/d/a/x": "/d/a/x"}),
      (["/d/a/x", "/d/b/a/x"], ["/d/b/a/x"], "/d", {"/d/b/a/x": "b/a/x"}),
      (["/d/x", "/d/d/x"], ["/d/d/x"], "/d", {"/d/d/x": "/d/d/x"}),
      (["gs://b/p/x", "gs://b/q/x"], ["gs://b/q/x"], "gs://b", {"gs://b/q/x": "q/x"}),
      (["gs://b/x", "/d/y"], ["/d/y"], "", {"/d/y": "/d/y"}),
      ([], [], "", {}),
  )
  def test_short_names_identify_their_files(self, given, shown, base, expected):
    self.assertEqual(paths.shorten(given, shown), (base, expected))
    for path, name in expected.items():
      self.assertEqual({given[number] for number in paths.find(given, name)}, {path})

  @parameterized.parameters(
      ("/d", "/d/a/x", "a/x"),
      ("/d", "a/./x", "a/x"),
      ("/d", "/dd/x", "/dd/x"),
      ("/d", "../e/x", "/e/x"),
      ("/d", "gs://b/x", "gs://b/x"),
      ("gs://b/p", "gs://b/p/x", "x"),
      ("/", "/x", "x"),
      ("", "/x", "/x"),
  )
  def test_relative_to(self, base, path, expected):
    self.assertEqual(paths.relative_to(base, path), expected)

  @parameterized.parameters(
      ("/d", "a/x", False),
      ("/d", "a/../x", False),
      ("/d", "/d/x", False),
      ("/d", "../d/x", False),
      ("/d", "../x", True),
      ("/d", "/dd/x", True),
      ("/d", "gs://b/x", True),
      ("/", "/x", False),
      ("gs://b", "x", False),
      ("gs://b", "../x", True),
      ("gs://b", "gs://b/../x", True),
      ("gs://b", "/x", True),
  )
  def test_leaves(self, base, path, expected):
    self.assertEqual(paths.leaves(base, path), expected)

  @parameterized.parameters(("a b", True), ("\udcff", True), ("a\0b", False), ("\ud800", False))
  def test_is_valid(self, path, expected):
    self.assertEqual(paths.is_valid(path), expected)

  @parameterized.parameters(
      ("/d/a/x", [0]),
      ("a/x", [0, 2]),
      ("/x", [0, 1, 2]),
      ("b/x", [1]),
      ("gs://b/x", [1]),
      ("d", []),
      ("", []),
  )
  def test_find(self, name, expected):
    self.assertEqual(paths.find(["/d/a/x", "gs://b/x", "/e/a/x"], name), expected)

  def test_absolute_leaves_urls_alone(self):
    self.assertEqual(paths.absolute("gs://b/p/"), "gs://b/p")
    self.assertEqual(paths.absolute("/d/../e/"), "/e")

  def test_remap_takes_the_longest_prefix(self):
    remap = {"gs://b": "/all", "gs://b/code": "/code", "/x": "/y"}
    self.assertEqual(paths.remap("gs://b/web/x", remap), "/all/web/x")
    self.assertEqual(paths.remap("gs://b/code/x", remap), "/code/x")
    self.assertEqual(paths.remap("/other", remap), "/other")
    self.assertEqual(paths.remap("/other", None), "/other")


if __name__ == "__main__":
  absltest.main()
