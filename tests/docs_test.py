"""Tests that the guides agree with the code."""

import ast
import doctest
import pathlib
import re
import sys

from absl.testing import absltest

import maxtext_olmo
from maxtext_olmo import config as data_config
from maxtext_olmo import config_table
from maxtext_olmo.trainers.tiny import config as trainer_config
from tests import doc_blocks

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_PACKAGE = _ROOT / "maxtext_olmo"
_GUIDES = _ROOT / "docs" / "guides"


def data_table() -> str:
  rows = [("key", "default", "read by", "what it does"), ("---",) * 4]
  for key in config_table.KEYS:
    read_by = ", ".join(key.read_by) if key.read_by != data_config.DATASET_TYPES else "all"
    rows.append((f"`{key.name}`", key.default_text, read_by, key.help))
  return _table(rows)


def trainer_table() -> str:
  rows = [("key", "default", "what it does"), ("---",) * 3]
  rows += [(f"`{key.name}`", key.default_text, key.help) for key in trainer_config.KEYS]
  return _table(rows)


def _table(rows) -> str:
  return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def texts_of_the_code() -> str:
  """Returns all string literals of the package, with "N" for what is filled in."""
  found = []
  for path in _PACKAGE.rglob("*.py"):
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.JoinedStr):
        values = [v.value if isinstance(v, ast.Constant) else "N" for v in node.values]
        found.append("".join(values))
      elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        found.append(re.sub(r"%[.\d]*[a-z]", "N", node.value))
  return "\n".join(found)


class DocsTest(absltest.TestCase):

  def test_messages_in_the_guide_to_object_stores_are_those_of_the_code(self):
    page = (_GUIDES / "storage.md").read_text()
    rows = re.findall(r"^\| (.*?) \|", page.split("## When something")[1].split("\n## ")[0], re.M)
    quoted = re.findall(r"`([^`]+)`", " ".join(rows))
    self.assertGreater(len(quoted), 10)
    texts = texts_of_the_code()
    for message in quoted:
      for part in message.replace("HTTP 403 …", "N").split("…"):
        self.assertIn(part.strip(), texts)

  def test_the_configuration_guide_has_every_key_with_its_default_and_help(self):
    page = (_GUIDES / "configuration.md").read_text()
    for table in (data_table(), trainer_table()):
      self.assertIn(table, page, "run `python tests/docs_test.py --write` to update the page")

  def test_links_between_guides_lead_somewhere(self):
    for page in doc_blocks.pages():
      for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
          self.assertTrue((page.parent / target).exists(), f"{page.name} links to {target}")

  def test_every_page_is_in_the_table_of_contents_of_the_site(self):
    index = (_ROOT / "docs" / "index.md").read_text()
    listed = {line for block in index.split("```{toctree}")[1:] for line in block.splitlines()}
    pages = {
        str(page.relative_to(_ROOT / "docs").with_suffix("")) for page in doc_blocks.pages()[1:]
    }
    self.assertContainsSubset(pages - {"index"}, listed)

  def test_every_block_that_does_not_run_says_why(self):
    for page in doc_blocks.pages():
      for block in doc_blocks.blocks(page):
        with self.subTest(f"{block.page}:{block.line}"):
          self.assertTrue(not block.not_run or len(block.not_run.split()) > 1, block.not_run)

  def test_no_page_installs_the_package_from_an_index_that_does_not_have_it(self):
    for page in doc_blocks.pages():
      self.assertNotRegex(page.read_text(), r"pip install '?maxtext[-_]olmo(\[|'|\s|$)", page.name)

  def test_every_public_name_has_an_example_that_runs(self):
    for name in maxtext_olmo.__all__:
      public = getattr(maxtext_olmo, name)
      for test in doctest.DocTestFinder(recurse=True).find(public, name):
        with self.subTest(test.name):
          self.assertTrue(test.examples or test.name != name, f"{name} has no example")
          self.assertFalse(any(doctest.SKIP in e.options for e in test.examples), name)
          result = doctest.DocTestRunner(
              optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
          ).run(test)
          self.assertEqual(result.failed, 0)

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
