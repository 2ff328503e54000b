"""Tests of what the options become; what they do is tested in olmo_test and laws_test."""

import ml_collections
from absl.testing import absltest

from maxtext_olmo import config as config_lib
from maxtext_olmo.loader import wiring


class PrefetchTest(absltest.TestCase):

  def test_less_than_no_workers_are_threads(self):
    values = {**config_lib.defaults(), "grain_worker_count": -1}
    values.update(olmo_index_path=__file__, max_target_length=8, global_batch_size_to_load=8)
    prefetch = wiring.prefetch(config_lib.Options.read(ml_collections.ConfigDict(values)))
    self.assertEqual(prefetch.workers, 0)


if __name__ == "__main__":
  absltest.main()
