"""Tokenizers for making corpora: plain bytes, or any Hugging Face `tokenizer.json`.

A tokenizer is downloaded only if its name begins with `hf:`, as in `hf:gpt2` or `hf:org/name`. A
misspelt path is therefore never looked up on the Hugging Face Hub.
"""

import array
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from maxtext_olmo.errors import ConfigError

# Names of the end-of-document token in well-known tokenizers.
_EOS_TOKENS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|eos|>")

HUB = "hf:"  # Prefix of names on the Hugging Face Hub.
_TOKENIZER, CONFIGS = "tokenizer.json", ("tokenizer_config.json", "special_tokens_map.json")
_LARGEST_CONFIG = 64 << 20


class Tokenizer(Protocol):
  """The tokenizer interface that `make_corpus` needs."""

  name: str
  vocab_size: int
  eos_id: int

  def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
    """Returns the ids of each text, without special tokens."""


class ByteTokenizer:
  """A tokenizer without files: ids 0 to 255 are UTF-8 bytes, 256 is EOS and 257 is padding."""

  name = "bytes"
  eos_id = 256
  pad_id = 257
  vocab_size = 258

  def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
    """Returns the bytes of each text."""
    return [np.frombuffer(text.encode(), np.uint8) for text in texts]

  def decode(self, ids: np.ndarray) -> str:
    """Returns the text of token ids; incomplete characters become U+FFFD."""
    ids = np.asarray(ids)
    return ids[ids < 256].astype(np.uint8).tobytes().decode(errors="replace")


