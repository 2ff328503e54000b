"""Tests of the record-level sampler."""

import hashlib
import pickle

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.input_pipeline import olmo_data_grain
from maxtext_olmo.order import permutations
from maxtext_olmo.order import sampler as sampler_lib


def _cache():
  return absltest.get_default_test_tmpdir()


def _keys(sampler, count):
  return [sampler[i].record_key for i in range(count)]


class BlocksTest(parameterized.TestCase):
  """The sampler on its own: a contiguous block of the epoch for each host."""

  @parameterized.parameters("maxtext", "feistel")
  def test_each_host_serves_its_block_of_each_epoch(self, order):
    samplers = [
        sampler_lib.OlmoIndexSampler(
            total_instances=23,
            seed=5,
            shard_index=h,
            shard_count=4,
            order=order,
            cache_dir=_cache(),
        )
        for h in range(4)
    ]
    for epoch in range(3):
      whole = samplers[0].shuffled_global_indices(seed=5, epoch=epoch)
      self.assertEqual(whole.dtype, np.uint64)
      self.assertEqual(sorted(whole.tolist()), list(range(23)))
      for h, sampler in enumerate(samplers):
        self.assertEqual(sampler.num_local_instances_per_epoch, 5)
        block = whole[5 * h : 5 * h + 5]
        np.testing.assert_array_equal(sampler.shard_indices(seed=5, epoch=epoch), block)
        self.assertEqual(_keys(sampler, 15)[5 * epoch : 5 * epoch + 5], block.tolist())

  def test_the_maxtext_order_is_the_documented_permutation(self):
    sampler = sampler_lib.OlmoIndexSampler(
        total_instances=50, seed=9, order="maxtext", cache_dir=_cache()
    )
    digest = hashlib.sha256(b"olmo-shuffle:9:0").digest()
    rng = np.random.default_rng(int.from_bytes(digest[:8], "little"))
    np.testing.assert_array_equal(_keys(sampler, 50), rng.permutation(50))

  def test_the_methods_of_maxtexts_sampler_are_available(self):
    sampler = sampler_lib.OlmoIndexSampler(
        total_instances=20,
        seed=9,
        shard_index=1,
        shard_count=3,
        order="maxtext",
        cache_dir=_cache(),
    )
    for epoch in range(2):
      rng = np.random.default_rng(olmo_data_grain._combine_seed_epoch(9, epoch))
      np.testing.assert_array_equal(
          sampler._shard_indices_for_epoch(epoch), rng.permutation(20)[6:12]
      )

  def test_without_shuffle_instances_come_in_corpus_order(self):
    sampler = sampler_lib.OlmoIndexSampler(
        total_instances=6, seed=0, shard_index=1, shard_count=2, shuffle=False
    )
    self.assertEqual(_keys(sampler, 6), [3, 4, 5, 3, 4, 5])

  @parameterized.parameters("maxtext", "feistel")
  def test_initial_step_is_an_offset_into_the_stream(self, order):
    def make(initial_step):
      return sampler_lib.OlmoIndexSampler(
          total_instances=10, seed=1, initial_step=initial_step, order=order, cache_dir=_cache()
      )

    self.assertEqual(_keys(make(7), 20), _keys(make(0), 27)[7:])
    self.assertEqual(make(7)[0].index, 0)
    self.assertEqual(repr(make(7)), repr(make(0)))


