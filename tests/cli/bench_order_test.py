"""Tests of the measurement of orders."""

from absl.testing import absltest

from tests.cli import runner


class BenchOrderTest(absltest.TestCase):

  def test_it_measures_all_orders_side_by_side_and_prints_ratios(self):
    code, out, _ = runner.run("bench", "order", "--instances", 20_000, "--seconds", 0.01)
    self.assertEqual(code, 0)
    self.assertIn("| | `feistel` | `olmo_core` | `maxtext` | `index_shuffle` |", out)
    self.assertRegex(out, r"\| first id \|( [\d.]+ ms \|){4}")
    for size in (64, 256, 1024, 4096):
      self.assertRegex(out, rf"\| ids/s, batches of {size} \|( [\d.]+ M \|){{4}}")
    self.assertRegex(out, r"[\d.]+ times NumPy's bare shuffle")


if __name__ == "__main__":
  absltest.main()
