"""Tests of the part of a report about loss spikes."""

import collections
import re

import numpy as np
from absl.testing import absltest

from maxtext_olmo.inspection import contrast
from maxtext_olmo.inspection import figures
from maxtext_olmo.inspection import spike_detection
from maxtext_olmo.inspection import spike_section
from maxtext_olmo.inspection import spikes as spikes_lib
from maxtext_olmo.rows import explain

_LIVE = "<img src=x onerror=alert(1)>"


def _examined(spikes, text, score=9.0):
  """Returns findings about spikes, with five rows each of one text."""
  rows = tuple(
      contrast.RowScore(spike.peak, row, _LIVE, f"{_LIVE}.npy", -1, score, "rarity", 9.0, 4.0)
      for spike in spikes
      for row in range(5)
  )
  part = explain.PartExplanation(f"{_LIVE}.npy", _LIVE, 0, 0, 8, 32_768, 65_536, ())
  of_row = explain.RowExplanation(0, 0, 0, 0, _LIVE, 8, True, 8, 0.1, (part,), np.arange(8))
  shown = (("columns 0 to 7", text),) if text else ()
  scores = tuple(figures.FigureScore(name, 2.0, 1.0, 1, 5.0) for name in figures.FIGURES)
  tokens = collections.Counter({(_LIVE, f"{_LIVE}.npy"): 40})
  found = contrast.Contrast(
      tuple(spike.peak for spike in spikes), (1, 2), rows, 3, scores, tokens, tokens
  )
  suspects = tuple(spikes_lib.Suspect(row, of_row, shown) for row in rows[:10])
  return spikes_lib.Examined(tuple(spikes), found, suspects)


def many_findings(spikes: int, text: str, score: float = 9.0) -> spikes_lib.Findings:
  """Returns findings about some spikes whose rows have a text."""
  made = [
      spike_detection.Spike(s, s + 2, s, 9.0, 1.0, 50.0) for s in range(10, 10 + 10 * spikes, 10)
  ]
  each = tuple(_examined([spike], text, score) for spike in made)
  together = _examined(made, text, score)
  return spikes_lib.Findings("loss", 5000, tuple(made), 6.0, (9.0, 3), together, each)


class SpikeSectionTest(absltest.TestCase):

  def section(self, findings):
    return "\n".join(spike_section.make_section(findings))

  def test_rows_have_their_place_text_and_reason_and_nothing_is_live(self):
    page = self.section(many_findings(2, f"the text {_LIVE}"))
    self.assertNotIn("<img", page)
    self.assertIn("the text &lt;img", page)
    self.assertIn("bytes 32,768 to 65,536", page)
    table = page.partition("Rows to look at first")[2].partition("</table>")[0]
    self.assertIn(">bytes</th>", table)
    self.assertIn(".npy</td>", table)
    self.assertIn(">32768-65536</td>", table)
    self.assertIn("surprise of a token 9.00 bits, usually 4.00 bits", page)
    self.assertIn("steps 10 to 12: loss 9 at step 10", page)
    self.assertIn("Left out: 3 more rows without loss.", page)

  def test_each_link_to_a_row_has_its_row(self):
    page = self.section(many_findings(3, "text"))
    links = re.findall(r'href="#([^"]*)"', page)
    self.assertLen(links, 10)
    self.assertContainsSubset(links, re.findall(r'id="([^"]*)"', page))

  def test_long_texts_are_cut_and_all_of_them_stay_small(self):
    page = self.section(many_findings(100, "&<" * 20_000))
    self.assertLess(len(page.encode()), 3_000_000)
    self.assertIn("more characters are not shown", page)

  def test_without_a_tokenizer_it_says_what_to_give(self):
    self.assertIn("--tokenizer", self.section(many_findings(1, "")))
    self.assertNotIn("--tokenizer", self.section(many_findings(1, "text")))

  def test_if_nothing_stands_out_it_says_so(self):
    page = self.section(many_findings(1, "text", score=1.0))
    self.assertIn("looks like that of the calm steps", page)
    self.assertEqual(page.count('class="row"'), 3)

  def test_losses_without_a_spike_are_reported(self):
    page = self.section(spikes_lib.Findings("loss", 50, (), 6.0, (4.56, 1234), None, ()))
    self.assertIn("50 steps with a loss, no spike (robust z-score above 6). The highest", page)
    self.assertIn("score is 4.6, at step 1,234; see it with --threshold 4.5.", page)
    self.assertNotIn("<table", page)


if __name__ == "__main__":
  absltest.main()
