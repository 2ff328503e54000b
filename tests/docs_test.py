"""Tests that the guides agree with the code."""

import pathlib
import re
import sys

from absl.testing import absltest

from maxtext_olmo import config as data_config
from maxtext_olmo.trainers.tiny import config as trainer_config

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_PACKAGE = _ROOT / "maxtext_olmo"
_GUIDES = _ROOT / "docs" / "guides"


def data_table() -> str:
  rows = [("key", "default", "read by", "what it does"), ("---",) * 4]
  for key in data_config.KEYS:
    read_by = ", ".join(key.read_by) if key.read_by != data_config.DATASET_TYPES else "all"
    rows.append((f"`{key.name}`", key.default_text, read_by, key.help))
  return _table(rows)


def trainer_table() -> str:
  rows = [("key", "default", "what it does"), ("---",) * 3]
  rows += [(f"`{key.name}`", key.default_text, key.help) for key in trainer_config.KEYS]
  return _table(rows)


def _table(rows) -> str:
  return "".join(f"| {' | '.join(row)} |\n" for row in rows)


class DocsTest(absltest.TestCase):

  def test_the_configuration_guide_has_every_key_with_its_default_and_help(self):
    page = (_GUIDES / "configuration.md").read_text()
    for table in (data_table(), trainer_table()):
      self.assertIn(table, page, "run `python tests/docs_test.py --write` to update the page")

  def test_links_between_guides_lead_somewhere(self):
    for page in [*_GUIDES.glob("*.md"), _ROOT / "README.md"]:
      for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
          self.assertTrue((page.parent / target).exists(), f"{page.name} links to {target}")

  def test_the_design_guide_names_every_module_of_each_room(self):
    page = (_GUIDES / "design.md").read_text()
    rows = dict(re.findall(r"(?m)^\| `(\w+)/` \|(.*)$", page))
    rooms = [
        "corpus",
        "order",
        "rows",
        "devices",
        "grain_llm",
        "loader",
        "evaluation",
        "inspection",
    ]
    for room in rooms:
      modules = {path.stem for path in (_PACKAGE / room).rglob("*.py")} - {"__init__"}
      named = {name for name in re.findall(r"`(\w+)`", rows[room]) if name.islower()}
      self.assertContainsSubset(modules, named, room)
      self.assertContainsSubset(named, modules | {"create_data_iterator"}, room)

  def test_names_in_the_design_guide_are_in_the_files_given_for_them(self):
    page = (_GUIDES / "design.md").read_text()
    for path in re.findall(r"`([\w/]+\.py)`", page):
      self.assertTrue(self._find(path) or "NAME" in path, path)
    named = re.findall(r"`(\w+)(?:\.(\w+))?`[^`|.]{0,40}\(`([\w/]+\.py)`", page)
    self.assertNotEmpty(named)
    for name, member, path in named:
      text = "".join(found.read_text() for found in self._find(path))
      for word in filter(None, (name, member)):
        pattern = rf"(def|class) {word}\b|\b{word}\b.* = "
        self.assertRegex(text, pattern, f"{path} has no {word}")

  def _find(self, path: str) -> list[pathlib.Path]:
    return [found for root in (_PACKAGE, _ROOT) if (found := root / path).exists()]

  def test_config_files_open_with_the_command_that_runs_them(self):
    for path in (_ROOT / "configs").glob("*.py"):
      self.assertIn(f"--config=configs/{path.name}", path.read_text()[:1500], path.name)


def _write() -> None:
  page = _GUIDES / "configuration.md"
  text = page.read_text()
  for heading, table in (
      ("## Data\n", data_table()),
      ("## The embedded trainer\n", trainer_table()),
  ):
    before, after = text.split(heading)
    after = re.sub(r"(?m)^\| key (?:.*\n)(?:\|.*\n)*", lambda _, table=table: table, after, count=1)
    text = before + heading + after
  page.write_text(text)


if __name__ == "__main__":
  if "--write" in sys.argv:
    _write()
  else:
    absltest.main()
