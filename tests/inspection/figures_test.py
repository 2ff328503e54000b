"""Tests of the figures of rows."""

import numpy as np
from absl.testing import absltest

from maxtext_olmo.inspection import figures

_EOS = 9


def _rows(*rows, width=8, trained=None, length=0, firsts=range(0, 800, 8)):
  tokens = [np.array(row, np.uint16) for row in rows]
  pieces = [
      [figures.Piece("a", "f", -1, 0, len(row), length, first)] if row else []
      for row, first in zip(rows, firsts)
  ]
  return figures.StepRows(tokens, width, trained or [True] * len(rows), pieces)


class FiguresTest(absltest.TestCase):

  def measure(self, rows, usual=None):
    surprise = figures.token_surprise([rows if usual is None else usual])
    measured = figures.measure(rows, surprise, _EOS)
    values = measured.figures_with(figures.count_copies([measured]))
    return [dict(zip(figures.FIGURES, row)) for row in values.tolist()], measured

  def test_each_figure_is_what_it_says(self):
    (row,), _ = self.measure(_rows([1, 2, _EOS, 1, 2, _EOS], length=100))
    self.assertAlmostEqual(row["distinct"], 0.5)
    self.assertEqual((row["ends"], row["length"], row["repetition"]), (2, 100, 0))
    self.assertAlmostEqual(row["padding"], 0.25)
    self.assertAlmostEqual(row["rarity"], -np.log2(2.5 / (6 + 0.5 * 11)), places=6)

  def test_tokens_that_were_never_seen_surprise_most(self):
    usual = _rows([1, 1, 1, 1, 1, 1, 1, 2])
    (a, b, c), _ = self.measure(_rows([1] * 8, [2] * 8, [60_000] * 8), usual)
    self.assertLess(a["rarity"], b["rarity"])
    self.assertLess(b["rarity"], c["rarity"])

  def test_repetition_is_found_whether_the_filter_runs_or_not(self):
    (row,), _ = self.measure(_rows([5] * 40, width=40))
    self.assertEqual(row["repetition"], 1)

  def test_documents_that_come_twice_are_duplicates_and_short_ones_are_not(self):
    long, short = [*range(10, 40), _EOS], [1, 2, _EOS]
    found, _ = self.measure(
        _rows([*short, *long], [*short, *long], [*short, *range(50, 81)], width=40)
    )
    self.assertAlmostEqual(found[0]["duplicates"], 31 / 34)
    self.assertAlmostEqual(found[2]["duplicates"], 0)

  def test_a_document_that_a_later_epoch_repeats_is_no_duplicate(self):
    row, other = [1, 2, _EOS, *range(10, 40), _EOS], [3, 4, _EOS, *range(10, 40), _EOS]
    found, _ = self.measure(_rows(row, row, width=40, firsts=(80, 80)))
    self.assertEqual([one["duplicates"] for one in found], [0, 0])
    found, _ = self.measure(_rows(row, other, width=40, firsts=(80, 120)))
    self.assertAlmostEqual(found[0]["duplicates"], 31 / 34)

  def test_a_large_step_is_measured_in_threads_as_its_parts_are(self):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 50_000, (130, 8192)).astype(np.uint16)
    step = _rows(*tokens.tolist(), width=8192, firsts=range(130))
    surprise = figures.token_surprise([step])
    whole = figures.measure(step, surprise, _EOS)
    parts = [
        figures.measure(
            figures.StepRows(*(field if isinstance(field, int) else field[part] for field in step)),
            surprise,
            _EOS,
        )
        for part in (slice(0, 60), slice(60, 130))
    ]
    self.assertEqual(whole.places, list(range(130)))
    np.testing.assert_array_equal(whole.figures, np.concatenate([p.figures for p in parts]))
    for name in ("documents", "pieces", "surprises"):
      self.assertEqual(getattr(whole, name), [row for p in parts for row in getattr(p, name)])

  def test_rows_without_loss_and_padding_are_left_out(self):
    _, measured = self.measure(_rows([1, 2], [], [3, 4], [5, 6], trained=[True, True, False, True]))
    self.assertEqual(measured.places, [0, 3])

  def test_scores_are_distances_in_units_of_the_spread_on_that_side(self):
    rng = np.random.Generator(np.random.PCG64(0))
    usual = np.zeros((4000, len(figures.FIGURES)))
    usual[:, 0] = rng.normal(5, 1, 4000)
    usual[:, 1] = rng.exponential(1, 4000)
    scale = figures.Scale.of(usual)
    row = np.zeros((1, len(figures.FIGURES)))
    row[0, 0], row[0, 1] = 8, -1
    scores = scale.scores(row)[0]
    self.assertAlmostEqual(scores[0], 3, delta=0.2)
    self.assertGreater(scores[1], scale.scores(np.array([[5, 2.4, 0, 0, 0, 0, 0]]))[0, 1])
    self.assertEqual(scores[6], 0)

  def test_words_have_the_unit_of_the_figure(self):
    self.assertEqual(
        figures.describe("length", 1234.5, 2), ("length of a document", "1,234 tokens", "2 tokens")
    )
    for name in figures.FIGURES:
      self.assertLen(figures.describe(name, 0.5, 0.25), 3)


if __name__ == "__main__":
  absltest.main()
