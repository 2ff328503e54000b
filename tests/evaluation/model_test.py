"""Tests for the harness's model: the real package, real tasks, and an independent slow scorer."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import maxtext_olmo
from maxtext_olmo import errors
from tests import distributed
from tests.evaluation import pipeline_cases
from tests.evaluation import reference
from tests.evaluation.requests_test import HAS_HARNESS
from tests.evaluation.requests_test import needs_harness

STARTS_PROCESSES = True

_MAX_LENGTH = 64
_TASKS = ("colours", "texts", "say_colour")
_TOLERANCE = 1e-4


def make_calls():
  """Returns shuffled requests of all three kinds; some exceed the limit, some are repeated."""
  text = reference.text
  pairs = [(text(i, i % 4)[: 5 * i], f" {w}") for i in range(12) for w in ("green", "black")]
  pairs += [("", "The"), ("The colour ", "of"), ("é", "ü"), pairs[0], (text(1, 4), "")]
  texts = [(text(i, i),) for i in range(0, 7, 2)]
  texts += [(text(9, 9)[:n],) for n in (1, _MAX_LENGTH, _MAX_LENGTH + 1, 2 * _MAX_LENGTH)]
  options = {"until": ["."], "max_gen_toks": 6}
  prompts = [(text(i, 2)[: 9 * i + 1], options) for i in range(5)]
  for requests in (pairs, texts, prompts):
    random.Random(0).shuffle(requests)
  return [("loglikelihood", pairs), ("loglikelihood_rolling", texts), ("generate_until", prompts)]


def kill_me_soon(cache_file):
  """Evaluates in a process that will be killed."""
  lm = pipeline_cases.make_lm(reference.random_params(), batch_size=1, cache_file=cache_file)
  lm.loglikelihood(
      [pipeline_cases.Request(("x" * (i % 16), chr(97 + i % 26) * 2)) for i in range(400)]
  )


class JaxLMTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    if not HAS_HARNESS:
      raise unittest.SkipTest("lm-evaluation-harness is missing: pip install -e '.[eval]'")
    cls.params = reference.trained_params()
    cls.slow = reference.make_slow_lm(cls.params, _MAX_LENGTH)
    cls.calls = make_calls()
    cls.expected = [cls.slow_answers(method, requests) for method, requests in cls.calls]
    folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.task_dir = reference.write_tasks(folder)

  @classmethod
  def slow_answers(cls, method, requests):
    # The harness's path has no answer for an empty continuation; its probability is 1.
    real = [pipeline_cases.Request(args) for args in requests if args[-1]]
    kwargs = {"disable_tqdm": True} if method == "loglikelihood" else {}
    found = iter(getattr(cls.slow, method)(real, **kwargs))
    nothing = (0.0, True) if method == "loglikelihood" else 0.0
    return [next(found) if args[-1] else nothing for args in requests]

  def check(self, found, expected):
    for (method, requests), mine, theirs in zip(self.calls, found, expected):
      self.assertLen(mine, len(requests))
      if method == "generate_until":
        self.assertEqual(mine, theirs)
      else:
        np.testing.assert_allclose(
            np.array(mine, float), np.array(theirs, float), rtol=0, atol=_TOLERANCE
        )

  @parameterized.parameters((1, "auto"), (64, "auto"), (8, True), (8, False))
  def test_answers_are_the_slow_scorers_at_any_batch_size(self, batch_size, packing):
    found, lengths, _ = pipeline_cases.answer(
        self.params, self.calls, batch_size=batch_size, packing=packing
    )
    self.check(found, self.expected)
    self.assertLessEqual(len(lengths), 12)
    self.assertLessEqual(max(lengths), _MAX_LENGTH)

  def test_answers_do_not_depend_on_the_order_of_requests(self):
    backwards = [(method, requests[::-1]) for method, requests in self.calls[:2]]
    found, *_ = pipeline_cases.answer(self.params, backwards)
    self.check([answers[::-1] for answers in found], self.expected[:2])

  def test_a_model_without_a_limit_sees_all_of_a_long_text(self):
    calls = self.calls[:2]
    found, *_ = pipeline_cases.answer(self.params, calls, max_length=None)
    slow = reference.make_slow_lm(self.params, 10_000)
    requests = [pipeline_cases.Request(args) for args in calls[1][1]]
    np.testing.assert_allclose(found[1], slow.loglikelihood_rolling(requests), rtol=0, atol=1e-4)

  @parameterized.parameters(1, 2, 4)
  def test_the_harness_gives_its_own_figures_on_any_number_of_processes(self, processes):
    import lm_eval

    from maxtext_olmo.trainers.tiny import evaluation

    tasks = evaluation.Tasks(_TASKS, self.task_dir)
    reference = lm_eval.simple_evaluate(
        self.slow, tasks=list(tasks.names), task_manager=tasks._manager, bootstrap_iters=0
    )
    figures, answers = pipeline_cases.summary(reference)
    results = distributed.run(
        "tests.evaluation.pipeline_cases:answer_and_run_harness",
        processes=processes,
        devices=2 if processes == 2 else 1,
        args=(self.params, self.calls, self.task_dir, _TASKS),
        kwargs={"packing": True},
    )
    self.assertLen(figures, 4)
    for found, (my_figures, my_answers) in results:
      self.check(found, self.expected)
      self.assertEqual(my_figures.keys(), figures.keys())
      for name, value in figures.items():
        self.assertAlmostEqual(my_figures[name], value, delta=_TOLERANCE, msg=name)
      self.assertEqual(my_answers["say_colour"], answers["say_colour"])
      for task in ("colours", "texts"):
        for mine, theirs in zip(my_answers[task], answers[task], strict=True):
          np.testing.assert_allclose(
              np.array(mine, float), np.array(theirs, float), rtol=0, atol=_TOLERANCE
          )

  def test_processes_that_hold_the_same_rows_get_the_same_answers(self):
    results = distributed.run(
        "tests.evaluation.pipeline_cases:answer",
        args=(self.params, self.calls[:2]),
        kwargs={"axes": {"data": 1, "tensor": 2}, "data_sharding": ("data",)},
    )
    for found, *_ in results:
      self.check(found, self.expected[:2])

  def test_processes_agree_whether_requests_may_share_rows(self):
    text = reference.text(3)
    requests = [(text[: i % 23], chr(97 + i % 26) * 2) for i in range(60)]
    expected = self.slow_answers("loglikelihood", requests)
    common = {"batch_size": 2}
    results = distributed.run(
        "tests.evaluation.pipeline_cases:answer_again",
        args=(
            self.params,
            [("loglikelihood", requests)],
            [
                {**common, "packing": False},
                {**common, "packing": "auto"},
                {**common, "packing": "auto", "ignores_segments": True},
            ],
        ),
    )
    for answers in results:
      for (found,), *_ in answers:
        np.testing.assert_allclose(found, expected, rtol=0, atol=_TOLERANCE)
      alone, shared, refused = (tokens for *_, tokens in answers)
      self.assertLess(shared, alone)
      self.assertGreater(refused, alone)  # it was tried

  def test_processes_with_different_requests_stop_on_all(self):
    with self.assertRaises(distributed.DistributedError) as caught:
      distributed.run("tests.evaluation.pipeline_cases:different_requests", args=(self.params,))
    self.assertLen(caught.exception.failures, 2)
    for failure in caught.exception.failures:
      self.assertIn("The processes were given different requests", failure.text)

  def test_no_requests_give_no_results(self):
    lm = pipeline_cases.make_lm(self.params)
    self.assertEqual(lm.loglikelihood([]), [])
    self.assertEqual(lm.loglikelihood_rolling([]), [])
    self.assertEqual(lm.generate_until([]), [])
    self.assertEqual(lm.loglikelihood_rolling([pipeline_cases.Request(("",))]), [0.0])

  def test_the_harness_sees_one_process_and_the_tokenizers_ids(self):
    lm = pipeline_cases.make_lm(self.params)
    self.assertEqual((lm.rank, lm.world_size, lm.max_length, lm.batch_size), (0, 1, 64, 8))
    self.assertEqual((lm.eot_token_id, lm.prefix_token_id, lm.tokenizer_name), (256, 256, "bytes"))
    self.assertEqual(pipeline_cases.make_lm(self.params, max_length=None).max_length, float("inf"))

  def test_the_share_of_padding_is_that_of_what_was_run(self):
    lm = pipeline_cases.make_lm(self.params, batch_size=2)
    self.assertEqual(lm.padding_share, 0)
    lm.loglikelihood([pipeline_cases.Request(("x" * 20, "ab"))])
    self.assertAlmostEqual(lm.padding_share, 1 - 21 / 64)

  @parameterized.parameters(
      ({"truncation": "right"}, "truncation='right' is unknown; choose from left, error"),
      ({"max_length": 0}, "max_length=0 must be positive"),
      ({"packing": "never"}, "packing='never' is unknown; choose from 'auto', True, False"),
      ({"tokenizer": "./nowhere"}, "There is no tokenizer ./nowhere"),
  )
  def test_impossible_options_are_errors(self, options, message):
    tokenizer = options.pop("tokenizer", "bytes")
    with self.assertRaisesRegex(errors.ConfigError, message):
      maxtext_olmo.JaxLM(
          reference.apply, self.params, tokenizer, pipeline_cases.make_mesh(), **options
      )

  def test_a_tokenizer_beyond_the_models_vocabulary_is_an_error(self):
    small = {**self.params, "embedding": self.params["embedding"][:200]}
    with self.assertRaisesRegex(errors.ConfigError, "ids up to 257, .* vocabulary has 200 tokens"):
      pipeline_cases.make_lm(small)

  def test_with_truncation_error_nothing_is_cut(self):
    lm = pipeline_cases.make_lm(self.params, truncation="error")
    with self.assertRaisesRegex(
        errors.ConfigError, "101 input tokens, but the model takes at most 64"
    ):
      lm.loglikelihood([pipeline_cases.Request(("x" * 100, "ab"))])

  def test_repeated_samples_differ_and_repeated_greedy_texts_do_not(self):
    drawn = ("The colour of", {"do_sample": True, "temperature": 1.0, "max_gen_toks": 6})
    greedy = ("The colour of", {"max_gen_toks": 6})
    lm = pipeline_cases.make_lm(self.params, cache_file=self.create_tempdir().full_path + "/c")
    requests = [pipeline_cases.Request(args) for args in (drawn, greedy, drawn, greedy, drawn)]
    found = lm.generate_until(requests)
    self.assertLen({found[0], found[2], found[4]}, 3)
    self.assertEqual(found[1], found[3])
    self.assertEqual(lm.generate_until(requests), found)


@needs_harness
class CacheTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.params = reference.random_params()
    self.cache_file = self.create_tempdir().full_path + "/cache.jsonl"
    self.requests = [
        pipeline_cases.Request(("x" * (i % 16), chr(97 + i % 26) * 2)) for i in range(400)
    ]

  def lines(self):
    if not os.path.exists(self.cache_file):
      return []
    with open(self.cache_file, encoding="utf-8") as file:
      return file.readlines()

  def test_a_killed_evaluation_resumes(self):
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from tests.evaluation import model_test as m; m.kill_me_soon(sys.argv[1])",
            self.cache_file,
        ],
        env=distributed.child_environment(),
    )
    while len(self.lines()) < 20 and child.poll() is None:
      time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    self.assertEqual(child.wait(), -signal.SIGKILL)
    kept = [line for line in self.lines() if line.endswith("\n")]
    distinct = len({request.args for request in self.requests})
    self.assertBetween(len(kept), 20, distinct - 1)

    lm = pipeline_cases.make_lm(self.params, cache_file=self.cache_file)
    found = lm.loglikelihood(self.requests)
    fresh = pipeline_cases.make_lm(self.params)
    np.testing.assert_allclose(found, fresh.loglikelihood(self.requests), rtol=0, atol=1e-4)
    # What was kept was not run again.
    self.assertLess(lm._scorer.tokens_run, fresh._scorer.tokens_run)
    self.assertEqual(self.lines()[: len(kept)], kept)
    again = pipeline_cases.make_lm(self.params, cache_file=self.cache_file)
    self.assertEqual(again.loglikelihood(self.requests), found)
    self.assertEqual(again._scorer.tokens_run, 0)

  def test_other_weights_or_limits_do_not_use_the_cache(self):
    requests = self.requests[:4]
    pipeline_cases.make_lm(self.params, cache_file=self.cache_file).loglikelihood(requests)
    changed = {**self.params, "final_norm": self.params["final_norm"] * 1.5}
    for params, options in (
        (changed, {}),
        (self.params, {"max_length": 32}),
        (self.params, {"name": "b"}),
    ):
      lm = pipeline_cases.make_lm(params, cache_file=self.cache_file, **options)
      found = lm.loglikelihood(requests)
      self.assertGreater(lm._scorer.tokens_run, 0)
      fresh = pipeline_cases.make_lm(params, **options)
      np.testing.assert_allclose(found, fresh.loglikelihood(requests), rtol=0, atol=1e-4)

  def test_several_processes_resume_from_one_file(self):
    arguments = [request.args for request in self.requests[:30]]
    lm = pipeline_cases.make_lm(self.params, cache_file=self.cache_file)
    first = lm.loglikelihood(self.requests[:20])
    results = distributed.run(
        "tests.evaluation.pipeline_cases:answer",
        args=(self.params, [("loglikelihood", arguments)]),
        kwargs={"cache_file": self.cache_file},
    )
    (mine, *_), (theirs, *_) = results
    self.assertEqual(mine, theirs)
    self.assertEqual(mine[0][:20], first)
    self.assertLen(self.lines(), len(set(arguments)))


class WithoutHarnessTest(absltest.TestCase):

  def test_without_the_extra_the_error_says_what_to_install(self):
    code = (
        "import sys\n"
        "sys.modules['lm_eval'] = None\n"
        "import maxtext_olmo\n"
        "try:\n"
        "  maxtext_olmo.JaxLM\n"
        "except maxtext_olmo.ConfigError as error:\n"
        "  print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=distributed.child_environment(),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    self.assertIn("pip install lm-eval tokenizers", done.stdout)


if __name__ == "__main__":
  absltest.main()
