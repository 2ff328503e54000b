"""Tests that models which mix up the requests of a row are found out, and others are not."""

import dataclasses
import doctest
import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.evaluation import packing as packing_lib
from maxtext_olmo.evaluation import probe
from maxtext_olmo.trainers.tiny import model
from tests.evaluation import reference
from tests.evaluation import scoring_test

_FIELDS = ("inputs", "inputs_position", "inputs_segmentation")


def transformer(params, batch, *, dtype="float32", **changes):
  """The embedded model, with some fields of the batch changed."""
  fields = {name: getattr(batch, name) for name in _FIELDS} | changes
  return model.apply(params, fields, dataclasses.replace(reference.CONFIG, dtype=dtype))


def looks_across_borders(params, batch, **options):
  one = (batch.inputs_segmentation > 0).astype(jnp.int32)
  return transformer(params, batch, inputs_segmentation=one, **options)


def with_position_embeddings(params, batch, position, **options):
  """A model that knows where in a text it is, not only how far apart two tokens are."""
  table = np.random.default_rng(1).normal(size=(512, 260)).astype(np.float32) * 0.1
  return transformer(params, batch, **options) + jnp.asarray(table)[position]


def counts_from_the_rows_beginning(params, batch, **options):
  position = jnp.arange(batch.inputs.shape[1])[None] + jnp.zeros_like(batch.inputs)
  return with_position_embeddings(params, batch, position, **options)


def counts_by_position(params, batch, **options):
  return with_position_embeddings(params, batch, batch.inputs_position, **options)


def recurrent(params, batch, starts_afresh):
  """A decaying sum of embeddings; at borders it may begin anew."""
  x = params["embedding"][batch.inputs]
  borders = batch.get_document_borders() & starts_afresh

  def step(state, now):
    token, border = now
    state = jnp.where(border[:, None], 0.0, 0.9 * state) + token
    return state, state

  _, states = jax.lax.scan(step, x[:, 0] * 0, (x.swapaxes(0, 1), borders.T))
  return states.swapaxes(0, 1) @ params["embedding"].T


def has_impossible_tokens(params, batch):
  return transformer(params, batch).at[..., 100:].set(-jnp.inf)


def is_broken(params, batch):
  return transformer(params, batch) * jnp.nan


def reason(apply, params, count=30, batch_size=4):
  """What the probe says."""
  rows = scoring_test.some_rows(count)
  scorer = scoring_test.make_scorer(apply, batch_size=batch_size)
  steps = packing_lib.plan_steps([row.length for row in rows], batch_size, 16, pack=True)
  return scorer._why_not_shared(params, steps, rows)


class LMEvalProbeTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.params = reference.random_params()

  def test_the_documented_example_holds(self):
    self.assertEqual(doctest.testmod(probe), (0, 2))

  @parameterized.parameters(
      transformer,
      functools.partial(transformer, dtype="bfloat16"),
      counts_by_position,
      functools.partial(counts_by_position, dtype="bfloat16"),
      functools.partial(recurrent, starts_afresh=True),
      has_impossible_tokens,
  )
  def test_models_that_keep_requests_apart_may_share_rows(self, apply):
    self.assertEqual(reason(apply, self.params), "")

  @parameterized.parameters(
      (looks_across_borders, "looks at other requests"),
      (functools.partial(looks_across_borders, dtype="bfloat16"), "looks at other requests"),
      (counts_from_the_rows_beginning, "does not count positions"),
      (
          functools.partial(counts_from_the_rows_beginning, dtype="bfloat16"),
          "does not count positions",
      ),
      (functools.partial(recurrent, starts_afresh=False), "looks at other requests"),
      (is_broken, "gives NaN"),
  )
  def test_models_that_do_not_are_found(self, apply, message):
    self.assertIn(message, reason(apply, self.params))

  @parameterized.parameters(
      (looks_across_borders, "looks at other requests"),
      (counts_from_the_rows_beginning, "does not count positions"),
      (transformer, ""),
  )
  def test_one_row_is_enough(self, apply, message):
    found = reason(apply, self.params, batch_size=1)
    self.assertEqual(bool(found), bool(message))
    self.assertIn(message, found)

  def test_a_model_that_has_learnt_nothing_is_found_too(self):
    params = model.init(jax.random.key(0), reference.CONFIG)
    self.assertIn("looks at other requests", reason(looks_across_borders, params))
    self.assertEqual(reason(transformer, params), "")

  def test_half_precision_is_seen_inside_of_loops(self):
    def loop(dtype):
      return jax.make_jaxpr(
          lambda x: jax.lax.fori_loop(0, 2, lambda _, x: x.astype(dtype).astype("float32"), x)
      )(1.0)

    for dtype, platform, expected in (
        ("float32", "cpu", False),
        ("bfloat16", "cpu", True),
        ("float16", "cpu", True),
        ("float8_e4m3fn", "cpu", True),
        ("float32", "tpu", True),
    ):
      found = probe.computes_in_half_precision(loop(dtype), platform)
      self.assertEqual(found, expected, (dtype, platform))


if __name__ == "__main__":
  absltest.main()
