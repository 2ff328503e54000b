"""Tests of what tokenized units contain."""

from absl.testing import absltest

from maxtext_olmo.corpus import text_units
from maxtext_olmo.corpus import tokenize_units
from maxtext_olmo.corpus import unit_results
from maxtext_olmo.errors import CorpusError


def _unit(*slices):
  return text_units.TextUnit(tuple(text_units.TextSlice(*one) for one in slices), 1)


def _counts(documents=1, empty=0, tokens=10, lines=5, error=""):
  return (documents, empty, tokens, lines, error)


class UnitResultsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    # The second half of b.txt cannot be read.
    self.units = [_unit(("a.txt",), ("b.txt", 0, 7)), _unit(("b.txt", 7), ("c.jsonl", 0, 9))]
    self.units.append(_unit(("c.jsonl", 9)))
    slices = [
        [_counts(empty=1), _counts(2)],
        [_counts(0, 0, 0, error="b.txt is damaged"), _counts(3, 2, 40)],
        [_counts()],
    ]
    outcome = [
        (unit, {"file": f"{number}.npy", "slices": some})
        for number, (unit, some) in enumerate(zip(self.units, slices))
    ]
    self.results = unit_results.read_results(outcome, "s3://b/units")

  def test_results_have_a_path_and_say_whether_they_are_complete(self):
    found = [self.results[unit.key] for unit in self.units]
    self.assertEqual(found[1].path, "s3://b/units/1.npy")
    self.assertEqual(found[0].slices[1], tokenize_units.SliceResult(2, 0, 10, 5))
    self.assertEqual([one.is_complete for one in found], [True, False, True])

  def test_unreadable_files_have_a_reason(self):
    found = unit_results.find_unreadable(self.units, self.results)
    self.assertEqual(found, {"b.txt": "b.txt is damaged"})

  def test_a_label_has_everything_except_unreadable_files(self):
    found = unit_results.join_units({"l": self.units}, self.results, {"b.txt"})
    units = found.units["l"]
    self.assertEqual(found.empty, 3)
    self.assertEqual([unit.n_tokens for unit in units], [20, 40, 10])
    self.assertEqual([unit.kept_tokens for unit in units], [10, 40, 10])
    self.assertEqual([unit.kept_documents for unit in units], [1, 3, 1])
    self.assertEqual([one.is_kept for unit in units for one in unit.slices], [1, 0, 0, 1, 1])
    self.assertEqual([one.lines_before for unit in units for one in unit.slices], [0, 0, 5, 0, 5])

  def test_a_label_without_documents_is_an_error(self):
    with self.assertRaisesRegex(CorpusError, "The label 'l' has no document with text in it"):
      unit_results.join_units({"l": self.units[:1]}, self.results, {"a.txt", "b.txt"})


if __name__ == "__main__":
  absltest.main()
