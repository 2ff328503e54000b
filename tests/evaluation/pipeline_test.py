"""Tests for the evaluation pipeline as a whole."""

import itertools
import subprocess
import sys

import jax
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import maxtext_olmo
from maxtext_olmo import errors
from maxtext_olmo.evaluation import pipeline as pipeline_lib
from tests import distributed
from tests.evaluation import pipeline_cases

STARTS_PROCESSES = True

_DOCUMENTED = (
    "ParseLMEval",
    "CompleteLLMIndexedBatch",
    "empty_llm_indexed_sample",
    "token_length",
    "PadBatchDataset",
    "PadSequenceInBatchDataset",
    "SortedDataset",
    "MultihostSortedRemapDataset",
    "HFTokenizeLogLikelihoodRolling",
    "lmeval_preprocessing_pipeline",
)


def some_requests(count, seed=0):
  """Returns requests of many lengths, with one and with two arguments."""
  lengths = np.random.default_rng(seed).geometric(0.03, size=(count, 2))
  return [
      ("x" * int(a), "y" * int(b)) if i % 3 else ("z" * int(a),) for i, (a, b) in enumerate(lengths)
  ]


def pipeline(requests, **kwargs):
  values = {"global_batch_size": 4, "padding_multiple": 8, "worker_count": 0, **kwargs}
  dataset = [pipeline_cases.Request(args) for args in requests]
  return pipeline_lib.lmeval_preprocessing_pipeline(
      0, 1, pipeline_cases.make_mesh(), dataset, tokenizer_path="bytes", **values
  )


class LMEvalTest(parameterized.TestCase):

  def test_all_that_is_documented_is_importable_from_the_top(self):
    for name in _DOCUMENTED:
      self.assertTrue(callable(getattr(maxtext_olmo, name)))

  def test_the_pipeline_imports_nothing_of_the_harness(self):
    code = (
        "import sys, maxtext_olmo\n"
        "from maxtext_olmo.evaluation import perplexity, pipeline, scoring\n"
        "maxtext_olmo.lmeval_preprocessing_pipeline\n"
        "print([name for name in ('lm_eval', 'tokenizers', 'transformers', 'datasets')"
        " if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=distributed.child_environment(),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    self.assertEqual(done.stdout.strip(), "[]")

  def test_every_request_is_there_once_with_its_tokens_and_its_mask(self):
    requests = some_requests(21)
    seen = {}
    batches = pipeline(requests)
    self.assertLen(batches, 6)
    self.assertEqual(batches.get_dataset_size(), 21)
    for batch in batches:
      self.assertEqual(batch.inputs.shape[0], 4)
      for row in range(4):
        number = int(batch.document_idx[row])
        if number:
          self.assertNotIn(number, seen)
          seen[number] = jax.tree.map(lambda a, row=row: np.asarray(a)[row], batch)
        else:
          self.assertFalse(np.asarray(batch.targets_segmentation)[row].any())
    self.assertEqual(sorted(seen), list(range(1, 22)))
    for number, row in seen.items():
      arguments = requests[number - 1]
      scored = row.targets[row.targets_segmentation != 0]
      self.assertEqual(bytes(scored.tolist()).decode(), arguments[-1])
      length = int(row.inputs_segmentation.sum())
      whole = "".join(arguments).encode()
      # Without a context, the prefix token stands in for one.
      first = [] if len(arguments) == 2 else [256]
      self.assertEqual(row.inputs[:length].tolist(), [*first, *whole][:-1])
      np.testing.assert_array_equal(row.inputs_position[:length], np.arange(length))
      self.assertFalse(row._document_borders.any())

  def test_batches_go_from_long_to_short_in_few_lengths(self):
    lengths = [batch.inputs.shape[1] for batch in pipeline(some_requests(400), padding_multiple=1)]
    self.assertEqual(lengths, sorted(lengths, reverse=True))
    self.assertLessEqual(len(set(lengths)), 12)
    self.assertGreater(len(set(lengths)), 6)

  @parameterized.parameters(
      {"worker_count": 1}, {"worker_count": 2}, {"use_thread_prefetch": True, "worker_count": 2}
  )
  def test_workers_and_threads_change_nothing(self, **kwargs):
    requests = some_requests(13)
    expected = list(pipeline(requests))
    batches = pipeline(requests, **kwargs)
    found = list(batches)
    batches.close()
    self.assertLen(found, len(expected))
    for a, b in zip(expected, found):
      jax.tree.map(np.testing.assert_array_equal, a, b)

  def test_it_can_be_iterated_again(self):
    batches = pipeline(some_requests(9))
    first, second = list(batches), list(batches)
    self.assertLen(second, 3)
    for a, b in zip(first, second):
      jax.tree.map(np.testing.assert_array_equal, a, b)

  @parameterized.parameters(0, 1)
  def test_no_requests_give_no_batches(self, worker_count):
    batches = pipeline([], worker_count=worker_count)
    self.assertEmpty(list(batches))
    self.assertEmpty(batches)

  def test_the_given_ids_precede_texts(self):
    (batch,) = pipeline([("ab",)], bos_token_id=7)
    self.assertEqual(int(batch.inputs[0, 0]), 7)
    (batch,) = pipeline([("ab",)], eos_token_id=9)
    self.assertEqual(int(batch.inputs[0, 0]), 9)

  def test_a_plain_tuple_is_not_a_request(self):
    with self.assertRaisesRegex(errors.ConfigError, "Request 0 is a tuple: .* with `args`"):
      pipeline_lib.lmeval_preprocessing_pipeline(
          0, 1, pipeline_cases.make_mesh(), [("a", "b")], 4, "bytes", worker_count=0
      )

  def test_impossible_hosts_and_sizes_are_errors(self):
    for kwargs, message in (
        ({"host": 2, "host_count": 2}, "Host 2 of 2"),
        ({"host": 0, "host_count": 1, "padding_multiple": 0}, "padding_multiple=0"),
        ({"host": 0, "host_count": 3}, "does not divide over 3 hosts"),
    ):
      with self.assertRaisesRegex(errors.ConfigError, message):
        pipeline_lib.local_batches([], 4, **{"padding_multiple": 8, **kwargs})

  def test_processes_agree_on_every_shape_and_share_each_batch_in_order(self):
    requests = some_requests(37)
    alone = [
        (batch.inputs.shape, batch.document_idx.tolist())
        for batch in pipeline(requests, global_batch_size=8)
    ]
    for processes in (2, 4):
      found = distributed.run(
          "tests.evaluation.pipeline_cases:rows_and_shapes",
          processes=processes,
          args=(requests, 8, 8),
      )
      for step, (shape, rows) in enumerate(alone):
        self.assertEqual({tuple(result[step][0]) for result in found}, {shape})
        parts = [shard for result in found for shard in result[step][1]]
        self.assertEqual(list(itertools.chain(*parts)), rows)


if __name__ == "__main__":
  absltest.main()
