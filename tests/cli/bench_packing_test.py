"""The packing benchmark measures what it says."""

import collections
import pathlib

from absl.testing import absltest

from maxtext_olmo.cli import bench_packing
from maxtext_olmo.cli import demo


class BenchPackingTest(absltest.TestCase):

  def test_every_packing_is_in_the_table_and_planned_wastes_little(self):
    directory = pathlib.Path(self.create_tempdir().full_path, "d")
    source = bench_packing._lognormal(directory, 3000)
    lines = bench_packing._table("lognormal", source, 8192, 256, 1)
    rows = {cells[1].strip(): cells[2:] for cells in (line.split("|") for line in lines[4:])}
    self.assertEqual(list(rows), ["first_fit", "best_fit", "concat_then_split", "planned"])
    self.assertEqual(float(rows["first_fit"][2]), 1.0)
    self.assertLess(float(rows["planned"][1].strip(" %")), 0.5)

  def test_the_second_set_is_the_demo_corpus_repeated_until_it_is_large_enough(self):
    texts = [text for texts in demo.docstrings().values() for text in texts]
    expected = collections.Counter(text.encode() for text in texts)
    size = sum(len(text.encode()) + 1 for text in texts)
    for tokens, times in ((1, 1), (size + 1, 2)):
      directory = pathlib.Path(self.create_tempdir().full_path)
      title, source = bench_packing._demo(directory, tokens)
      self.assertEqual("2 times each" in title, times == 2)
      self.assertEqual(source.documents.num_tokens, times * size)
      found = collections.Counter(
          bytes(source[i]["inputs"][:-1].tolist()) for i in range(len(source))
      )
      self.assertEqual(found, {text: times * count for text, count in expected.items()})


if __name__ == "__main__":
  absltest.main()
