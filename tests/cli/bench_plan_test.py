"""Tests of what is measured."""

import pathlib
import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.cli import bench_plan


class BenchPlanTest(parameterized.TestCase):

  def test_each_loader_has_a_name_of_its_own(self):
    names = [candidate.name for candidate in bench_plan.CANDIDATES]
    self.assertLen(set(names), len(names))

  def test_the_measured_process_knows_every_loader(self):
    loaders = sorted({candidate.loader for candidate in bench_plan.CANDIDATES})
    tools = pathlib.Path(bench_plan.__file__).parent
    code = (
        f"import sys; sys.path.insert(0, {str(tools)!r})\n"
        "import bench_loaders\n"
        f"print(*(bench_loaders._opener(name).__name__ for name in {loaders}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    self.assertEqual(done.stdout.split(), [f"open_{name}" for name in loaders], done.stderr)

  @parameterized.named_parameters((c.name, c) for c in bench_plan.CANDIDATES)
  def test_every_setting_has_a_title_where_there_are_several(self, candidate):
    titles = [title for title, _ in candidate.settings]
    self.assertLen(set(titles), len(titles))
    if len(titles) > 1:
      self.assertNotIn("", titles)

  def test_a_setting_has_the_last_word_over_the_base_and_that_over_the_defaults(self):
    candidate = bench_plan.Candidate("a", "peer", "x", base={"workers": 3, "way": "device"})
    spec = candidate.spec({"workers": 1}, filter=True, documents=False)
    self.assertEqual(
        spec,
        {
            "loader": "x",
            "workers": 1,
            "threads": 0,
            "read_threads": 0,
            "way": "device",
            "arrays": 1,
            "filter": True,
            "documents": False,
        },
    )
    self.assertTrue(candidate.device)

  def test_the_main_size_is_one_of_the_sizes(self):
    self.assertIn(bench_plan.MAIN, bench_plan.SIZES)


if __name__ == "__main__":
  absltest.main()
