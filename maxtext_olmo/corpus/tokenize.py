"""Makes a corpus in OLMo's on-disk format from any text.

    out/mix.txt                           wiki,{TOKENIZER}/wiki/part-00000.npy
                                          wiki,{TOKENIZER}/wiki/part-00001.npy
    out/bytes/wiki/part-00000.npy         document, EOS, document, EOS, …  (raw ids, no header)
    out/bytes/wiki/part-00001.npy         …

Documents stay whole: a part ends with the document that fills it. Each part gets its name when it
is complete, and the manifest comes last, so where there is a manifest the corpus is complete.
Memory is bounded by the longest document.
"""

import dataclasses
import fnmatch
import gzip
import itertools
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import IO

import numpy as np

from maxtext_olmo import atomic
from maxtext_olmo.corpus import tokenizer as tokenizer_lib
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.errors import MissingFileError
from maxtext_olmo.progress import progress_bar

DEFAULT_TOKENS_PER_FILE = 1 << 28

# A name that is one path component and holds nothing that a manifest would split.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+@=-]*")
_OTHER_NAME = {
    "label": "Give the input another one (LABEL=PATH).",
    "tokenizer's name": "Give it another one (--tokenizer-name).",
}
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
_BATCH_CHARACTERS = 1 << 20
_BATCH_DOCUMENTS = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class CorpusSummary:
  """What `make_corpus` wrote, with the values that the next steps need."""

  mix_file: str
  tokenizer: str
  dtype: str
  vocab_size: int
  eos_id: int
  files: int
  documents: int
  empty_documents: int
  tokens: int


def make_corpus(
    documents: Mapping[str, Iterable[str]],
    out_dir: str | os.PathLike[str],
    tokenizer: tokenizer_lib.Tokenizer,
    *,
    tokens_per_file: int = DEFAULT_TOKENS_PER_FILE,
    overwrite: bool = False,
    progress: bool = False,
) -> CorpusSummary:
  """Tokenizes documents and writes token files and a mix manifest.

  Args:
    documents: label → texts, which are read once and in order; empty ones are left out and counted.
    tokens_per_file: a file ends after the document that reaches this.
    overwrite: replace a corpus that is there already.
  """
  out_dir = os.fspath(out_dir)
  _check_names(documents, tokenizer.name)
  if tokens_per_file < 1:
    raise ConfigError(f"tokens_per_file must be positive, got {tokens_per_file}.")
  mix_file = os.path.join(out_dir, "mix.txt")
  if os.path.exists(mix_file):
    if not overwrite:
      raise ConfigError(
          f"There is a corpus in {out_dir} already (it has a mix.txt). Choose another directory,"
          " or overwrite it (--overwrite)."
      )
    # Its parts are about to change, and it must not describe a mixture of old and new.
    os.unlink(mix_file)
  dtype = tokenizer_lib.dtype_for(tokenizer.vocab_size)
  counts = _Counts()
  lines: list[str] = []
  with progress_bar("Tokenizing", None, enabled=progress, unit="documents") as advance:
    for label, texts in documents.items():
      stream = _tokenize(texts, tokenizer, counts, advance)
      parts = _write_parts(
          stream,
          os.path.join(out_dir, tokenizer.name, label),
          dtype,
          tokenizer.eos_id,
          tokens_per_file,
      )
      if not parts:
        raise CorpusError(f"The label {label!r} has no document with text in it.")
      lines += [f"{label},{{TOKENIZER}}/{label}/{part}\n" for part in parts]
  if not lines:
    raise CorpusError("There are no documents to make a corpus of.")
  atomic.write_atomically(mix_file, "".join(lines))
  return CorpusSummary(
      mix_file=mix_file,
      tokenizer=tokenizer.name,
      dtype=dtype.name,
      vocab_size=tokenizer.vocab_size,
      eos_id=tokenizer.eos_id,
      files=len(lines),
      documents=counts.documents,
      empty_documents=counts.empty,
      tokens=counts.tokens,
  )


def find_text_files(path: str | os.PathLike[str], pattern: str = "*") -> list[str]:
  """Returns a file itself, or the files below a directory that match the pattern, sorted."""
  path = os.fspath(path)
  if not os.path.isdir(path):
    if not os.path.exists(path):
      raise MissingFileError(f"There is no file or directory {path}.")
    return [path]
  found = []
  for directory, subdirectories, names in os.walk(path):
    subdirectories[:] = [name for name in subdirectories if not name.startswith(".")]
    found += [
        os.path.join(directory, name)
        for name in names
        if not name.startswith(".") and fnmatch.fnmatch(name, pattern)
    ]
  if not found:
    raise CorpusError(f"No file below {path} fits the pattern {pattern!r}.")
  return sorted(found)


