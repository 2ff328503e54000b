"""Tests of the reference pages that docs/reference.py writes."""

import re

from absl.testing import absltest

import maxtext_olmo
from docs import reference
from maxtext_olmo.cli import main as main_lib


class ReferenceTest(absltest.TestCase):

  def test_every_public_name_is_there_once(self):
    text = "\n".join(reference.public_names())
    names = re.findall(r"^\.\. auto(?:class|function):: maxtext_olmo\.(\w+)$", text, re.MULTILINE)
    self.assertCountEqual(names, maxtext_olmo.__all__)

  def test_every_command_is_there_with_its_options(self):
    text = "\n".join(reference.commands())
    parsers = reference.leaves(main_lib.make_parser())
    headings = re.findall(r"(?m)^## (.+)$", text)
    self.assertEqual(headings, [parser.prog.removeprefix("maxtext-olmo ") for parser in parsers])
    self.assertContainsSubset(main_lib.COMMANDS, {heading.split()[0] for heading in headings})
    self.assertIn("| `--sequence-length S` |", text)
    self.assertNotIn("%(default)s", text)

  def test_text_outside_of_code_is_shown_as_it_is(self):
    self.assertEqual(reference._escape("a_b <x> `a_b <x>` *"), r"a\_b \<x\> `a_b <x>` \*")

  def test_the_glossary_has_the_words_of_the_guide_sorted_and_its_links_lead_there(self):
    lines = list(reference.glossary())
    words = lines[1:-1:3]
    self.assertContainsSubset(["anchor", "instance", "position", "stream"], words)
    self.assertEqual(words, sorted(words))
    self.assertTrue(any("(guides/resume.md)" in line for line in lines))

  def test_only_placeholders_are_replaced(self):
    self.assertEqual(
        reference.expand("# A page\n<!-- a comment -->"), "# A page\n<!-- a comment -->"
    )
    self.assertStartsWith(reference.expand("<!-- glossary -->"), "```{glossary}")


if __name__ == "__main__":
  absltest.main()
