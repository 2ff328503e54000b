"""The packing benchmark measures what it says."""

import pathlib

from absl.testing import absltest

from maxtext_olmo.tools import bench_packing


class BenchPackingTest(absltest.TestCase):

  def test_every_packing_is_in_the_table_and_planned_wastes_little(self):
    directory = pathlib.Path(self.create_tempdir().full_path, "d")
    source = bench_packing._lognormal(directory, 3000)
    lines = bench_packing._table("lognormal", source, 8192, 256, 1)
    rows = {cells[1].strip(): cells[2:] for cells in (line.split("|") for line in lines[4:])}
    self.assertEqual(list(rows), ["first_fit", "best_fit", "concat_then_split", "planned"])
    self.assertEqual(float(rows["first_fit"][2]), 1.0)
    self.assertLess(float(rows["planned"][1].strip(" %")), 0.5)


if __name__ == "__main__":
  absltest.main()
