"""Tests that every dependency has a lower bound, and that the guide names it."""

import doctest
import pathlib
import re

from absl.testing import absltest
from packaging.version import Version

from tests import versions

_GUIDE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "guides" / "versions.md"


class VersionsTest(absltest.TestCase):

  def test_every_dependency_has_a_lower_bound(self):
    bounded = versions.lowest("3.13")
    self.assertCountEqual({each.name for each in versions.requirements()}, bounded)

  def test_a_bound_for_later_versions_of_python_holds_there_only(self):
    older, newer = versions.lowest("3.11"), versions.lowest("3.13")
    self.assertLess(older["numpy"], newer["numpy"])
    self.assertEqual(older["jax"], newer["jax"])

  def test_the_guide_names_every_lower_bound(self):
    rows = re.findall(r"(?m)^\| `([\w-]+)` \| (\S+)", _GUIDE.read_text())
    expected = {name: str(version) for name, version in versions.lowest("3.11").items()}
    self.assertEqual(dict(rows), expected)

  def test_an_environment_with_a_newer_or_missing_package_is_not_the_lowest(self):
    floors = versions.lowest("3.11")
    self.assertEmpty(versions.above(floors, floors))
    self.assertEqual(versions.above(floors, {**floors, "jax": Version("0.10.2")}), ["jax"])
    missing = {name: version for name, version in floors.items() if name != "bokeh"}
    self.assertEqual(versions.above(floors, missing), ["bokeh"])

  def test_examples(self):
    self.assertEqual(doctest.testmod(versions).failed, 0)


if __name__ == "__main__":
  absltest.main()
