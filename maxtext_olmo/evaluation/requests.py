"""Converts requests of lm-evaluation-harness to rows of tokens, and marks the tokens to score.

Context and continuation are tokenized together and then split:

    ("The cat ", "sat")   context "The cat", continuation " sat"     spaces move to the continuation
                          enc("The cat sat") = 7 21 5, enc("The cat") = 7 21, so 5 is scored
    ("", "sat")           context is the prefix token (BOS, or EOS if there is no BOS)

If a model takes at most L tokens, a longer text is split into windows that score each token once.
The last window has as much context as fits. Here "p" is the prefix token and L = 4:

    tokens     0 1 2 3 4 5 6 7 8 9         inputs  p 0 1 2    3 4 5 6    5 6 7 8
                                           scored  0 1 2 3    4 5 6 7        8 9
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np
from absl import logging

from maxtext_olmo import errors
from maxtext_olmo.evaluation import datasets as datasets_lib
from maxtext_olmo.evaluation import tokenizer as tokenizer_lib

TRUNCATIONS = ("left", "error")


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
  """A sequence whose last `scored` tokens are scored; its inputs are all tokens but the last."""

  tokens: np.ndarray
  scored: int
  request: int  # Index of the request.
  sequence: int = 0  # Index of the row among the rows of its request.

  @property
  def length(self) -> int:
    """The number of input tokens."""
    return len(self.tokens) - 1


class ParseLMEval(grain.transforms.Map):
  """Splits a harness request into a prefix and a text; with a single argument, the prefix is empty.

  Args:
    request_name: Key of the request in the item; all other keys are kept.

  >>> from lm_eval.api.instance import Instance
  >>> ParseLMEval().map(
  ...     {"idx": 1,
  ...      "req": Instance(
  ...         request_type="loglikelihood_rolling", doc={},
  ...         idx=0, arguments=("Prefix", "Main"))})
  {'idx': 1, 'prefix': 'Prefix', 'text': 'Main'}
  """

  def __init__(self, request_name: str = "req"):
    self.request_name = request_name

  def map(self, item: dict[str, Any]) -> dict[str, Any]:
    """Returns the item with "prefix" and "text" in place of the request."""
    parsed = {name: value for name, value in item.items() if name != self.request_name}
    arguments = item[self.request_name].args
    parsed["prefix"], parsed["text"] = ("", *arguments) if len(arguments) == 1 else arguments[:2]
    return parsed


def encode_requests(
    tokenizer: tokenizer_lib.EvalTokenizer,
    arguments: Sequence[tuple[str, ...]],
    *,
    add_bos: bool = True,
) -> list[tuple[np.ndarray, np.ndarray]]:
  """Returns, for each request, the ids of its context (at least one) and the ids to score.

  Args:
    arguments: (text,) or (context, continuation) of each request, as the harness gives them.
    add_bos: Whether the prefix token precedes a text without context. Otherwise, the first token
      of such a text serves as its context and is not scored; an empty text has no context.
  """
  prefix = np.array([tokenizer.prefix_id] if add_bos else [], np.int64)
  moved = [_move_spaces(*pair) if len(pair) > 1 else ("", *pair) for pair in arguments]
  is_text = [len(pair) == 1 for pair in arguments]
  wholes = iter(
      tokenizer.encode([head + tail for (head, tail), text in zip(moved, is_text) if head or text])
  )
  contexts = iter(_encode_once(tokenizer, [head for head, _ in moved if head]))
  bare = iter(
      tokenizer.encode(
          [tail for (head, tail), text in zip(moved, is_text) if not (head or text)],
          special_tokens=False,
      )
  )
  found = []
  for (head, _), text in zip(moved, is_text):
    if text:
      found.append((prefix, next(wholes)))
    elif head:
      context, whole = next(contexts), next(wholes)
      found.append((context if len(context) else prefix, whole[len(context) :]))
    else:
      ids = next(bare)
      # A text that already begins with the prefix token needs no second one.
      begins = len(ids) > 0 and ids[0] == tokenizer.prefix_id
      found.append((ids[:1], ids[1:]) if begins else (prefix, ids))
  return [(head, tail) if len(head) else (tail[:1], tail[1:]) for head, tail in found]


def request_rows(
    tokenizer: tokenizer_lib.EvalTokenizer,
    arguments: Sequence[tuple[str, ...]],
    *,
    max_length: int | None = None,
    truncation: str = "left",
    add_bos: bool = True,
    add_eos: bool = False,
) -> list[Row]:
  """Returns the rows of requests; a request with nothing to score has no row.

  Args:
    arguments: (text,) or (context, continuation) of each request, as the harness gives them.
    max_length: The maximum number of input tokens.
    truncation: Handling of longer requests: `left` drops the beginning of the context, but never
      tokens of the continuation; `error` raises.
    add_bos: As in `encode_requests`.
    add_eos: Whether EOS is appended to each text or continuation, and scored.
  """
  rows: list[Row] = []
  cut = 0
  for number, (head, tail) in enumerate(encode_requests(tokenizer, arguments, add_bos=add_bos)):
    if not len(head):
      continue
    if add_eos:
      tail = np.append(tail, tokenizer.eos_id)
    length = len(head) + len(tail) - 1
    if max_length is not None and length > max_length and len(arguments[number]) > 1:
      if truncation == "error":
        raise errors.ConfigError(
            f"Request {number} has {len(head)} tokens of context and {len(tail)} of continuation:"
            f" {length} input tokens, but the model takes at most {max_length}. Set"
            " truncation='left' to drop the beginning of the context. The continuation is"
            f" {arguments[number][1][:60]!r}."
        )
      cut += 1
    rows += windows(np.concatenate([head, tail]), len(tail), max_length, request=number)
  if cut:
    logging.warning(
        "%d of %d requests exceed the model's limit of %s tokens; the beginning of their context"
        " was dropped.",
        cut,
        len(arguments),
        max_length,
    )
  return rows


def windows(
    tokens: np.ndarray, scored: int, max_length: int | None, *, request: int
) -> Iterator[Row]:
  """Yields rows that together score each of the last `scored` tokens once.

  Each window but the last scores `max_length` tokens, after a single token of context. The last
  window ends with the text and has as much context as fits.

  >>> [(row.tokens.tolist(), row.scored) for row in windows(np.arange(7), 6, 4, request=0)]
  [([0, 1, 2, 3, 4], 4), ([2, 3, 4, 5, 6], 2)]
  >>> [(row.tokens.tolist(), row.scored) for row in windows(np.arange(7), 2, 4, request=0)]
  [([2, 3, 4, 5, 6], 2)]
  """
  tokens = np.asarray(tokens)
  end = len(tokens) - scored
  if not 0 < end:
    raise ValueError(
        f"{scored} of {len(tokens)} tokens cannot be scored: each scored token needs one before it."
    )
  limit = len(tokens) if max_length is None else max_length
  sequence = 0
  while end < len(tokens):
    begin, end = end, min(len(tokens), end + limit)
    yield Row(tokens[max(0, end - limit - 1) : end], end - begin, request, sequence)
    sequence += 1


def row_arrays(row: Row) -> dict[str, Any]:
  """Returns the (1, n) int32 arrays of a row, and under "idx" the index of its request.

  `CompleteLLMIndexedBatch` expects such a dict.
  """
  tokens = np.asarray(row.tokens).astype(np.int32)[None]
  ones = np.ones((1, row.length), np.int32)
  mask = ones.copy()
  mask[:, : row.length - row.scored] = 0
  return {
      "idx": np.int32(row.request),
      "sequence_idx": np.array([row.sequence], np.int32),
      "inputs": tokens[:, :-1],
      "targets": tokens[:, 1:],
      "inputs_segmentation": ones,
      "targets_segmentation": mask,
  }


class HFTokenizeLogLikelihoodRolling(grain.transforms.Map):
  """Converts requests to rows, for models that take at most `max_length` tokens.

  `map` takes requests with one argument (a text) or two (a context and its continuation). It
  returns rows of exactly `max_length` tokens, in request order, as flat dicts with the fields of an
  `LLMIndexedBatch` without the batch axis. A longer request becomes several rows with the same
  `document_idx`; filler rows, with `document_idx` 0, complete the last batch.

  >>> from lm_eval.api.instance import Instance
  >>> request = Instance("loglikelihood", doc={}, idx=0, arguments=("The cat", " sat"))
  >>> rows = HFTokenizeLogLikelihoodRolling("bytes", max_length=16, batch_size=2).map([request])
  >>> [int(row["document_idx"]) for row in rows]
  [1, 0]

  Args:
    tokenizer_path: Tokenizer, as in `load_eval_tokenizer`.
    max_length: Tokens per row.
    batch_size: The number of rows is rounded up to a multiple of this.
    hf_access_token: Access token for a private tokenizer on the Hub.
    tokenizer_cache_dir: Directory that caches tokenizers from the Hub.
    add_bos_token: Whether BOS precedes a text without context. Otherwise, the first token of such a
      text is not scored.
    add_eos_token: Whether EOS is appended to each text, and scored.
    bos_token_id: Token that precedes a text without context, instead of the tokenizer's BOS or EOS.
    eos_token_id: Token that ends a text, instead of the tokenizer's EOS.
  """

  def __init__(
      self,
      tokenizer_path: str,
      max_length: int,
      batch_size: int = 1,
      hf_access_token: str | None = None,
      tokenizer_cache_dir: str | None = None,
      add_bos_token: bool = True,
      add_eos_token: bool = False,
      bos_token_id: int | None = None,
      eos_token_id: int | None = None,
  ):
    for name, value in (("max_length", max_length), ("batch_size", batch_size)):
      if value < 1:
        raise errors.ConfigError(f"{name}={value} must be positive.")
    self.tokenizer = tokenizer_lib.load_eval_tokenizer(
        tokenizer_path,
        hf_access_token=hf_access_token,
        tokenizer_cache_dir=tokenizer_cache_dir,
        bos_token_id=bos_token_id,
        eos_token_id=eos_token_id,
    )
    self.max_length = max_length
    self.batch_size = batch_size
    self.add_bos_token = add_bos_token
    self.add_eos_token = add_eos_token

  def map(self, requests: Sequence[Any]) -> list[dict[str, np.ndarray]]:
    """Returns the rows of all requests."""
    rows = request_rows(
        self.tokenizer,
        [request.args for request in requests],
        max_length=self.max_length,
        add_bos=self.add_bos_token,
        add_eos=self.add_eos_token,
    )
    complete = datasets_lib.CompleteLLMIndexedBatch()
    samples = [complete.map(row_arrays(row)) for row in rows]
    missing = datasets_lib.round_up(len(samples), self.batch_size) - len(samples)
    samples += [datasets_lib.empty_llm_indexed_sample() for _ in range(missing)]
    pad = datasets_lib._pad_batch_multiple
    return [
        {name: pad([array], multiple_of=self.max_length)[0] for name, array in sample.items()}
        for sample in samples
    ]


def _move_spaces(context: str, continuation: str) -> tuple[str, str]:
  bare = context.rstrip()
  return bare, context[len(bare) :] + continuation


def _encode_once(tokenizer: tokenizer_lib.EvalTokenizer, texts: Sequence[str]) -> list[np.ndarray]:
  """Encodes texts; equal texts, such as the shared context of several choices, only once."""
  distinct = list(dict.fromkeys(texts))
  found = dict(zip(distinct, tokenizer.encode(distinct)))
  return [found[text] for text in texts]
