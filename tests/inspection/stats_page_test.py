"""Tests of the page of a corpus's statistics; `browser_test` opens it."""

import importlib.util
import json
import re

import numpy as np
from absl.testing import absltest

from maxtext_olmo import errors
from maxtext_olmo.corpus import document_lengths
from maxtext_olmo.corpus import stats as stats_lib
from maxtext_olmo.inspection import stats_page

_HAS_BOKEH = importlib.util.find_spec("bokeh") is not None
_LABEL = '<script>alert("x")</script>'


def make_stats(label: str, tokens: int = 1000) -> stats_lib.Stats:
  """Returns statistics of a label with documents of 10 tokens."""
  lengths = document_lengths.DocumentLengths.of_ends(np.arange(9, tokens, 10), tokens)
  ids = np.zeros(50, np.int64)
  ids[1:11] = tokens // 10
  return stats_lib.Stats(label, 2, tokens, ids, 0, lengths)


class StatsPageTest(absltest.TestCase):

  def page(self, *labels):
    return stats_page.make_page(
        labels, stats_lib.add_up(labels), title="A <b>corpus</b>", tokens=[("5 '<i>'", 100)]
    )

  @absltest.skipIf(_HAS_BOKEH, "Bokeh is installed")
  def test_without_bokeh_the_error_says_what_to_install(self):
    with self.assertRaisesRegex(errors.ConfigError, "pip install bokeh"):
      self.page(make_stats("web"))

  def test_a_row_has_the_figures_of_a_label(self):
    whole = stats_lib.add_up([make_stats("a"), make_stats("b", 3000)])
    row = dict(zip(stats_page.HEADS[1:], stats_page.row_of(make_stats("a"), whole)))
    self.assertEqual(row["tokens"], "1,000")
    self.assertEqual(row["share"], "25.00%")
    self.assertEqual((row["documents"], row["mean length"], row["longest"]), ("100", "10", "10"))
    self.assertEqual((row["distinct ids"], row["bits per token"]), ("10", "3.32"))

  @absltest.skipUnless(_HAS_BOKEH, "bokeh not installed; `make test-browser` installs it")
  def test_text_is_escaped_and_every_label_has_a_row(self):
    page = self.page(*(make_stats(f"label-{i}") for i in range(30)), make_stats(_LABEL))
    self.assertNotIn(_LABEL, page)
    self.assertNotIn("<b>corpus", page)
    self.assertNotIn("<i>", page)
    self.assertEqual(page.count("data-label="), 31)

  @absltest.skipUnless(_HAS_BOKEH, "bokeh not installed; `make test-browser` installs it")
  def test_the_plots_have_the_largest_labels(self):
    labels = [make_stats(f"label-{i}", 100 * (i + 1)) for i in range(30)]
    data = json.loads(re.search(r'id="data">(.*?)</script>', self.page(*labels), re.DOTALL)[1])
    text = json.dumps(data["plots"])
    self.assertIn("label-29", text)
    self.assertNotIn('"label-3"', text)


if __name__ == "__main__":
  absltest.main()