def read_documents(
    path: str, *, separator: str | None = None, text_field: str = "text"
) -> Iterator[str]:
  """Yields the documents of a text file (UTF-8, also `.gz`).

  A `.jsonl` file has one per line, in a field of an object; any other file is one document.

  Args:
    separator: a line with just this text ends a document (an empty one: a blank line); not for
      `.jsonl`.
    text_field: the field of a `.jsonl` line that holds the text.
  """
  if os.path.exists(path) and not os.path.isfile(path):
    raise CorpusError(f"{path} is not a regular file.")
  try:
    # Only "\n" ends a line, and nothing is translated: the corpus has the bytes of the file.
    with _open_text(path) as file:
      if path.endswith(_JSON_SUFFIXES):
        yield from _json_documents(file, path, text_field)
      elif separator is None:
        yield file.read()
      else:
        yield from _separated_documents(file, separator)
  except UnicodeDecodeError as error:
    raise CorpusError(
        f"{path} is not UTF-8 text (byte {error.object[error.start]:#04x} in it). Convert it, or"
        " leave it out (--pattern)."
    ) from error
  except (OSError, EOFError, zlib.error) as error:
    raise CorpusError(f"Cannot read {path}: {error}.") from error


@dataclasses.dataclass(slots=True)
class _Counts:
  documents: int = 0
  empty: int = 0
  tokens: int = 0


def _check_names(labels: Iterable[str], tokenizer: str) -> None:
  for what, name in [("label", label) for label in labels] + [
      ("tokenizer's name", part) for part in tokenizer.split("/")
  ]:
    if not _NAME.fullmatch(name):
      raise ConfigError(
          f"{name!r} cannot be a {what}: it is a directory and part of the manifest, so it may"
          f" have letters, digits and _.+@=- only. {_OTHER_NAME[what]}"
      )


def _tokenize(
    texts: Iterable[str],
    tokenizer: tokenizer_lib.Tokenizer,
    counts: _Counts,
    advance: Callable[[int], None],
) -> Iterator[np.ndarray]:
  """Yields the ids of each document that has any; tokenizes many documents in one call."""
  for batch in _batches(texts):
    for ids in tokenizer.encode(batch):
      if not ids.size:
        counts.empty += 1
        continue
      counts.documents += 1
      counts.tokens += ids.size + 1
      yield ids
    advance(len(batch))


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
  batch: list[str] = []
  characters = 0
  for text in texts:
    batch.append(text)
    characters += len(text)
    if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
      yield batch
      batch, characters = [], 0
  if batch:
    yield batch


def _write_parts(
    documents: Iterator[np.ndarray],
    directory: str,
    dtype: np.dtype,
    eos_id: int,
    tokens_per_file: int,
) -> list[str]:
  """Writes `part-00000.npy` and so on, and returns their names."""
  eos = np.array([eos_id], dtype).tobytes()
  parts: list[str] = []
  for ids in documents:
    os.makedirs(directory, exist_ok=True)
    parts.append(f"part-{len(parts):05d}.npy")
    with atomic.atomic_writer(os.path.join(directory, parts[-1])) as file:
      written = 0
      for document in itertools.chain([ids], documents):
        file.write(document.astype(dtype, copy=False).tobytes() + eos)
        written += document.size + 1
        if written >= tokens_per_file:
          break
  return parts


def _open_text(path: str) -> IO[str]:
  if path.endswith(".gz"):
    return gzip.open(path, "rt", encoding="utf-8", newline="\n")
  return open(path, encoding="utf-8", newline="\n")


def _json_documents(file: IO[str], path: str, text_field: str) -> Iterator[str]:
  for number, line in enumerate(file, start=1):
    if not line.strip():
      continue
    try:
      text = json.loads(line)[text_field]
      if not isinstance(text, str):
        raise TypeError(f"{text_field!r} is not text")
      text.encode()  # JSON can hold lone surrogates, which no tokenizer accepts.
    except (ValueError, TypeError, KeyError, RecursionError) as error:
      raise CorpusError(
          f"{path}:{number}: expected a JSON object with text in the field {text_field!r}:"
          f" {type(error).__name__}: {error}."
      ) from error
    yield text


def _separated_documents(file: IO[str], separator: str) -> Iterator[str]:
  lines: list[str] = []
  for line in file:
    if line.strip() != separator.strip():
      lines.append(line)
    elif lines:  # Separators in a row are one.
      yield "".join(lines)
      lines = []
  if lines:
    yield "".join(lines)
