"""Tests of maxtext_olmo.trainers.tiny.model."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from jax.sharding import PartitionSpec as P

from maxtext_olmo import errors
from maxtext_olmo.trainers.tiny import model
from tests.loader import cases as loader_cases
from tests.trainers.tiny import train_cases as cases

_CONFIG = model.ModelConfig(
    vocab_size=50, emb_dim=16, num_layers=2, num_heads=2, head_dim=8, mlp_dim=32
)


_apply = jax.jit(model.apply, static_argnums=2)
_loss_sum = jax.jit(model.loss_sum, static_argnums=2)


def _batch(inputs, segments=None, positions=None) -> model.Batch:
  inputs = jnp.asarray(inputs)
  ones = jnp.ones_like(inputs)
  length = jnp.arange(inputs.shape[1])
  segments = ones if segments is None else jnp.asarray(segments)
  return {
      "inputs": inputs,
      "inputs_segmentation": segments,
      "inputs_position": ones * length if positions is None else jnp.asarray(positions),
      "targets": jnp.roll(inputs, -1, axis=1),
      "targets_segmentation": segments,
  }


class ModelTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    # Weights large enough that a token which is seen makes a difference.
    params = model.init(jax.random.key(0), _CONFIG)
    self.params = jax.tree.map(lambda w: w * 10 if w.ndim > 1 else w, params)

  def logits(self, batch: model.Batch, config: model.ModelConfig = _CONFIG) -> np.ndarray:
    return np.asarray(_apply(self.params, batch, config))

  def test_an_untrained_model_predicts_uniformly(self):
    batch = _batch(np.arange(20).reshape(2, 10))
    total, count = _loss_sum(model.init(jax.random.key(1), _CONFIG), batch, _CONFIG)
    self.assertEqual(count, 20)
    self.assertAlmostEqual(float(total / count), math.log(50), delta=0.05)

  def test_a_token_is_seen_only_from_itself_on(self):
    tokens = np.arange(10)[None].repeat(2, 0)
    changed = tokens.copy()
    changed[:, 4] = 30
    same = np.isclose(self.logits(_batch(tokens)), self.logits(_batch(changed)), atol=1e-5)
    np.testing.assert_array_equal(same.all(-1)[0], np.arange(10) < 4)

  def test_documents_do_not_see_each_other(self):
    segments, positions = [[1, 1, 1, 2, 2, 0]], [[0, 1, 2, 0, 1, 0]]
    both = self.logits(_batch([[3, 4, 5, 6, 7, 0]], segments, positions))
    first = self.logits(_batch([[3, 4, 5]]))
    second = self.logits(_batch([[6, 7]]))
    np.testing.assert_allclose(both[:, :3], first, atol=1e-4)
    np.testing.assert_allclose(both[:, 3:5], second, atol=1e-4)
    self.assertTrue(np.isfinite(both).all())

  def test_without_the_document_mask_tokens_see_the_documents_before(self):
    joint = self.logits(_batch([[3, 4, 5, 6, 7]]))
    self.assertFalse(np.allclose(joint[:, 3:], self.logits(_batch([[6, 7]])), atol=1e-2))

  def test_positions_count_by_distance_alone(self):
    tokens = [[3, 4, 5, 6]]
    here = self.logits(_batch(tokens, positions=[[0, 1, 2, 3]]))
    np.testing.assert_allclose(
        here, self.logits(_batch(tokens, positions=[[7, 8, 9, 10]])), atol=1e-3
    )
    stretched = self.logits(_batch(tokens, positions=[[0, 5, 9, 20]]))
    self.assertFalse(np.allclose(here, stretched, atol=1e-2))

  def test_masked_targets_do_not_count(self):
    batch = _batch(np.arange(20).reshape(2, 10))
    whole, _ = _loss_sum(self.params, batch, _CONFIG)
    halves = []
    for row in range(2):
      mask = jnp.zeros((2, 10), jnp.int32).at[row].set(1)
      total, count = _loss_sum(self.params, {**batch, "targets_segmentation": mask}, _CONFIG)
      self.assertEqual(count, 10)
      halves.append(float(total))
    self.assertAlmostEqual(sum(halves), float(whole), delta=1e-2)

  def test_remat_changes_nothing(self):
    batch = _batch(np.arange(20).reshape(2, 10))

    def gradient(config: model.ModelConfig):
      return jax.jit(jax.grad(lambda params: model.loss_sum(params, batch, config)[0]))(self.params)

    plain, again = gradient(_CONFIG), gradient(dataclasses.replace(_CONFIG, remat=True))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), plain, again)

  def test_bfloat16_computes_roughly_the_same_and_gives_float32(self):
    params = model.init(jax.random.key(0), _CONFIG)
    batch = _batch(np.arange(20).reshape(2, 10))
    rough = _apply(params, batch, dataclasses.replace(_CONFIG, dtype="bfloat16"))
    self.assertEqual(rough.dtype, jnp.float32)
    np.testing.assert_allclose(rough, _apply(params, batch, _CONFIG), atol=0.02)

  def test_an_untied_output_is_a_parameter_of_its_own(self):
    untied = dataclasses.replace(_CONFIG, logits_via_embedding=False)
    params = model.init(jax.random.key(0), untied)
    self.assertEqual(params["output"].shape, (16, 50))
    self.assertEqual(set(params) - set(self.params), {"output"})
    logits = _apply(params, _batch([[1, 2, 3]]), untied)
    self.assertEqual(logits.shape, (1, 3, 50))


def setUpModule():
  jax.config.update("jax_num_cpu_devices", 4)
  loader_cases.compile_fast()


def _marked_batch(segments: int = 1) -> dict[str, jax.Array]:
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

  def make(self, **changes) -> model.Learner:
    config = cases.make_config(**changes)
    return model.Learner(config, model.make_mesh(config))

  @parameterized.parameters(((-1, 1), (4, 1)), ((2, -1), (2, 2)), ((1, 4), (1, 4)))
  def test_a_mesh_takes_all_devices(self, shape, expected):
    mesh = model.make_mesh(cases.make_config(mesh_shape=shape))
    self.assertEqual(dict(mesh.shape), dict(zip(("data", "fsdp"), expected)))

  @parameterized.parameters(
      ((3, 1), "needs 3 devices"), ((-1, 3), "needs a multiple of 3 devices"), ((8, 1), "needs 8")
  )
  def test_a_mesh_that_does_not_fit_is_an_error_with_the_numbers(self, shape, needed):
    found = r", found 4 \(processes: 1\). mesh_shape=\(-1, 1\) fits any number"
    with self.assertRaisesRegex(errors.ConfigError, f"{needed}.*{found}"):
      model.make_mesh(cases.make_config(mesh_shape=shape))

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

  def test_weights_that_do_not_divide_are_replicated(self):
    learner = self.make(mesh_shape=(1, 4), vocab_size=1001, emb_dim=17)
    self.assertEqual(learner.abstract_state["params"]["embedding"].sharding.spec, P(None, None))

  def test_a_step_updates_the_state_and_reports(self):
    learner = self.make(warmup_steps=2, learning_rate=0.5, weight_decay=0.0)
    state = learner.init()
    before = np.asarray(state["params"]["embedding"])
    state, metrics = learner.train_step(state, _marked_batch())
    self.assertEqual(metrics["learning_rate"], 0.0)
    np.testing.assert_array_equal(before, state["params"]["embedding"])
    state, metrics = learner.train_step(state, _marked_batch())
    self.assertEqual(metrics["learning_rate"], 0.25)
    self.assertEqual(metrics["target_tokens"], 64)
    self.assertEqual(state["step"], 2)
    self.assertFalse(np.array_equal(before, state["params"]["embedding"]))

  def test_a_batch_without_loss_is_harmless(self):
    learner = self.make(warmup_steps=0, weight_decay=0.0)
    state = learner.init()
    before = np.asarray(state["params"]["embedding"])
    state, metrics = learner.train_step(state, _marked_batch(segments=0))
    self.assertEqual((metrics["loss"], metrics["grad_norm"]), (0.0, 0.0))
    np.testing.assert_array_equal(before, state["params"]["embedding"])

  def test_weight_decay_spares_the_embedding_and_the_norms(self):
    learner = self.make(warmup_steps=0, learning_rate=0.1, weight_decay=0.5, grad_clip=0.0)
    state = learner.init()
    before = jax.tree.map(np.asarray, state["params"])
    after, _ = learner.train_step(state, _marked_batch(segments=0))
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
