"""Tests that the benchmark of fleets measures what it says."""

import pathlib

from absl.testing import absltest

from tests.benchmarks import scale


class ScaleTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = pathlib.Path(self.create_tempdir().full_path)
    scale.make_files(self.directory, 7, 1003)
    scale.make_index(self.directory, 7)

  def test_the_corpus_has_the_instances_that_were_asked_for(self):
    fleet, seconds = scale.open_fleet(self.directory, 4, "feistel")
    self.assertEqual(fleet.run.index.total_instances, 1003)
    self.assertEqual((fleet.hosts, fleet.mesh.size), (4, 16))
    self.assertGreater(seconds, 0)

  def test_the_rows_of_all_hosts_are_compared(self):
    for order in ("feistel", "olmo_core"):
      self.assertEqual(scale.check_union(self.directory, 4, order)["rows"], 3 * 16)


if __name__ == "__main__":
  absltest.main()
