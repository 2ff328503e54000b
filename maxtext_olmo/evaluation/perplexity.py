"""Perplexity of a model on a corpus, for each label.

Documents end with EOS, as in OLMo's token files, and are scored independently:

    file          5 6 7 E 8 9 E            two documents
    rows          E 5 6 7 E                the first, after the EOS that precedes it in training
                  E 8 9 E

So every token of a file is scored once, including its EOS and the tail after its last whole
instance. Documents longer than the model's limit are scored in windows (`requests`).

OLMo-core evaluates differently in its training loop, and its curves can only be continued by doing
the same (`OlmoCoreRule`). With rows of 4 tokens:

    file          5 6 7 8 9 E 8 9 E 6 7    the tail 6 7 has no EOS and is left out
    rows          5 6 7 8                  3 losses, divided by 4: the first token has none
                  8 9 E .                  2 losses, divided by 3

Its rows are shuffled with seed 0 as epoch 1, and those that do not fill a batch are left out.
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

_EVAL_SEED, _EVAL_EPOCH = 0, 1  # Of OLMo-core's evaluation, before every pass.


@dataclasses.dataclass(frozen=True)
class OlmoCoreRule:
  """The rule by which OLMo-core evaluates language models in its training loop.

  Attributes:
    row_length: Tokens per row; the rest of a longer document is left out.
    batch_rows: Rows of a batch over all ranks; rows that do not fill one are left out.
  """

  row_length: int
  batch_rows: int

  def chosen(self, num_rows: int) -> np.ndarray:
    """Returns the rows that are evaluated, in OLMo-core's order.

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
  tokens: int = 0  # The number that the sum of losses is divided by.
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
    return {**dataclasses.asdict(self), **{name: getattr(self, name) for name in derived}}


def score_index(
    scorer: scoring.Scorer,
    params: Any,
    index: index_lib.OlmoNpyIndex,
    tokenizer: tokenizer_lib.EvalTokenizer,
    *,
    path_remap: Mapping[str, str] | None = None,
    storage: Storage | None = None,
    limit: float | None = None,
    olmo_core: OlmoCoreRule | None = None,
    progress: bool = False,
) -> dict[str, LabelScore]:
  """Returns the score of each label, in the order of the index; all processes must call it.

  Args:
    path_remap: Path prefixes to replace, each with its replacement on this machine.
    storage: Storage to read the files from; by default, local files.
    limit: The number of documents to score per label, the first ones; below 1, the share of the
      documents of each file. None scores all.
    olmo_core: OLMo-core's rule, to get its figures; None scores every token once.
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

  # A file that is missing on one process stops all processes; otherwise the others would wait.
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
  """Returns the documents of a file, each with its EOS; the last may have none."""
  size = n_tokens * files.dtype.itemsize
  data = files.storage.read(files.paths[file_id], int(files.data_offsets[file_id]), size)
  tokens = np.frombuffer(data, files.dtype)
  outside = np.flatnonzero(tokens >= vocab_size)
  if len(outside):
    place = int(outside[0])
    raise errors.CorpusError(
        f"Token id {tokens[place]} in {files.where(file_id, place)}, is outside the model's"
        f" vocabulary of {vocab_size}. Either the model was trained with another tokenizer, or the"
        f" dtype of the file is not {files.dtype.name}."
    )
  ends = np.flatnonzero(tokens == eos_id) + 1
  return [part for part in np.split(tokens, ends) if len(part)]
