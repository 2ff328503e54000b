"""Generates text token by token, greedily or by sampling at a temperature.

Each step runs the model on each text from its beginning. This is slower than with a key-value
cache, but it needs only the model's logits, so it works with every model.

The tokens sampled for a request depend on the seed, the request's index and the step, but not on
the batch or the number of processes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from maxtext_olmo import errors
from maxtext_olmo.evaluation import packing
from maxtext_olmo.evaluation import requests as requests_lib
from maxtext_olmo.evaluation import scoring
from maxtext_olmo.evaluation import tokenizer as tokenizer_lib
from maxtext_olmo.rows import batch as batch_lib

_MAX_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_KNOWN = (*_MAX_TOKENS, "until", "do_sample", "temperature", "num_beams")
# Values with which an unsupported option has no effect.
_WITHOUT_EFFECT = {"top_p": (None, 1, 1.0), "top_k": (None, 0, -1), "num_beams": (None, 1)}


@dataclasses.dataclass(frozen=True)
class Generation:
  """Settings for the continuation of a text."""

  until: tuple[str, ...]  # The text ends before the first occurrence of any of these, or at EOS.
  max_tokens: int
  temperature: float  # 0: greedy.

  @classmethod
  def read(
      cls, arguments: Mapping[str, Any], *, default_tokens: int, max_length: int | None
  ) -> Generation:
    """Parses the generation arguments of a request; raises ConfigError for unsupported ones."""
    until = arguments.get("until") or ()
    temperature = float(arguments.get("temperature") or 0.0)
    if not arguments.get("do_sample", temperature != 0):
      temperature = 0.0
    elif "temperature" not in arguments:
      temperature = 1.0
    if max_length is not None:
      default_tokens = min(default_tokens, max(1, max_length // 2))
    given = [arguments[name] for name in _MAX_TOKENS if arguments.get(name) is not None]
    made = cls(
        until=(until,) if isinstance(until, str) else tuple(text for text in until if text),
        max_tokens=int(given[0]) if given else default_tokens,
        temperature=temperature,
    )
    made._check(arguments, max_length)
    return made

  def _check(self, arguments: Mapping[str, Any], max_length: int | None) -> None:
    unknown = {
        name: value
        for name, value in arguments.items()
        if value not in _WITHOUT_EFFECT.get(name, ())
        and (name in _WITHOUT_EFFECT or name not in _KNOWN)
    }
    # Sampling options have no effect on greedy decoding.
    if unknown and (self.temperature > 0 or "num_beams" in unknown):
      raise errors.ConfigError(
          f"generate_until does not support {unknown}. It supports 'until', 'max_gen_toks',"
          " 'do_sample' and 'temperature'. Change generation_kwargs in the task's YAML."
      )
    if self.max_tokens < 1 or self.temperature < 0:
      raise errors.ConfigError(
          f"max_gen_toks={self.max_tokens} must be positive, and temperature={self.temperature} not"
          " negative."
      )
    if max_length is not None and self.max_tokens >= max_length:
      raise errors.ConfigError(
          f"max_gen_toks={self.max_tokens} leaves no room for a context: the model takes at most"
          f" {max_length} tokens. Set a smaller max_gen_toks in the task's generation_kwargs."
      )


class Generator:
  """Continues texts, a batch at a time; all processes call it together, with the same requests."""

  def __init__(
      self,
      apply: scoring.Apply,
      scorer: scoring.Scorer,
      tokenizer: tokenizer_lib.EvalTokenizer,
      *,
      seed: int,
  ):
    self._apply = apply
    self._scorer = scorer
    self._tokenizer = tokenizer
    self._seed = seed
    everywhere = NamedSharding(scorer.mesh, PartitionSpec())
    self._step = jax.jit(self._next_tokens, out_shardings=everywhere)

  def generate(
      self, params: Any, contexts: Mapping[int, str], generation: Generation
  ) -> Iterator[tuple[int, str]]:
    """Yields the index and the continuation of each request, as soon as the request is finished.

    Args:
      contexts: The context of each request, keyed by the request's index.
    """
    prompts = dict(zip(contexts, self._encode(list(contexts.values()), generation)))
    numbers = sorted(prompts, key=lambda number: -len(prompts[number]))
    for first in range(0, len(numbers), self._scorer.batch_size):
      batch = numbers[first : first + self._scorer.batch_size]
      yield from self._finish_batch(params, batch, [prompts[n] for n in batch], generation)

  def _encode(self, contexts: Sequence[str], generation: Generation) -> list[np.ndarray]:
    prefix = np.array([self._tokenizer.prefix_id])
    prompts = [ids if len(ids) else prefix for ids in self._tokenizer.encode(contexts)]
    limit = self._scorer.max_length
    if limit is None:
      return prompts
    return [ids[-(limit - generation.max_tokens) :] for ids in prompts]

  def _finish_batch(
      self,
      params: Any,
      numbers: Sequence[int],
      prompts: Sequence[np.ndarray],
      generation: Generation,
  ) -> Iterator[tuple[int, str]]:
    texts = [list(map(int, ids)) for ids in prompts]
    open_rows = set(range(len(numbers)))
    for step in range(generation.max_tokens):
      batch = self._scorer.place(self._my_part(numbers, texts))
      drawn = np.asarray(
          self._step(params, batch, np.int32(step), np.float32(generation.temperature))
      )
      for row in sorted(open_rows):
        texts[row].append(int(drawn[row]))
        made = texts[row][len(prompts[row]) :]
        text = self._text(made, generation.until)
        if text is None and step + 1 == generation.max_tokens:
          text = self._tokenizer.decode(np.array(made))
        if text is not None:
          open_rows.remove(row)
          yield numbers[row], text
      if not open_rows:
        return

  def _text(self, made: Sequence[int], until: Sequence[str]) -> str | None:
    """Returns the generated text if it has reached EOS or a stop string; otherwise None."""
    if made[-1] == self._tokenizer.eos_id:
      return _cut(self._tokenizer.decode(np.array(made[:-1])), until)
    text = self._tokenizer.decode(np.array(made)) if until else ""
    return _cut(text, until) if any(stop in text for stop in until) else None

  def _my_part(
      self, numbers: Sequence[int], texts: Sequence[Sequence[int]]
  ) -> batch_lib.LLMIndexedBatch:
    # The last token of a row is only a target. Nothing is scored here, so it can be any token.
    rows = [requests_lib.Row(np.array([*t, 0]), 0, n) for n, t in zip(numbers, texts)]
    length = self._scorer.padded_length(max(map(len, texts)))
    step = packing.Step(length, tuple((place,) for place in range(len(rows))))
    return self._scorer.my_part(step, rows)

  def _next_tokens(
      self, params: Any, batch: batch_lib.LLMIndexedBatch, step: jax.Array, temperature: jax.Array
  ) -> jax.Array:
    last = jnp.maximum(jnp.sum(batch.inputs_segmentation, axis=1) - 1, 0)
    logits = self._apply(params, batch)
    logits = jnp.take_along_axis(logits, last[:, None, None], axis=1)[:, 0].astype(jnp.float32)
    key = jax.random.fold_in(jax.random.key(self._seed), step)
    keys = jax.vmap(lambda number: jax.random.fold_in(key, number))(batch.document_idx)
    draw = jax.vmap(jax.random.categorical)
    drawn = draw(keys, logits / jnp.maximum(temperature, 1e-6))
    return jnp.where(temperature > 0, drawn, jnp.argmax(logits, axis=-1))


def _cut(text: str, until: Sequence[str]) -> str:
  """Returns the part of a text before the first stop string."""
  return text[: min((text.find(stop) for stop in until if stop in text), default=len(text))]
