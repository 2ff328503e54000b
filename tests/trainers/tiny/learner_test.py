"""Tests of maxtext_olmo.trainers.tiny.learner."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from jax.sharding import PartitionSpec as P

from maxtext_olmo import errors
from maxtext_olmo.trainers.tiny import learner as learner_lib
from tests.trainers.tiny import train_cases as cases


def setUpModule():
  jax.config.update("jax_num_cpu_devices", 4)


def _batch(segments: int = 1) -> dict[str, jax.Array]:
  tokens = jnp.arange(64, dtype=jnp.int32).reshape(4, 16) % 50
  ones = jnp.ones_like(tokens)
  return {
      "inputs": tokens,
      "inputs_segmentation": ones,
      "inputs_position": ones * jnp.arange(16),
      "targets": tokens,
      "targets_segmentation": ones * segments,
  }


class LearnerTest(parameterized.TestCase):

  def make(self, **changes) -> learner_lib.Learner:
    config = cases.make_config(**changes)
    return learner_lib.Learner(config, learner_lib.make_mesh(config))

  @parameterized.parameters(((-1, 1), (4, 1)), ((2, -1), (2, 2)), ((1, 4), (1, 4)))
  def test_a_mesh_takes_all_devices(self, shape, expected):
    mesh = learner_lib.make_mesh(cases.make_config(mesh_shape=shape))
    self.assertEqual(dict(mesh.shape), dict(zip(("data", "fsdp"), expected)))

  @parameterized.parameters((3, 1), (-1, 3), (8, 1))
  def test_a_mesh_that_does_not_fit_is_an_error_with_the_numbers(self, *shape):
    with self.assertRaisesRegex(errors.ConfigError, "does not fit 4 devices .processes: 1"):
      learner_lib.make_mesh(cases.make_config(mesh_shape=shape))

  def test_large_weights_and_their_moments_are_split_over_fsdp(self):
    learner = self.make(mesh_shape=(2, 2), vocab_size=1024, emb_dim=32, mlp_dim=1024)
    state = learner.init()
    params = state["params"]
    self.assertEqual(params["embedding"].sharding.spec, P("fsdp", None))
    self.assertEqual(params["layers"]["gate"].sharding.spec, P(None, None, "fsdp"))
    self.assertEqual(params["layers"]["query"].sharding.spec, P(None, None, None))  # small
    self.assertEqual(params["layers"]["gate"].addressable_shards[0].data.shape, (1, 32, 512))
    moments = [
        leaf.sharding.spec
        for path, leaf in jax.tree_util.tree_leaves_with_path(state["opt_state"])
        if "gate" in jax.tree_util.keystr(path)
    ]
    self.assertEqual(moments, [P(None, None, "fsdp")] * 2)

  def test_what_does_not_divide_stays_whole(self):
    learner = self.make(mesh_shape=(1, 4), vocab_size=1001, emb_dim=17)
    self.assertEqual(learner.abstract_state["params"]["embedding"].sharding.spec, P(None, None))

  def test_a_step_updates_the_state_and_reports(self):
    learner = self.make(warmup_steps=2, learning_rate=0.5, weight_decay=0.0)
    state = learner.init()
    before = np.asarray(state["params"]["embedding"])
    state, metrics = learner.train_step(state, _batch())
    self.assertEqual(metrics["learning_rate"], 0.0)
    np.testing.assert_array_equal(before, state["params"]["embedding"])
    state, metrics = learner.train_step(state, _batch())
    self.assertEqual(metrics["learning_rate"], 0.25)
    self.assertEqual(metrics["target_tokens"], 64)
    self.assertEqual(state["step"], 2)
    self.assertFalse(np.array_equal(before, state["params"]["embedding"]))

  def test_a_batch_of_which_nothing_counts_is_harmless(self):
    learner = self.make(warmup_steps=0, weight_decay=0.0)
    state = learner.init()
    before = np.asarray(state["params"]["embedding"])
    state, metrics = learner.train_step(state, _batch(segments=0))
    self.assertEqual((metrics["loss"], metrics["grad_norm"]), (0.0, 0.0))
    np.testing.assert_array_equal(before, state["params"]["embedding"])

  def test_weight_decay_spares_the_embedding_and_the_norms(self):
    learner = self.make(warmup_steps=0, learning_rate=0.1, weight_decay=0.5, grad_clip=0.0)
    state = learner.init()
    before = jax.tree.map(np.asarray, state["params"])
    after, _ = learner.train_step(state, _batch(segments=0))
    np.testing.assert_allclose(
        after["params"]["layers"]["gate"], before["layers"]["gate"] * 0.95, rtol=1e-5
    )
    for name in ("attention_norm", "mlp_norm"):
      np.testing.assert_array_equal(after["params"]["layers"][name], before["layers"][name])
    np.testing.assert_array_equal(after["params"]["embedding"], before["embedding"])

  def test_initial_weights_do_not_depend_on_the_mesh(self):
    big = {"vocab_size": 1024, "emb_dim": 32}
    one = self.make(mesh_shape=(4, 1), **big).init()["params"]
    two = self.make(mesh_shape=(1, 4), **big).init()["params"]
    jax.tree.map(np.testing.assert_array_equal, one, two)
    other = self.make(init_seed=1, **big).init()["params"]
    self.assertFalse(np.array_equal(one["embedding"], other["embedding"]))


if __name__ == "__main__":
  absltest.main()
