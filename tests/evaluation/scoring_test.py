"""Tests for running a model over rows of tokens."""

import contextlib
import dataclasses
import doctest
import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from jax.sharding import PartitionSpec

from maxtext_olmo import errors
from maxtext_olmo.evaluation import packing as packing_lib
from maxtext_olmo.evaluation import requests as requests_lib
from maxtext_olmo.evaluation import scoring
from maxtext_olmo.trainers.tiny import model
from tests.evaluation import pipeline_cases
from tests.evaluation import reference
from tests.evaluation import scoring_test
from tests.loader import cases


def setUpModule():
  cases.compile_fast()


def some_rows(count, seed=0, longest=60):
  rng = np.random.default_rng(seed)
  rows = []
  for number in range(count):
    tokens = rng.integers(0, 256, size=int(rng.integers(2, longest)))
    rows.append(requests_lib.Row(tokens, int(rng.integers(1, len(tokens))), number))
  return rows


def make_scorer(apply=reference.apply, **options):
  options = {"batch_size": 4, "padding_multiple": 16, **options}
  return scoring.Scorer(apply, pipeline_cases.make_mesh(), **options)


class LMEvalScoringTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.params = reference.random_params()
    cls.expected = [reference.score(cls.params, row.tokens, row.scored) for row in some_rows(90)]

  @parameterized.parameters((True, 1), (True, 64), (False, 4), ("auto", 4))
  def test_rows_score_as_they_do_alone_without_padding_in_float64(self, packing, batch_size):
    rows = some_rows(90)
    scorer = make_scorer(packing=packing, batch_size=batch_size)
    found = {s.request: s for batch in scorer.scores(self.params, rows) for s in batch}
    self.assertLen(found, 90)
    for row, (logprob, is_greedy) in zip(rows, self.expected):
      self.assertAlmostEqual(found[row.request].logprob, logprob, delta=1e-4)
      self.assertEqual(found[row.request].is_greedy, is_greedy)

  def test_sharing_rows_runs_fewer_tokens(self):
    rows = some_rows(90)
    run = {}
    for packing in (True, "auto", False):
      scorer = make_scorer(packing=packing)
      list(scorer.scores(self.params, rows))
      self.assertEqual(scorer.tokens_scored, sum(row.length for row in rows))
      run[packing] = scorer.tokens_run
    self.assertLess(run[True], run["auto"])  # which tries it out
    self.assertLess(run["auto"], run[False])

  def test_a_model_that_mixes_requests_scores_each_alone_with_a_warning(self):
    rows = some_rows(90)
    apply = pipeline_cases.looks_across_borders
    found = {}
    for packing in ("auto", False, True):
      scorer = make_scorer(apply, packing=packing)
      with self.assertLogs("absl") if packing == "auto" else contextlib.nullcontext() as logs:
        found[packing] = sorted(
            (s.request, s.logprob) for batch in scorer.scores(self.params, rows) for s in batch
        )
      if packing == "auto":
        self.assertIn("in a separate row, because the model mixes", logs.output[0])
    np.testing.assert_allclose(found["auto"], found[False], rtol=0, atol=1e-4)
    # Told that it may, it does; so there is something to be found.
    self.assertGreater(np.abs(np.array(found[True]) - found[False]).max(), 1.0)

  def test_a_model_is_tested_again_with_other_weights(self):
    rows = some_rows(90)
    scorer = make_scorer(pipeline_cases.looks_across_borders)
    # Without its attention, it keeps all tokens apart.
    blind = {**self.params, "layers": dict(self.params["layers"])}
    blind["layers"]["attention_out"] = 0 * blind["layers"]["attention_out"]
    list(scorer.scores(blind, rows))
    shared = scorer.tokens_run
    list(scorer.scores(self.params, rows))
    self.assertGreater(scorer.tokens_run, 2 * shared)

  def test_each_length_is_compiled_once_and_reported(self):
    scorer = make_scorer(lambda params, batch: jax.nn.one_hot(batch.inputs, 260), packing=False)
    for seed in range(3):
      list(scorer.scores((), some_rows(40, seed, longest=400)))
    self.assertEqual(scorer._step._cache_size(), len(scorer.lengths))
    self.assertLessEqual(len(scorer.lengths), 12)
    self.assertGreater(len(scorer.lengths), 6)
    before = set(scorer.lengths)
    list(scorer.scores((), some_rows(40, 0, longest=400)))
    self.assertEqual(scorer.lengths, before)

  def test_no_batch_is_longer_than_the_limit_padding_included(self):
    scorer = make_scorer(lambda params, batch: jax.nn.one_hot(batch.inputs, 260), max_length=61)
    list(scorer.scores((), some_rows(12, longest=62)))
    self.assertLessEqual(max(scorer.lengths), 61)
    self.assertEqual(scorer.padded_length(60), 61)
    self.assertEqual(make_scorer().padded_length(60), 64)

  def test_sums_of_long_texts_keep_their_digits(self):
    # Two equally likely tokens; in float32, the sum over the text would be off by more than 0.01.
    def even(params, batch):
      del params
      return jax.nn.one_hot(batch.inputs, 2) * 0

    tokens = np.zeros(200_001, np.int64)
    scorer = make_scorer(even, batch_size=1)
    ((score,),) = scorer.scores((), [requests_lib.Row(tokens, 200_000, 0)])
    self.assertAlmostEqual(score.logprob, -200_000 * float(np.float32(np.log(2))), delta=1e-3)

  def test_the_vocabulary_is_that_of_the_logits(self):
    self.assertEqual(make_scorer().vocab_size(self.params), 260)

  def test_no_rows_give_no_scores(self):
    self.assertEmpty(list(make_scorer().scores(self.params, [])))

  def test_a_batch_that_no_process_can_hold_is_an_error_at_once(self):
    with self.assertRaisesRegex(errors.ConfigError, "batch_size=0 must be positive"):
      make_scorer(batch_size=0)
    with self.assertRaisesRegex(errors.ConfigError, "packing='on' is unknown; choose from 'auto'"):
      make_scorer(packing="on")
    with self.assertRaisesRegex(errors.ConfigError, "'model'"):
      make_scorer(data_sharding=PartitionSpec("model"))


