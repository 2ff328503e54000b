"""Perplexity of a model on a corpus, for each label.

Documents end with EOS, as in OLMo's token files, and are scored independently:

    file          5 6 7 E 8 9 E            two documents
    rows          E 5 6 7 E                each document follows an EOS, as in training
                  E 8 9 E

So every token of a file is scored once, including each EOS and the last tokens of a file, which
training leaves out if they do not fill an instance. Documents longer than the model's limit are
scored in windows (`requests`).

OLMo-core evaluates differently in its training loop. To continue its loss curves, use its rule
(`OlmoCoreRule`). With rows of 4 tokens:

    file          5 6 7 8 9 E 8 9 E 6 7    the last tokens, 6 7, have no EOS and are left out
    rows          5 6 7 8                  3 losses (the first token has none), divided by 4
                  8 9 E .                  2 losses, divided by 3

OLMo-core shuffles these rows with seed 0 and epoch 1. If the last rows do not fill a batch, it
drops them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from maxtext_olmo import errors
from maxtext_olmo import progress as progress_lib
from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.corpus.storage import Storage
from maxtext_olmo.corpus.token_files import TokenFiles
from maxtext_olmo.devices import collectives
from maxtext_olmo.evaluation import requests as requests_lib
from maxtext_olmo.evaluation import scoring
from maxtext_olmo.evaluation import tokenizer as tokenizer_lib
from maxtext_olmo.order import stored

_EVAL_SEED, _EVAL_EPOCH = 0, 1  # OLMo-core's evaluation starts every pass with these.


@dataclasses.dataclass(frozen=True)
class OlmoCoreRule:
  """The rule by which OLMo-core evaluates language models in its training loop.

  Attributes:
    row_length: Tokens per row; the rest of a longer document is left out.
    batch_rows: Rows per batch, over all ranks. If the last rows do not fill a batch, they are left
      out.
  """

  row_length: int
  batch_rows: int

  def chosen(self, num_rows: int) -> np.ndarray:
    """Returns the indices of the rows that OLMo-core evaluates, in its order.

    >>> OlmoCoreRule(row_length=8, batch_rows=2).chosen(5).tolist()
    [4, 1, 3, 0]
    """
    if num_rows < self.batch_rows:
      raise errors.ConfigError(
          f"The corpus has {num_rows} documents, which do not fill one batch of {self.batch_rows}"
          " rows, so OLMo-core would evaluate nothing. Choose a smaller batch."
      )
    order = stored.shuffled(num_rows, _EVAL_SEED + _EVAL_EPOCH)
    return order[: num_rows // self.batch_rows * self.batch_rows].astype(np.int64)


@dataclasses.dataclass(frozen=True)
class LabelScore:
  """The scores of a model on the documents of a label."""

  documents: int = 0
  tokens: int = 0  # The number by which the sum of losses is divided.
  bytes: int = 0  # UTF-8 bytes of the text.
  logprob: float = 0.0  # Sum over all tokens, in nats.

  @property
  def cross_entropy(self) -> float:
    """The mean loss per token, in nats."""
    return -self.logprob / self.tokens if self.tokens else math.nan

  @property
  def perplexity(self) -> float:
    """The perplexity per token."""
    return math.exp(min(self.cross_entropy, 700.0))

  @property
  def bits_per_byte(self) -> float:
    """Bits per byte of text, which is comparable between tokenizers."""
    return -self.logprob / math.log(2) / self.bytes if self.bytes else math.nan

  def __add__(self, other: LabelScore) -> LabelScore:
    mine, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
    return LabelScore(*(a + b for a, b in zip(mine, theirs)))

  def to_json_dict(self) -> dict[str, Any]:
    """Returns all figures as a JSON-able dict."""
    derived = ("cross_entropy", "perplexity", "bits_per_byte")
    figures = {name: getattr(self, name) for name in derived}
    known = {name: None if math.isnan(value) else value for name, value in figures.items()}
    return {**dataclasses.asdict(self), **known}


@dataclasses.dataclass(frozen=True)
class UnknownTokenizer:
  """Stands in for a tokenizer if only its EOS is known. It cannot count the bytes of a text.

  >>> UnknownTokenizer(eos_id=100257).byte_count(np.array([5, 6]))
  0
  """

  eos_id: int

  def byte_count(self, unused_ids: np.ndarray) -> int:
    """Returns 0, so that bits per byte are unknown."""
    return 0


def score_index(
    scorer: scoring.Scorer,
    params: Any,
    index: index_lib.OlmoNpyIndex,
    tokenizer: tokenizer_lib.EvalTokenizer | UnknownTokenizer,
    *,
    path_remap: Mapping[str, str] | None = None,
    storage: Storage | None = None,
    limit: float | None = None,
    olmo_core: OlmoCoreRule | None = None,
    progress: bool = False,
) -> dict[str, LabelScore]:
  """Returns the score of each label, in the order of the index; all processes must call this.

  Args:
    path_remap: Path prefixes, mapped to their replacements on this machine.
    storage: Storage to read the files from; by default, local files.
    limit: How many documents of each label to score, starting with the first. A value below 1 is
      the share of each file's documents to score. None scores all documents.
    olmo_core: OLMo-core's rule, to reproduce its figures; None scores every token once.
    progress: Whether process 0 shows a progress bar.
  """
  files = TokenFiles.of_index(index, path_remap=path_remap, storage=storage)
  vocab_size = scorer.vocab_size(params)
  found: dict[str, LabelScore] = {entry.label: LabelScore() for entry in index.files}
  labels: list[str] = []
  rows: list[requests_lib.Row] = []
  show = progress and jax.process_index() == 0

  def read_file(file_id: int) -> list[np.ndarray]:
    n_tokens = index.files[file_id].n_tokens
    return _documents(files, file_id, n_tokens, eos_id=tokenizer.eos_id, vocab_size=vocab_size)

  def add(label: str, document: np.ndarray) -> None:
    tokens = np.concatenate([[tokenizer.eos_id], document])
    rows.extend(requests_lib.windows(tokens, len(document), scorer.max_length, request=len(labels)))
    labels.append(label)
    found[label] += LabelScore(1, len(document), tokenizer.byte_count(document))

  def add_as_olmo_core(label: str, document: np.ndarray) -> None:
    # A row of n tokens has n - 1 losses, but OLMo-core divides their sum by n.
    if len(document) > 1:
      rows.append(requests_lib.Row(document, len(document) - 1, len(labels)))
    labels.append(label)
    found[label] += LabelScore(1, len(document), tokenizer.byte_count(document[1:]))

  def read() -> None:
    total = sum(entry.size_bytes for entry in index.files)
    all_rows: list[tuple[str, np.ndarray]] = []
    with progress_lib.progress_bar("reading", total, enabled=show, unit="bytes") as advance:
      for file_id, entry in enumerate(index.files):
        left = None if limit is None or limit < 1 else int(limit) - found[entry.label].documents
        documents = read_file(file_id) if left != 0 else []
        if limit is not None and limit < 1:
          left = math.ceil(limit * len(documents))
        for document in documents[:left]:
          if olmo_core is None:
            add(entry.label, document)
          elif document[-1] == tokenizer.eos_id:
            all_rows.append((entry.label, document[: olmo_core.row_length].copy()))
        advance(entry.size_bytes)
    if olmo_core is not None:
      for number in olmo_core.chosen(len(all_rows)).tolist():
        add_as_olmo_core(*all_rows[number])

  # A file that is missing on one process must stop all processes; otherwise the rest would wait
  # forever.
  collectives.run_on_all_processes(read, "reading the corpus")
  with progress_lib.progress_bar("scoring", len(rows), enabled=show, unit="rows") as advance:
    for scores in scorer.scores(params, rows):
      for score in scores:
        found[labels[score.request]] += LabelScore(logprob=score.logprob)
      advance(len(scores))
  return found


def _documents(
    files: TokenFiles, file_id: int, n_tokens: int, *, eos_id: int, vocab_size: int
) -> list[np.ndarray]:
  """Returns the documents of a file, each with its EOS; the last document may have none."""
  size = n_tokens * files.dtype.itemsize
  data = files.storage.read(files.paths[file_id], int(files.data_offsets[file_id]), size)
  tokens = np.frombuffer(data, files.dtype)
  outside = np.flatnonzero(tokens >= vocab_size)
  if len(outside):
    place = int(outside[0])
    raise errors.CorpusError(
        f"Token id {tokens[place]} in {files.where(file_id, place)}, is outside the model's"
        f" vocabulary of {vocab_size}. Either the model was trained with a different tokenizer, or"
        f" the dtype of the file is not {files.dtype.name}."
    )
  ends = np.flatnonzero(tokens == eos_id) + 1
  return [part for part in np.split(tokens, ends) if len(part)]
