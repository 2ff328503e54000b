"""Tests of the comparison with MaxText's own loader."""

import os
import re

from absl.testing import absltest

from tests.benchmarks import maxtext_loader
from tests.trainers.maxtext import runs


@runs.needs_maxtext
class CompareTest(absltest.TestCase):

  def test_the_tables_show_what_both_loaders_do(self):
    os.environ["DECOUPLE_GCLOUD"] = "TRUE"
    text = maxtext_loader.compare(sizes=[20_000], repeats=1)

    def row(beginning: str) -> list[str]:
      line = next(line for line in text.splitlines() if line.startswith(f"| {beginning}"))
      return [cell.strip() for cell in line.strip("|").split("|")][1:]

    self.assertEqual(row("distinct instances, 1"), ["2000", "2000"])
    theirs, ours = row("distinct instances, 4")
    self.assertLess(int(theirs), 1500)
    self.assertEqual(ours, "2000")
    theirs, ours = row("restart from checkpoint 100, 1 → 1")
    self.assertEqual(theirs, "8 repeated, 8 lost")
    self.assertEqual(ours, "0 repeated, 0 lost")
    for name in ("first batch", "memory above", "tokens per second"):
      self.assertRegex(row(name)[2], r"^\d+\.\d$")
    self.assertIsNone(re.search(r"nan|inf", text))


if __name__ == "__main__":
  absltest.main()
