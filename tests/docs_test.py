"""Tests that the guides say what the code does."""

import pathlib
import re
import sys

from absl.testing import absltest

from maxtext_olmo.loader import options
from maxtext_olmo.trainers.tiny import config as config_lib

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_GUIDES = _ROOT / "docs" / "guides"


def key_table(keys) -> str:
  rows = [f"| `{key.name}` | `{key.default!r}` | {key.help} |" for key in keys]
  return "\n".join(["| key | default | what it does |", "|---|---|---|", *rows]) + "\n"


class DocsTest(absltest.TestCase):

  def test_the_configuration_guide_has_every_key_with_its_default_and_help(self):
    page = (_GUIDES / "configuration.md").read_text()
    for keys in (options.KEYS, config_lib.KEYS):
      self.assertIn(
          key_table(keys),
          page,
          "run `python tests/docs_test.py --write` to bring the page up to date",
      )

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
  for keys in (options.KEYS, config_lib.KEYS):
    first = re.escape(f"| `{keys[0].name}` |")
    pattern = rf"\| key \| default \| what it does \|\n\|---\|---\|---\|\n{first}.*\n(?:\|.*\n)*"
    text = re.sub(pattern, lambda _, keys=keys: key_table(keys), text)
  page.write_text(text)


if __name__ == "__main__":
  if "--write" in sys.argv:
    _write()
  else:
    absltest.main()