_FIELDS = ("inputs", "inputs_position", "inputs_segmentation")


def transformer(params, batch, *, dtype="float32", **changes):
  """The embedded model, with some fields of the batch changed."""
  fields = {name: getattr(batch, name) for name in _FIELDS} | changes
  return model.apply(params, fields, dataclasses.replace(reference.CONFIG, dtype=dtype))


def looks_across_borders(params, batch, **options):
  one = (batch.inputs_segmentation > 0).astype(jnp.int32)
  return transformer(params, batch, inputs_segmentation=one, **options)


def with_position_embeddings(params, batch, position, **options):
  """A model with absolute positions, not only relative ones."""
  table = np.random.default_rng(1).normal(size=(512, 260)).astype(np.float32) * 0.1
  return transformer(params, batch, **options) + jnp.asarray(table)[position]


def counts_from_the_rows_beginning(params, batch, **options):
  position = jnp.arange(batch.inputs.shape[1])[None] + jnp.zeros_like(batch.inputs)
  return with_position_embeddings(params, batch, position, **options)


def counts_by_position(params, batch, **options):
  return with_position_embeddings(params, batch, batch.inputs_position, **options)


def recurrent(params, batch, starts_afresh):
  """A decaying sum of embeddings, which may restart at borders."""
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
  """Returns the reason why requests cannot share rows; empty if they can."""
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
    self.assertEqual(doctest.testmod(scoring), (0, 2))

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
      (looks_across_borders, "mixes the requests of a row"),
      (functools.partial(looks_across_borders, dtype="bfloat16"), "mixes the requests of a row"),
      (counts_from_the_rows_beginning, "does not use inputs_position"),
      (
          functools.partial(counts_from_the_rows_beginning, dtype="bfloat16"),
          "does not use inputs_position",
      ),
      (functools.partial(recurrent, starts_afresh=False), "mixes the requests of a row"),
      (is_broken, "returns NaN"),
  )
  def test_models_that_mix_requests_are_detected(self, apply, message):
    self.assertIn(message, reason(apply, self.params))

  @parameterized.parameters(
      (looks_across_borders, "mixes the requests of a row"),
      (counts_from_the_rows_beginning, "does not use inputs_position"),
      (transformer, ""),
  )
  def test_one_row_is_enough(self, apply, message):
    found = reason(apply, self.params, batch_size=1)
    self.assertEqual(bool(found), bool(message))
    self.assertIn(message, found)

  def test_an_untrained_model_that_mixes_requests_is_detected(self):
    params = model.init(jax.random.key(0), reference.CONFIG)
    self.assertIn("mixes the requests of a row", reason(looks_across_borders, params))
    self.assertEqual(reason(transformer, params), "")

  def test_half_precision_is_detected_inside_loops(self):
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
      found = scoring.computes_in_half_precision(loop(dtype), platform)
      self.assertEqual(found, expected, (dtype, platform))


if __name__ == "__main__":
  absltest.main()