class GlobalBatchesTest(parameterized.TestCase):
  """The sampler inside a loader that batches: hosts and workers share global batches."""

  @parameterized.product(hosts=(1, 2, 4), workers=(0, 1, 2, 3), initial_batches=(0, 5))
  def test_batches_are_the_same_for_any_hosts_and_workers(self, hosts, workers, initial_batches):
    total, global_batch, batches = 37, 8, 12
    rows = global_batch // hosts
    order = permutations.make_order("feistel", num_instances=total, seed=2)
    start = initial_batches * global_batch
    expected = order.at(start + np.arange(batches * global_batch)).reshape(batches, hosts, rows)
    ways = max(1, workers)
    for host in range(hosts):
      sampler = sampler_lib.OlmoIndexSampler(
          total_instances=total,
          seed=2,
          shard_index=host,
          shard_count=hosts,
          batch_size=rows,
          worker_count=workers,
          initial_step=initial_batches * rows,
      )
      # As Grain does: worker w takes indices w, w + W, …, batches them, and the loader takes turns.
      per_worker = [
          [sampler[w + ways * m].record_key for m in range(-(-batches // ways) * rows)]
          for w in range(ways)
      ]
      for t in range(batches):
        w, round_ = t % ways, t // ways
        self.assertEqual(
            per_worker[w][round_ * rows : (round_ + 1) * rows], expected[t, host].tolist()
        )

  @parameterized.parameters(1, 2)
  def test_the_olmo_core_order_drops_each_epochs_tail(self, hosts):
    order = permutations.make_order(
        "olmo_core", num_instances=22, seed=2, chunk_size=2, cache_dir=_cache()
    )
    for host in range(hosts):
      sampler = sampler_lib.OlmoIndexSampler(
          total_instances=22,
          seed=2,
          shard_index=host,
          shard_count=hosts,
          batch_size=8 // hosts,
          order="olmo_core",
          chunk_size=2,
          cache_dir=_cache(),
      )
      # 22 instances make two batches of 8; the third batch is the first of the next epoch.
      expected = order.at(np.concatenate([np.arange(16), 22 + np.arange(8)])).reshape(3, hosts, -1)
      self.assertEqual(_keys(sampler, 24 // hosts), expected[:, host].ravel().tolist())

  def test_an_initial_step_inside_a_batch_continues_with_the_next_record(self):
    def keys(initial_step, count):
      sampler = sampler_lib.OlmoIndexSampler(
          total_instances=30,
          seed=0,
          shard_index=1,
          shard_count=2,
          batch_size=4,
          initial_step=initial_step,
      )
      return _keys(sampler, count)

    self.assertEqual(keys(3, 20), keys(0, 23)[3:])


class SamplerTest(parameterized.TestCase):

  def test_it_has_a_length_so_that_grain_does_not_probe_it(self):
    self.assertGreater(len(sampler_lib.OlmoIndexSampler(total_instances=3, seed=0)), 2**60)

  @parameterized.parameters("maxtext", "feistel")
  def test_it_survives_pickling_without_its_caches(self, order):
    sampler = sampler_lib.OlmoIndexSampler(
        total_instances=100_000,
        seed=1,
        order=order,
        batch_size=8,
        worker_count=2,
        cache_dir=_cache(),
    )
    expected = _keys(sampler, 40)
    data = pickle.dumps(sampler)
    self.assertLess(len(data), 1000)
    self.assertEqual(_keys(pickle.loads(data), 40), expected)

  def test_the_repr_names_what_is_sampled(self):
    sampler = sampler_lib.OlmoIndexSampler(total_instances=9, seed=4, shard_count=2, batch_size=2)
    self.assertEqual(
        repr(sampler),
        "OlmoIndexSampler(total_instances=9, seed=4, shard_index=0, shard_count=2, shuffle=True,"
        " order='feistel', batch_size=2)",
    )
    self.assertEqual(sampler.num_instances, 9)

  @parameterized.parameters(
      (dict(total_instances=0), "total_instances must be positive"),
      (dict(shard_index=2, shard_count=2), "shard_index=2 is not one of 2 shards"),
      (dict(shard_count=0), "is not one of 0 shards"),
      (dict(initial_step=-1), "initial_step must not be negative"),
      (dict(batch_size=0), "batch_size must be positive"),
      (dict(worker_count=-1), "worker_count must not be negative"),
      (dict(shard_count=20), "too few for 20 hosts"),
      (dict(order="nonsense"), "not a known order"),
      (dict(order="olmo_core"), "olmo_core order needs batch_size"),
  )
  def test_impossible_arguments_are_a_config_error(self, arguments, message):
    with self.assertRaisesRegex(errors.ConfigError, message):
      sampler_lib.OlmoIndexSampler(**{"total_instances": 10, "seed": 0, **arguments})

  def test_a_negative_index_is_refused(self):
    sampler = sampler_lib.OlmoIndexSampler(total_instances=3, seed=0)
    with self.assertRaisesRegex(IndexError, "must not be negative, got -1"):
      sampler[-1]


if __name__ == "__main__":
  absltest.main()