class HuggingFaceTokenizer:
  """A tokenizer from a `tokenizer.json`, read with the `tokenizers` package."""

  def __init__(
      self, path: str | os.PathLike[str], *, name: str | None = None, eos_token: str | None = None
  ):
    """Reads the tokenizer.

    Args:
      path: Path of the `tokenizer.json`.
      name: Name that replaces `{TOKENIZER}` in paths; by default, derived from `path`.
      eos_token: Token that ends a document; by default, the first well-known EOS token in the
        vocabulary.
    """
    path = os.fspath(path)
    try:
      import tokenizers
    except ImportError as error:
      raise ConfigError(
          "A tokenizer.json needs the package `tokenizers`: pip install tokenizers."
      ) from error
    try:
      self._tokenizer = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # The package raises bare `Exception`.
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
          f"The tokenizer {path} does not have {looked_for}. Give the token that ends a document"
          " (--eos-token)."
      )
    self.eos_token = known[0]
    self.eos_id = vocabulary[self.eos_token]

  def encode(self, texts: Sequence[str], *, special_tokens: bool = False) -> list[np.ndarray]:
    """Returns the ids of each text; uses all cores for many texts.

    Args:
      texts: Texts to tokenize.
      special_tokens: Whether to add the tokens that the tokenizer puts around a text, such as BOS.
    """
    # Without the offsets of tokens in the text, which would take a third of the time.
    encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=special_tokens)
    # Several times as fast as `np.array` of a list.
    return [np.array(array.array("I", encoding.ids), np.int64) for encoding in encodings]

  def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ids of a text, and the bounds [first, end) of each token, in characters.

    Special tokens that are written in the text, such as `<|endoftext|>`, are encoded as such; no
    other special tokens are added. If a character becomes several tokens, they have the same
    offsets.
    """
    encoding = self._with_offsets.encode(text, add_special_tokens=False)
    return np.array(encoding.ids, np.int64), np.array(encoding.offsets, np.int64).reshape(-1, 2)

  @functools.cached_property
  def _with_offsets(self) -> Any:
    import tokenizers

    copy = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
    # Many tokenizers trim the spaces around a token from its offsets.
    copy.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
    return copy

  @functools.cached_property
  def added_tokens(self) -> tuple[str, ...]:
    """The texts of the tokens that are matched before a text is split, such as `<|im_end|>`."""
    return tuple(token.content for token in self._tokenizer.get_added_tokens_decoder().values())

  def decode(self, ids: np.ndarray) -> str:
    """Returns the text of token ids, without special tokens."""
    return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=True)

  def token_id(self, token: str) -> int | None:
    """Returns the id of a token; None if it is not in the vocabulary."""
    return self._tokenizer.token_to_id(token)


@dataclasses.dataclass(frozen=True)
class TokenizerSource:
  """The arguments of `load_tokenizer`, for processes that load the tokenizer themselves.

  Attributes:
    spec: `bytes`, the path of a `tokenizer.json`, or `hf:NAME`.
    name: Name that replaces `{TOKENIZER}` in paths; None for the default.
    eos_token: Token that ends a document; None for the default.
    digest: Hash of the `tokenizer.json`, which all processes must find; empty for `bytes`.
  """

  spec: str
  name: str | None = None
  eos_token: str | None = None
  digest: str = ""

  @classmethod
  def find(
      cls, spec: str, *, name: str | None = None, eos_token: str | None = None
  ) -> "TokenizerSource":
    """Returns the source of a tokenizer, with the digest of its current file."""
    digest = _digest(spec)
    if digest and not spec.startswith(HUB):
      spec = os.path.abspath(spec)
    return cls(spec, name, eos_token, digest)

  def load(self) -> Tokenizer:
    """Returns the tokenizer; each process loads it once.

    Raises:
      ConfigError: The file differs from the one that `find` saw.
    """
    return _load_once(self)


@functools.lru_cache(maxsize=2)
def _load_once(source: TokenizerSource) -> Tokenizer:
  if (found := _digest(source.spec)) != source.digest:
    raise ConfigError(
        f"The tokenizer {source.spec} has the hash {found} on this host, but {source.digest} where"
        " the work was started. Use the same file everywhere, and do not change it during the work."
    )
  return load_tokenizer(source.spec, name=source.name, eos_token=source.eos_token)


def _digest(spec: str) -> str:
  if spec == ByteTokenizer.name:
    return ""
  with open(find_files(spec)[0], "rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def load_tokenizer(
    spec: str, *, name: str | None = None, eos_token: str | None = None
) -> Tokenizer:
  """Loads a tokenizer: `bytes`, the path of a `tokenizer.json`, or `hf:NAME` from the Hub."""
  if spec != ByteTokenizer.name:
    path, _ = find_files(spec)
    if spec.startswith(HUB) and name is None:
      name = spec.removeprefix(HUB)
    return HuggingFaceTokenizer(path, name=name, eos_token=eos_token)
  if name is not None or eos_token is not None:
    raise ConfigError(
        "The tokenizer `bytes` has its own name and EOS; leave out --tokenizer-name and"
        " --eos-token."
    )
  return ByteTokenizer()


def find_files(
    spec: str,
    token: str | None = None,
    cache_dir: str | None = None,
    others: Sequence[str] = CONFIGS,
) -> tuple[str, list[str]]:
  """Returns the paths of a `tokenizer.json` and of the config files that may be next to it.

  Args:
    spec: A `tokenizer.json`, a directory with one, or `hf:NAME` for one on the Hub.
    token: Access token for the Hub.
    cache_dir: Cache directory for files from the Hub.
    others: Names of the config files.
  """
  if spec.startswith(HUB):
    return _download(spec.removeprefix(HUB), token, cache_dir, others)
  if os.path.isdir(spec):
    path = os.path.join(spec, _TOKENIZER)
    if not os.path.isfile(path):
      raise ConfigError(
          f"The directory {spec} has no {_TOKENIZER}. Tokenizers without one (such as SentencePiece"
          " models) must be converted: transformers' AutoTokenizer(...).save_pretrained writes it."
      )
    return path, [os.path.join(spec, name) for name in others]
  if not os.path.isfile(spec):
    raise ConfigError(
        f"There is no tokenizer {spec}: expected a {_TOKENIZER}, a directory with one, or `bytes`,"
        f" which needs none. If it is a name on the Hugging Face Hub, write {HUB}{spec}."
    )
  folder = os.path.dirname(os.path.abspath(spec))
  return spec, [os.path.join(folder, name) for name in others]


def _download(
    name: str, token: str | None, cache_dir: str | None, others: Sequence[str]
) -> tuple[str, list[str]]:
  try:
    import huggingface_hub
    from huggingface_hub import errors as hub_errors
  except ImportError as error:
    raise ConfigError(
        "A tokenizer from the Hub needs the package `huggingface_hub`: pip install"
        " lm-eval tokenizers."
    ) from error

  def fetch(file: str) -> str:
    return huggingface_hub.hf_hub_download(name, file, token=token or None, cache_dir=cache_dir)

  configs = []
  try:
    path = fetch(_TOKENIZER)
    for file in others:
      with contextlib.suppress(hub_errors.EntryNotFoundError):
        configs.append(fetch(file))
  except Exception as error:  # The errors come from several packages.
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    raise ConfigError(
        f"{_TOKENIZER} of {name} cannot be fetched from the Hugging Face Hub: {reason} Give a"
        " local directory, or check the name, hf_access_token and the network."
    ) from error
  return path, configs


def read_configs(paths: Sequence[str]) -> dict[str, Any]:
  """Returns the merged keys of the config files that exist; the first file with a key wins.

  Raises:
    ConfigError: A file is not JSON.
  """
  found: dict[str, Any] = {}
  for path in filter(os.path.isfile, paths):
    try:
      with open(path, encoding="utf-8") as file:
        config = json.loads(file.read(_LARGEST_CONFIG))
      found = {**{name: value for name, value in config.items() if value is not None}, **found}
    except (ValueError, AttributeError, RecursionError) as error:
      raise ConfigError(f"{path} is not a JSON object: {error}.") from error
  return found


def dtype_for(vocab_size: int) -> np.dtype:
  """Returns the smallest unsigned dtype that holds every id, as in OLMo's files."""
  return np.dtype(np.min_scalar_type(vocab_size - 1)).newbyteorder("<")


def _name_from_path(path: str) -> str:
  directory, file = os.path.split(os.path.abspath(path))
  stem = os.path.splitext(file)[0]
  return os.path.basename(directory) or stem if stem == "tokenizer" else stem
