"""Tests that the guides agree with the code."""

import pathlib
import re
import sys

from absl.testing import absltest

from maxtext_olmo import config as data_config
from maxtext_olmo.trainers.tiny import config as trainer_config

_ROOT = pathlib.Path(__file__).resolve().parent.parent
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
