import math

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.inspection import losses as losses_lib
from maxtext_olmo.inspection import spike_detection


class FindSpikesTest(parameterized.TestCase):

  def losses(self, spikes, count=2000, seed=0):
    rng = np.random.Generator(np.random.PCG64(seed))
    values = 2 + 8 / (1 + np.arange(count) / 50) + rng.normal(0, 0.02, count)
    for step, value in spikes.items():
      values[step] += value
    return losses_lib.Losses(np.arange(count) * 10, values, "loss")

  def test_planted_spikes_are_found_and_nothing_else(self):
    for seed in range(10):
      found = spike_detection.find_spikes(
          self.losses({700: 1.0, 701: 2.0, 703: 0.5, 1500: 0.5}, seed=seed)
      )
      self.assertEqual(
          [(s.first, s.last, s.peak) for s in found], [(7000, 7030, 7010), (15000, 15000, 15000)]
      )
      self.assertGreater(found[0].score, found[1].score)
      self.assertAlmostEqual(found[1].loss - found[1].usual, 0.5, delta=0.2)

  def test_a_loss_that_is_not_a_number_is_a_spike(self):
    some = self.losses({})
    some.values[900] = math.nan
    some.values[1200] = math.inf
    self.assertEqual({s.peak for s in spike_detection.find_spikes(some)}, {9000, 12000})

  def test_a_spike_while_the_loss_falls_fast_is_found(self):
    for step in (200, 250, 300):
      found = spike_detection.find_spikes(self.losses({step: 0.6}))
      self.assertEqual([spike.peak for spike in found], [10 * step])

  def test_spikes_of_a_run_that_has_just_begun_are_found_and_nothing_else(self):
    for seed in range(10):
      rng = np.random.Generator(np.random.PCG64(seed))
      values = 3.2 + 2.4 * np.exp(-np.arange(60) / 20) + rng.normal(0, 0.05, 60)
      calm = losses_lib.Losses(np.arange(60), values.copy(), "loss")
      self.assertEqual(spike_detection.find_spikes(calm), [])
      score, _ = spike_detection.highest_score(calm)
      self.assertLess(score, spike_detection.THRESHOLD)
      self.assertLen(spike_detection.find_spikes(calm, threshold=score - 1e-6), 1)
      values[32] += 1.75
      values[50] += 1.67
      found = spike_detection.find_spikes(losses_lib.Losses(np.arange(60), values, "loss"))
      self.assertEqual(sorted(spike.peak for spike in found), [32, 50])
      for spike in found:
        self.assertAlmostEqual(spike.loss - spike.usual, 1.7, delta=0.5)

  def test_neighbouring_steps_of_a_long_log_share_a_line(self):
    some = self.losses({200_001: 1.0}, count=400_000)
    self.assertEqual([spike.peak for spike in spike_detection.find_spikes(some)], [2_000_010])

  def test_a_run_of_few_steps_has_no_spikes(self):
    for count in range(9):
      self.assertEqual(spike_detection.find_spikes(self.losses({}, count=count)), [])
      self.assertIsNone(spike_detection.highest_score(self.losses({}, count=count)))


if __name__ == "__main__":
  absltest.main()
