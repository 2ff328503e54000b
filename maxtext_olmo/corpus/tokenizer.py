"""Text → token ids, for making corpora: plain bytes, or any Hugging Face `tokenizer.json`."""

import os
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from maxtext_olmo.errors import ConfigError

# The names that well-known tokenizers give the token that ends a document.
_EOS_TOKENS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|eos|>")


class Tokenizer(Protocol):
  """What `make_corpus` needs to know of a tokenizer."""

  name: str
  vocab_size: int
  eos_id: int

  def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
    """Returns the ids of each text, without special tokens."""


class ByteTokenizer:
  """UTF-8 bytes are the ids 0 to 255; 256 ends a document, 257 is for padding. Needs no files."""

  name = "bytes"
  eos_id = 256
  pad_id = 257
  vocab_size = 258

  def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
    """Returns the bytes of each text."""
    return [np.frombuffer(text.encode(), np.uint8) for text in texts]

  def decode(self, ids: np.ndarray) -> str:
    """Returns the text of some ids; broken characters are replaced."""
    ids = np.asarray(ids)
    return ids[ids < 256].astype(np.uint8).tobytes().decode(errors="replace")


class HuggingFaceTokenizer:
  """A `tokenizer.json`, read with the `tokenizers` package."""

  def __init__(
      self, path: str | os.PathLike[str], *, name: str | None = None, eos_token: str | None = None
  ):
    """Reads the tokenizer.

    Args:
      name: what stands for `{TOKENIZER}` in paths; the directory of the file unless given.
      eos_token: the token that ends a document; a well-known one unless given.
    """
    path = os.fspath(path)
    if not os.path.isfile(path):
      raise ConfigError(
          f"There is no tokenizer file {path}: give the path of a tokenizer.json, or `bytes`, which"
          " needs none."
      )
    try:
      import tokenizers
    except ImportError as error:
      raise ConfigError(
          "A tokenizer.json needs the package `tokenizers`: pip install 'maxtext-olmo[tokenizers]'."
      ) from error
    try:
      self._tokenizer = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # The package raises bare exceptions of its own.
      raise ConfigError(f"{path} is not a Hugging Face tokenizer.json: {error}.") from error
    self._tokenizer.no_truncation()
    self._tokenizer.no_padding()
    self.name = name or _name_from_path(path)
    vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
    self.vocab_size = 1 + max(vocabulary.values(), default=-1)
    known = [token for token in ([eos_token] if eos_token else _EOS_TOKENS) if token in vocabulary]
    if not known:
      looked_for = repr(eos_token) if eos_token else f"any of {', '.join(_EOS_TOKENS)}"
      raise ConfigError(
          f"The tokenizer {path} does not have {looked_for}: name the token that ends a document"
          " (--eos-token)."
      )
    self.eos_id = vocabulary[known[0]]

  def encode(self, texts: Sequence[str], *, special_tokens: bool = False) -> list[np.ndarray]:
    """Returns the ids of each text; many texts at a time are spread over all cores.

    Args:
      special_tokens: with those that the tokenizer itself puts around a text, such as BOS.
    """
    encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=special_tokens)
    return [np.array(encoding.ids, np.int64) for encoding in encodings]

  def decode(self, ids: np.ndarray) -> str:
    """Returns the text of some ids, without special tokens."""
    return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=True)

  def token_id(self, token: str) -> int | None:
    """Returns the id of a token; None where the vocabulary does not have it."""
    return self._tokenizer.token_to_id(token)


def load_tokenizer(
    spec: str, *, name: str | None = None, eos_token: str | None = None
) -> Tokenizer:
  """Returns the tokenizer called `bytes`, or that of a `tokenizer.json`."""
  if spec != ByteTokenizer.name:
    return HuggingFaceTokenizer(spec, name=name, eos_token=eos_token)
  if name is not None or eos_token is not None:
    raise ConfigError(
        "The tokenizer `bytes` has its own name and EOS; leave out --tokenizer-name and"
        " --eos-token."
    )
  return ByteTokenizer()


def dtype_for(vocab_size: int) -> np.dtype:
  """Returns the smallest unsigned dtype that holds every id, as OLMo does."""
  return np.dtype(np.min_scalar_type(vocab_size - 1)).newbyteorder("<")


def _name_from_path(path: str) -> str:
  directory, file = os.path.split(os.path.abspath(path))
  stem = os.path.splitext(file)[0]
  return os.path.basename(directory) or stem if stem == "tokenizer" else stem
