"""Tests for the cache of finished requests."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

from maxtext_olmo.evaluation import cache as cache_lib
from tests.evaluation import pipeline_cases


class LMEvalCacheTest(absltest.TestCase):

  def lookup(self, path, keys):
    cache = cache_lib.RequestCache(path)
    self.addCleanup(cache.close)
    return cache.lookup(keys)

  def test_added_results_are_found_by_the_next_cache(self):
    path = self.create_tempdir().full_path + "/deep/cache.jsonl"
    cache = cache_lib.RequestCache(path)
    cache.add("a", [-0.1, True])
    cache.add("b", "text\n")
    self.addCleanup(cache.close)
    # Not closed yet: a killed process does not close, either.
    self.assertEqual(self.lookup(path, ["b", "a", "c"]), {"a": [-0.1, True], "b": "text\n"})

  def test_floats_come_back_as_they_were(self):
    path = self.create_tempdir().full_path + "/cache.jsonl"
    value = float(np.nextafter(-123.456, 0))
    cache = cache_lib.RequestCache(path)
    cache.add("a", [value, False])
    cache.close()
    self.assertEqual(self.lookup(path, ["a"])["a"][0], value)

  def test_an_incomplete_line_is_ignored_and_damages_no_other(self):
    path = pathlib.Path(self.create_tempdir().full_path, "cache.jsonl")
    path.write_text('{"key": "a", "result": 1}\n{"key": "b", "resu')
    cache = cache_lib.RequestCache(path)
    self.assertEqual(cache.lookup(["a", "b"]), {"a": 1})
    cache.add("c", 3)
    cache.close()
    self.assertEqual(self.lookup(path, ["a", "b", "c"]), {"a": 1, "c": 3})

  def test_without_a_file_nothing_is_kept(self):
    cache = cache_lib.RequestCache(None)
    cache.add("a", 1)
    self.assertEqual(cache.lookup(["a"]), {})

  def test_the_fingerprint_sees_every_change_of_the_weights(self):
    params = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": jnp.ones(4, jnp.bfloat16)}
    changed = [
        {**params, "a": params["a"] + np.eye(2, 3, dtype=np.float32) * 1e-6},
        {**params, "a": params["a"][::-1].copy()},
        {**params, "a": params["a"].reshape(3, 2)},
        {**params, "a": -params["a"]},
        {**params, "b": params["b"].astype(jnp.float32)},
        {"a": params["a"], "c": params["b"]},
        {**params, "c": np.array([True])},
    ]
    found = [cache_lib.fingerprint(tree) for tree in [params, *changed]]
    self.assertLen(set(found), len(found))
    self.assertEqual(cache_lib.fingerprint(jax.tree.map(jnp.asarray, params)), found[0])

  def test_the_fingerprint_does_not_depend_on_the_layout(self):
    sharding = jax.sharding.NamedSharding(
        pipeline_cases.make_mesh(), jax.sharding.PartitionSpec("data")
    )
    array = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    placed = jax.device_put(array, sharding)
    self.assertEqual(cache_lib.fingerprint({"w": placed}), cache_lib.fingerprint({"w": array}))


if __name__ == "__main__":
  jax.config.update("jax_num_cpu_devices", 4)
  absltest.main()
