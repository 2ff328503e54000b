"""Functions that the processes of the evaluation tests run. Needs the extra `eval`."""

import dataclasses

import jax
import numpy as np

import maxtext_olmo
from maxtext_olmo.evaluation import perplexity
from maxtext_olmo.evaluation import pipeline as pipeline_lib
from maxtext_olmo.evaluation import scoring
from tests.evaluation import reference


@dataclasses.dataclass(frozen=True)
class Request:
  """The fields of a harness request that a model reads."""

  args: tuple


def make_mesh(axes=None):
  axes = axes or {"data": jax.device_count()}
  return jax.sharding.Mesh(np.array(jax.devices()).reshape(tuple(axes.values())), tuple(axes))


def looks_across_borders(params, batch):
  """The reference model without segments: all earlier tokens of the row are context."""
  one = (batch.inputs_segmentation > 0).astype(np.int32)
  return reference.apply(params, dataclasses.replace(batch, inputs_segmentation=one))


def make_lm(params, *, axes=None, data_sharding=None, ignores_segments=False, **options):
  options = {
      "batch_size": 8,
      "max_length": 64,
      "padding_multiple": 32,
      "progress": False,
      **options,
  }
  spec = None if data_sharding is None else jax.sharding.PartitionSpec(*data_sharding)
  apply = looks_across_borders if ignores_segments else reference.apply
  return maxtext_olmo.JaxLM(apply, params, "bytes", make_mesh(axes), data_sharding=spec, **options)


def answer(params, calls, **options):
  """Returns the answers to (method, arguments) calls, the lengths compiled, and the tokens run."""
  lm = make_lm(params, **options)
  return _answer(lm, calls), lm.compiled_lengths, lm._scorer.tokens_run


def answer_again(params, calls, all_options):
  """Returns the same for each of some options."""
  return [answer(params, calls, **options) for options in all_options]


def _answer(lm, calls):
  return [getattr(lm, method)([Request(args) for args in requests]) for method, requests in calls]


def answer_and_run_harness(params, calls, task_dir, names, **options):
  """Returns the answers to some calls, and the harness's own results on its tasks."""
  from maxtext_olmo.trainers.tiny import evaluation

  lm = make_lm(params, **options)
  return _answer(lm, calls), summary(evaluation.Tasks(names, task_dir).run(lm, log_samples=True))


def summary(results):
  """Returns the figures of some results, and the answer to each request."""
  from maxtext_olmo.trainers.tiny import evaluation

  answers = {
      task: [sample["resps"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]
      for task, samples in results["samples"].items()
  }
  return evaluation.metrics(results), answers


def different_requests(params):
  """Sends different requests on each process."""
  lm = make_lm(params)
  return lm.loglikelihood([Request(("a", "b" * (1 + jax.process_index())))])


def rows_and_shapes(requests, batch_size, padding_multiple):
  """Returns the shape and the local rows of each step of `lmeval_preprocessing_pipeline`."""
  batches = pipeline_lib.lmeval_preprocessing_pipeline(
      jax.process_index(),
      jax.process_count(),
      make_mesh(),
      [Request(args) for args in requests],
      batch_size,
      "bytes",
      padding_multiple=padding_multiple,
      worker_count=0,
  )
  return [
      (batch.inputs.shape, [s.data.tolist() for s in batch.document_idx.addressable_shards])
      for batch in batches
  ]


def index_perplexity(params, index_path, batch_size, max_length, rule=None):
  """Returns the score of each label."""
  from maxtext_olmo.corpus import index_builder as index_lib
  from maxtext_olmo.evaluation import tokenizer as tokenizer_lib

  scorer = scoring.Scorer(
      reference.apply,
      make_mesh(),
      batch_size=batch_size,
      padding_multiple=16,
      max_length=max_length,
  )
  tokenizer = tokenizer_lib.load_eval_tokenizer("bytes")
  index = index_lib.load_index(index_path)
  rule = None if rule is None else perplexity.OlmoCoreRule(*rule)
  return perplexity.score_index(scorer, params, index, tokenizer, olmo_core=rule)
