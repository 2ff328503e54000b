"""Tests for running a model over rows of tokens."""

import contextlib

import jax
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from jax.sharding import PartitionSpec

from maxtext_olmo import errors
from maxtext_olmo.evaluation import requests as requests_lib
from maxtext_olmo.evaluation import scoring
from tests.evaluation import pipeline_cases
from tests.evaluation import reference


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

  def test_a_model_that_would_mix_up_requests_gets_each_alone_and_it_is_said(self):
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
        self.assertIn("in a row of its own, since the model looks at other", logs.output[0])
    np.testing.assert_allclose(found["auto"], found[False], rtol=0, atol=1e-4)
    # Told that it may, it does; so there is something to be found.
    self.assertGreater(np.abs(np.array(found[True]) - found[False]).max(), 1.0)

  def test_a_model_is_tried_again_with_other_weights(self):
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
    # Two tokens, equally likely; in float32, the sum over so many would be off by more than 0.01.
    def even(params, batch):
      del params
      return jax.nn.one_hot(batch.inputs, 2) * 0

    tokens = np.zeros(200_001, np.int64)
    scorer = make_scorer(even, batch_size=1)
    ((score,),) = scorer.scores((), [requests_lib.Row(tokens, 200_000, 0)])
    self.assertAlmostEqual(score.logprob, -200_000 * float(np.float32(np.log(2))), delta=1e-3)

  def test_the_vocabulary_is_that_of_the_logits(self):
    self.assertEqual(make_scorer().vocab_size(self.params), 260)

  def test_no_rows_are_no_scores(self):
    self.assertEmpty(list(make_scorer().scores(self.params, [])))

  def test_a_batch_that_no_process_can_hold_is_an_error_at_once(self):
    with self.assertRaisesRegex(errors.ConfigError, "batch_size=0 must be positive"):
      make_scorer(batch_size=0)
    with self.assertRaisesRegex(errors.ConfigError, "packing='on' is unknown; known are 'auto', T"):
      make_scorer(packing="on")
    with self.assertRaisesRegex(errors.ConfigError, "'model'"):
      make_scorer(data_sharding=PartitionSpec("model"))


if __name__ == "__main__":
  absltest.main()
