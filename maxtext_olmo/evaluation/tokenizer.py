"""Tokenizers for evaluation: bytes, a `tokenizer.json`, a Hugging Face directory, or `hf:NAME`.

Evaluation also needs the token that precedes a text: BOS if the tokenizer has one, otherwise EOS,
which the model saw before each document in training.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import logging

from maxtext_olmo import errors
from maxtext_olmo.corpus import tokenizer as tokenizers

_LARGEST_CONFIG = 64 << 20


class EvalTokenizer:
  """A tokenizer and its special tokens.

  Args:
    tokenizer: `ByteTokenizer`, `HuggingFaceTokenizer`, or any object with their methods.
    bos: Text of the tokenizer's BOS; None if it has no BOS.
    bos_token_id: Id of the token that precedes a text without context; by default BOS, or EOS if
      there is no BOS.
    eos_token_id: Id of the token that ends a text; by default the tokenizer's EOS.
  """

  def __init__(
      self,
      tokenizer: Any,
      *,
      bos: str | None = None,
      bos_token_id: int | None = None,
      eos_token_id: int | None = None,
  ):
    self._tokenizer = tokenizer
    self._bos = bos
    self.name: str = tokenizer.name
    self.vocab_size: int = tokenizer.vocab_size
    self.eos_id: int = tokenizer.eos_id if eos_token_id is None else eos_token_id
    if bos_token_id is None and bos is not None:
      bos_token_id = tokenizer.token_id(bos)
    self.prefix_id: int = self.eos_id if bos_token_id is None else bos_token_id

  def encode(self, texts: Sequence[str], *, special_tokens: bool = True) -> list[np.ndarray]:
    """Returns the ids of each text; a text that already begins with BOS gets no second BOS.

    Args:
      special_tokens: Whether to include the special tokens that the tokenizer adds to a text.
    """
    if not special_tokens or not isinstance(self._tokenizer, tokenizers.HuggingFaceTokenizer):
      return self._tokenizer.encode(texts)
    bare = [bool(self._bos) and text.startswith(str(self._bos)) for text in texts]
    dressed = iter(
        self._tokenizer.encode([t for t, b in zip(texts, bare) if not b], special_tokens=True)
    )
    plain = iter(self._tokenizer.encode([text for text, b in zip(texts, bare) if b]))
    return [next(plain) if b else next(dressed) for b in bare]

  def decode(self, ids: np.ndarray) -> str:
    """Returns the text of some ids, without special tokens."""
    return self._tokenizer.decode(ids)

  def byte_count(self, ids: np.ndarray) -> int:
    """Returns the number of UTF-8 bytes in the text of some ids, without special tokens."""
    if isinstance(self._tokenizer, tokenizers.ByteTokenizer):
      return int(np.count_nonzero(np.asarray(ids) < tokenizers.ByteTokenizer.eos_id))
    return len(self.decode(ids).encode())


def load_eval_tokenizer(
    spec: str,
    *,
    hf_access_token: str | None = None,
    tokenizer_cache_dir: str | None = None,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
) -> EvalTokenizer:
  """Loads a tokenizer.

  Args:
    spec: `bytes`, a `tokenizer.json`, a directory with one, or `hf:NAME` for a tokenizer on the
      Hugging Face Hub. A name without `/` and `.`, such as `gpt2`, is also looked up on the Hub,
      unless there is a file or directory with that name.
    hf_access_token: Access token for a private tokenizer on the Hub.
    tokenizer_cache_dir: Directory that caches files from the Hub.
    bos_token_id: Token that precedes a text without context, instead of the tokenizer's BOS or EOS.
    eos_token_id: Token that ends a text, instead of the tokenizer's EOS.
  """
  if not spec:
    raise errors.ConfigError(
        "No tokenizer was given. Give `bytes`, the path of a tokenizer.json or of a directory with"
        " one, or `hf:NAME` for one on the Hugging Face Hub."
    )
  special: dict[str, str] = {}
  if spec == tokenizers.ByteTokenizer.name:
    tokenizer: Any = tokenizers.ByteTokenizer()
  else:
    if "/" not in spec and "." not in spec and ":" not in spec and not os.path.exists(spec):
      logging.info("There is no file or directory %s: looking for hf:%s on the Hub", spec, spec)
      spec = tokenizers.HUB + spec
    path, configs = tokenizers.find_files(spec, hf_access_token, tokenizer_cache_dir)
    special = _special_tokens(configs)
    tokenizer = tokenizers.HuggingFaceTokenizer(path, eos_token=special.get("eos_token"))
  return EvalTokenizer(
      tokenizer,
      bos=special.get("bos_token"),
      bos_token_id=bos_token_id,
      eos_token_id=eos_token_id,
  )


def _special_tokens(configs: Sequence[str]) -> dict[str, str]:
  """Returns the texts of BOS and EOS from the first config file that names them."""
  found: dict[str, str] = {}
  for path in configs:
    if not os.path.isfile(path):
      continue
    try:
      with open(path, encoding="utf-8") as file:
        config = json.loads(file.read(_LARGEST_CONFIG))
    except (ValueError, RecursionError) as error:
      raise errors.ConfigError(f"{path} is not JSON: {error}.") from error
    for name in ("bos_token", "eos_token"):
      value = config.get(name)
      text = value.get("content") if isinstance(value, dict) else value
      if text is not None and not isinstance(text, str):
        raise errors.ConfigError(f"{path}: {name} should be text, found {text!r}.")
      if text and name not in found:
        found[name] = text
  return found
