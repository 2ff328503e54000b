"""Tests that the benchmark of inspection measures what it says."""

import pathlib

from absl.testing import absltest

from tests.benchmarks import corpus
from tests.benchmarks import inspection


class InspectionTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = pathlib.Path(self.create_tempdir().full_path)

  def test_a_search_reads_all_bytes_and_finds_the_text(self):
    files = corpus.make(self.directory / "corpus", 1)
    runs = inspection.measure_search(self.directory / "corpus", 1)
    size = sum(pathlib.Path(path).stat().st_size for path in files)
    self.assertEqual([run["bytes"] for run in (*runs["read"], *runs["find"])], [size, size])

  def test_every_inverse_is_measured(self):
    found = inspection.measure_inverses(64)
    self.assertLen(found, 7)

  def test_a_run_has_the_instances_it_is_asked_for_and_is_written_once(self):
    config = inspection.write_run(self.directory / "run", "feistel", 20, 123)
    self.assertNotIn("olmo_mixture", config)
    mixed = inspection.write_run(self.directory / "run", "mixture", 20, 456)
    self.assertEqual(mixed["olmo_index_path"], config["olmo_index_path"])
    self.assertLen(mixed["olmo_mixture"], 20)


if __name__ == "__main__":
  absltest.main()
