"""Tests of the statistics of orders: they detect bad shuffles, and a good one passes."""

import grain
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.order import permutations
from maxtext_olmo.order import statistics as statistics_lib
from maxtext_olmo.order import stored

_N = 300_000


class OrderStatsTest(parameterized.TestCase):

  @parameterized.parameters(0, 1, 2)
  def test_a_true_shuffle_and_feistel_pass(self, seed):
    order = permutations.make_order("feistel", num_instances=_N, seed=seed)
    for ids in (stored.shuffled(_N, seed).__getitem__, lambda p: order.ids(0, p)):
      figures = statistics_lib.measure(lambda p, ids=ids: ids(p).astype(np.int64), _N)
      self.assertLess(max(map(abs, figures.values())), 4, figures)

  @parameterized.named_parameters(
      ("none", lambda p: p, "displacement"),
      ("a_stride", lambda p: p * 7919 % _N, "correlation, 1 apart"),
      (
          "within_shards",
          lambda p: p // 10_000 * 10_000 + (p * 7919) % 10_000,
          "files in a batch of 500",
      ),
      ("only_half", lambda p: stored.shuffled(_N, 1)[p] // 2, "chi-square"),
  )
  def test_a_bad_shuffle_is_seen(self, ids, figure):
    found = statistics_lib.measure(lambda p: ids(p).astype(np.int64), _N)
    self.assertGreater(abs(found[figure]), 4, found)

  def test_grain_shuffle_equals_grain(self):
    dataset = grain.MapDataset.range(1000).shuffle(seed=5)
    expected = [dataset[i] for i in range(50)]
    self.assertEqual(statistics_lib.grain_shuffle(1000, 5)(np.arange(50)).tolist(), expected)

  def test_uneven_small_orders_are_seen(self):
    self.assertGreater(statistics_lib.small_orders(lambda seed: (0, 1, 2, 3, 4)), 4)
    even = statistics_lib.small_orders(lambda seed: tuple(stored.shuffled(5, seed).tolist()))
    self.assertLess(abs(even), 4)


if __name__ == "__main__":
  absltest.main()
