"""Adapts a JAX model to lm-evaluation-harness. Importing this module imports the harness."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec

from maxtext_olmo import errors
from maxtext_olmo import progress as progress_lib
from maxtext_olmo.devices import collectives
from maxtext_olmo.evaluation import cache as cache_lib
from maxtext_olmo.evaluation import generate as generate_lib
from maxtext_olmo.evaluation import requests as requests_lib
from maxtext_olmo.evaluation import scoring
from maxtext_olmo.evaluation import tokenizer as tokenizer_lib

try:
  from lm_eval.api.instance import Instance
  from lm_eval.api.model import LM
except ImportError as error:
  raise errors.ConfigError(
      "Evaluation needs lm-evaluation-harness: pip install lm-eval tokenizers."
  ) from error

Arguments = tuple[Any, ...]
Keep = Callable[[int, Any], None]


class JaxLM(LM):
  """Runs harness requests on a model over a mesh, on one process or on several.

  In a job with several processes, each creates a `JaxLM` over the global mesh and makes the same
  harness call. Every process gets all requests and all results, but only process 0 should report
  them. `JaxLM` itself splits the rows over the mesh; to the harness, each process is rank 0 of 1.

  >>> import types
  >>> import numpy as np
  >>> def apply(params, batch):  # A bigram model.
  ...   return params[batch.inputs]
  >>> mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
  >>> lm = JaxLM(apply, jax.numpy.zeros((512, 512)), "bytes", mesh, batch_size=2, progress=False)
  >>> [(score, greedy)] = lm.loglikelihood([types.SimpleNamespace(args=("The sky is", " blue"))])
  >>> round(score, 3), greedy  # Five bytes, each with a probability of 1 / 512.
  (-31.192, False)

  `lm_eval.simple_evaluate(lm, tasks=["arc_easy"])` runs a task of the harness on this model.

  Args:
    apply: Maps parameters and an `LLMIndexedBatch` to logits (rows, tokens, vocabulary). A model
      that is not causal must use `inputs_position` and mask by `inputs_segmentation`, as in
      training (0 is padding).
    params: The parameters on the mesh. You may set the attribute `params` between evaluations.
    tokenizer: A tokenizer from `load_eval_tokenizer`, or the `spec` to load it from.
    mesh: The mesh that holds the batches.
    batch_size: Rows per batch, over all processes.
    max_length: The maximum number of input tokens; None for no limit, as for recurrent models.
    truncation: Handling of longer requests: `left` drops the beginning of the context, `error`
      raises.
    padding_multiple: All lengths are rounded up to a multiple of this.
    data_sharding: Sharding of a batch; by default its rows are split over all mesh axes.
    packing: Whether a row may hold several requests, as segments. `auto` packs if packing does not
      change the model's scores, which is tested in each call; True packs without a test.
    cache_file: File of finished requests, from which a killed evaluation resumes.
    name: Name of the model, which is part of the cache's keys. Include anything besides the
      parameters that changes the logits.
    max_gen_toks: The maximum number of tokens to generate if a task does not set it.
    seed: Seed for sampling, if a task generates at a temperature above 0.
    progress: Whether process 0 shows progress.
  """

  def __init__(
      self,
      apply: scoring.Apply,
      params: Any,
      tokenizer: str | tokenizer_lib.EvalTokenizer,
      mesh: Mesh,
      *,
      batch_size: int = 64,
      max_length: int | None = None,
      truncation: str = "left",
      padding_multiple: int = 16,
      data_sharding: PartitionSpec | None = None,
      packing: bool | str = "auto",
      cache_file: str | None = None,
      name: str = "",
      max_gen_toks: int = 256,
      seed: int = 0,
      progress: bool = True,
  ):
    super().__init__()
    if truncation not in requests_lib.TRUNCATIONS:
      raise errors.ConfigError(
          f"truncation={truncation!r} is unknown; choose from"
          f" {', '.join(requests_lib.TRUNCATIONS)}."
      )
    if max_length is not None and max_length < 1:
      raise errors.ConfigError(f"max_length={max_length} must be positive, or None for no limit.")
    if isinstance(tokenizer, str):
      tokenizer = tokenizer_lib.load_eval_tokenizer(tokenizer)
    self.tokenizer = tokenizer
    self.truncation = truncation
    self.max_gen_toks = max_gen_toks
    self.name = name
    self.params = params
    self._progress = progress and jax.process_index() == 0
    self._scorer = scoring.Scorer(
        apply,
        mesh,
        batch_size=batch_size,
        padding_multiple=padding_multiple,
        max_length=max_length,
        data_sharding=data_sharding,
        packing=packing,
    )
    self._generator = generate_lib.Generator(apply, self._scorer, tokenizer, seed=seed)
    self._cache_file = cache_file
    self._check_vocabulary()

  @property
  def max_length(self) -> float:
    """The maximum number of input tokens; infinite if there is no limit."""
    return math.inf if self._scorer.max_length is None else self._scorer.max_length

  @property
  def batch_size(self) -> int:
    """The number of rows per batch, over all processes."""
    return self._scorer.batch_size

  @property
  def eot_token_id(self) -> int:
    """The token that ends a text."""
    return self.tokenizer.eos_id

  @property
  def prefix_token_id(self) -> int:
    """The token that precedes a text without context."""
    return self.tokenizer.prefix_id

  @property
  def tokenizer_name(self) -> str:
    """The name of the tokenizer in the harness's request caches."""
    return self.tokenizer.name

  @property
  def compiled_lengths(self) -> tuple[int, ...]:
    """The sequence lengths at which requests were scored; each was compiled once."""
    return tuple(sorted(self._scorer.lengths))

  @property
  def padding_share(self) -> float:
    """The share of padding among the tokens that the model has processed to score requests."""
    run = self._scorer.tokens_run
    return 1 - self._scorer.tokens_scored / run if run else 0.0

  def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
    """Returns the log-probability of each continuation, and whether it is the greedy continuation.

    An empty continuation has probability 1 and is greedy.
    """
    arguments = [request.args for request in requests]
    found = self._answer("loglikelihood", arguments, self._score)
    return [(float(logprob), bool(is_greedy)) for logprob, is_greedy in found]

  def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
    """Returns the log-probability of each text, with every token scored once; 0 for empty texts."""
    arguments = [request.args for request in requests]
    found = self._answer("loglikelihood_rolling", arguments, self._score)
    return [float(logprob) for logprob, _ in found]

  def generate_until(self, requests: Sequence[Instance]) -> list[str]:
    """Returns a continuation of each context, with the generation arguments of its request."""
    arguments = [request.args for request in requests]
    # Read all before running any, so that an unsupported request fails immediately.
    generations = [
        generate_lib.Generation.read(
            options, default_tokens=self.max_gen_toks, max_length=self._scorer.max_length
        )
        for _, options in arguments
    ]
    # Repeated requests get different samples, so samples are neither cached nor shared.
    drawn = {place for place, made in enumerate(generations) if made.temperature > 0}

    def run(requests: dict[int, Arguments], keep: Keep) -> None:
      groups: dict[generate_lib.Generation, dict[int, str]] = {}
      for place, (context, _) in requests.items():
        groups.setdefault(generations[place], {})[place] = context
      for generation, contexts in groups.items():
        for place, text in self._generator.generate(self.params, contexts, generation):
          keep(place, text)

    return self._answer("generate_until", arguments, run, drawn)

  def _answer(
      self,
      kind: str,
      arguments: Sequence[Arguments],
      run: Callable[[dict[int, Arguments], Keep], None],
      drawn: Collection[int] = (),
  ) -> list[Any]:
    """Returns the results of all requests, in order; runs only requests that are not in the cache.

    Args:
      kind: The name of the harness method.
      arguments: The arguments of each request.
      run: Runs requests, keyed by index, and passes each index and its result to a callback.
      drawn: The indices of requests whose results are sampled.
    """
    if not arguments:
      return []
    identity = self._identity() if self._cache_file else ""
    keys = [
        cache_lib.make_key(identity, kind, list(request), place if place in drawn else None)
        for place, request in enumerate(arguments)
    ]
    _check_agreement(keys)
    cache = cache_lib.RequestCache(self._cache_file)
    results = cache.lookup(keys)
    first: dict[str, int] = {}  # Of equal requests, only the first is run.
    for place, key in enumerate(keys):
      first.setdefault(key, place)
    todo = {place: arguments[place] for key, place in first.items() if key not in results}
    try:
      with progress_lib.progress_bar(
          kind, len(todo), enabled=self._progress, unit="requests"
      ) as advance:

        def keep(place: int, result: Any) -> None:
          results[keys[place]] = result
          if place not in drawn:
            cache.add(keys[place], result)
          advance(1)

        if todo:
          run(todo, keep)
    finally:
      cache.close()
    return [results[key] for key in keys]

  def _score(self, requests: dict[int, Arguments], keep: Keep) -> None:
    places = list(requests)
    rows = requests_lib.request_rows(
        self.tokenizer,
        list(requests.values()),
        max_length=self._scorer.max_length,
        truncation=self.truncation,
    )
    missing = [0] * len(places)
    for row in rows:
      missing[row.request] += 1
    totals = [(0.0, True)] * len(places)
    for number, place in enumerate(places):
      if not missing[number]:
        keep(place, totals[number])
    for scores in self._scorer.scores(self.params, rows):
      for score in scores:
        logprob, is_greedy = totals[score.request]
        totals[score.request] = logprob + score.logprob, is_greedy and score.is_greedy
        missing[score.request] -= 1
        if not missing[score.request]:
          keep(places[score.request], totals[score.request])

  def _identity(self) -> str:
    """Returns a hash of everything that decides a result, apart from the request."""
    return cache_lib.make_key(
        cache_lib.fingerprint(self.params),
        self.name,
        self.tokenizer.name,
        self.tokenizer.vocab_size,
        self.tokenizer.prefix_id,
        self._scorer.max_length,
        self.truncation,
        self.max_gen_toks,
        # With `auto`, a test has shown that packing does not change the scores. With True, there
        # was no test.
        self._scorer.packing is True,
    )

  def _check_vocabulary(self) -> None:
    model = self._scorer.vocab_size(self.params)
    largest = max(self.tokenizer.vocab_size - 1, self.tokenizer.prefix_id, self.tokenizer.eos_id)
    if largest >= model:
      raise errors.ConfigError(
          f"The tokenizer {self.tokenizer.name!r} has ids up to {largest}, but the model's"
          f" vocabulary has {model} tokens. Use the tokenizer that the model was trained with."
      )


def _check_agreement(keys: Sequence[str]) -> None:
  if jax.process_count() == 1:
    return
  told = collectives.gather(f"{len(keys)} requests, {cache_lib.make_key(keys)[:8]}")
  if len(set(told)) > 1:
    raise errors.ConfigError(
        f"The processes were given different requests: {'; '.join(told)} (count and hash on each"
        " process). Run the same tasks, with the same limits and seeds, on all processes."
    )
