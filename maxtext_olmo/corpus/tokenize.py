"""Makes a corpus in OLMo's on-disk format from text.

    out/mix.txt                           wiki,{TOKENIZER}/wiki/part-00000.npy
                                          wiki,{TOKENIZER}/wiki/part-00001.npy
    out/bytes/wiki/part-00000.npy         document, EOS, document, EOS, …  (raw ids, no header)
    out/bytes/wiki/part-00000.csv.gz      position, name, source file and line of each document
    out/bytes/wiki/part-00001.npy         …

Documents stay whole: a part ends with the document that fills it. Memory is bounded by the longest
document.

A corpus with a manifest is complete: see `publish`.
"""

import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from maxtext_olmo.corpus import part_files
from maxtext_olmo.corpus import publish
from maxtext_olmo.corpus import tokenizer as tokenizer_lib
from maxtext_olmo.corpus.text_files import TextDocument
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.progress import progress_bar

DEFAULT_TOKENS_PER_FILE = 1 << 28

# A name that is one path component and contains no character that would split a manifest line.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+@=-]*")
_OTHER_NAME = {
    "label": "Give the input another one (LABEL=PATH).",
    "tokenizer's name": "Give it another one (--tokenizer-name).",
}
_BATCH_CHARACTERS = 1 << 20
_BATCH_DOCUMENTS = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class CorpusSummary:
  """A summary of a new corpus, with the values that later steps need.

  Attributes:
    mix_file: Path or URL of the manifest.
    tokenizer: Name of the tokenizer.
    dtype: Name of the dtype of the tokens.
    vocab_size: Number of ids of the tokenizer.
    eos_id: Id of the EOS.
    files: Number of token files.
    documents: Number of documents that were written.
    empty_documents: Number of documents that were left out because they have no text.
    tokens: Number of tokens that were written.
    skipped: Reason for each text file that was left out because it cannot be read.
  """

  mix_file: str
  tokenizer: str
  dtype: str
  vocab_size: int
  eos_id: int
  files: int
  documents: int
  empty_documents: int
  tokens: int
  skipped: tuple[str, ...] = ()


def make_corpus(
    documents: Mapping[str, Iterable[str | TextDocument]],
    out_dir: str | os.PathLike[str],
    tokenizer: tokenizer_lib.Tokenizer,
    *,
    tokens_per_file: int = DEFAULT_TOKENS_PER_FILE,
    overwrite: bool = False,
    progress: bool = False,
) -> CorpusSummary:
  """Tokenizes documents and writes token files, their boundary files and a mix manifest.

  Args:
    documents: label → texts, which are read once and in order; empty texts are skipped and counted.
    out_dir: Directory or URL of the corpus. A missing directory is created. For a URL, all files
      are first written to a temporary directory.
    tokenizer: Tokenizer of the texts.
    tokens_per_file: A file ends after the document that reaches this number of tokens.
    overwrite: Whether to replace an existing corpus once the new one is complete.
    progress: Whether to show a progress bar.
  """
  check_names(documents, tokenizer.name)
  if tokens_per_file < 1:
    raise ConfigError(f"tokens_per_file must be positive, got {tokens_per_file}.")
  dtype = tokenizer_lib.dtype_for(tokenizer.vocab_size)
  counts = _Counts()
  with (
      publish.new_corpus(out_dir, overwrite=overwrite) as corpus,
      progress_bar("Tokenizing", None, enabled=progress, unit="documents") as advance,
  ):
    for label, texts in documents.items():
      stream = _count(encode_documents(texts, tokenizer, advance), counts)
      directory = os.path.join(corpus.directory, tokenizer.name, label)
      parts = part_files.write_parts(stream, directory, tokens_per_file)
      if not parts:
        raise CorpusError(f"The label {label!r} has no document with text in it.")
      corpus.lines.extend(f"{label},{{TOKENIZER}}/{label}/{part}\n" for part in parts)
  return CorpusSummary(
      mix_file=corpus.mix_file,
      tokenizer=tokenizer.name,
      dtype=dtype.name,
      vocab_size=tokenizer.vocab_size,
      eos_id=tokenizer.eos_id,
      files=len(corpus.lines),
      documents=counts.documents,
      empty_documents=counts.empty,
      tokens=counts.tokens,
  )


@dataclasses.dataclass(slots=True)
class _Counts:
  documents: int = 0
  empty: int = 0
  tokens: int = 0


def _count(
    documents: Iterable[part_files.EncodedDocument], counts: _Counts
) -> Iterator[part_files.EncodedDocument]:
  """Yields the documents that are not empty, and counts all."""
  for document in documents:
    if not document.length:
      counts.empty += 1
      continue
    counts.documents += 1
    counts.tokens += document.length
    yield document


def check_names(labels: Iterable[str], tokenizer: str) -> None:
  """Raises a ConfigError if a label or the tokenizer cannot be part of a path."""
  for what, name in [("label", label) for label in labels] + [
      ("tokenizer's name", part) for part in tokenizer.split("/")
  ]:
    if not _NAME.fullmatch(name):
      raise ConfigError(
          f"{name!r} cannot be a {what}: it becomes a directory and part of the manifest, so only"
          f" letters, digits and _.+@=- are allowed. {_OTHER_NAME[what]}"
      )


def encode_documents(
    texts: Iterable[str | TextDocument],
    tokenizer: tokenizer_lib.Tokenizer,
    advance: Callable[[int], None] = lambda count: None,
) -> Iterator[part_files.EncodedDocument]:
  """Yields the tokens of each document; tokenizes many documents per call.

  Args:
    texts: The documents. An empty one has no tokens, not even an EOS.
    tokenizer: The tokenizer.
    advance: Called with the number of documents after each call of the tokenizer.
  """
  dtype = tokenizer_lib.dtype_for(tokenizer.vocab_size)
  eos = np.array([tokenizer.eos_id], dtype).tobytes()
  for batch in _batches(texts):
    for ids, document in zip(tokenizer.encode([document.text for document in batch]), batch):
      data, length = b"", 0
      if ids.size:
        data, length = ids.astype(dtype, copy=False).tobytes() + eos, ids.size + 1
      yield part_files.EncodedDocument(data, length, *document[1:])
    advance(len(batch))


def _batches(texts: Iterable[str | TextDocument]) -> Iterator[list[TextDocument]]:
  batch: list[TextDocument] = []
  characters = 0
  for text in texts:
    document = TextDocument(text) if isinstance(text, str) else text
    batch.append(document)
    characters += len(document.text)
    if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
      yield batch
      batch, characters = [], 0
  if batch:
    yield batch
