"""Perplexity of a model on a corpus, for each label.

Documents end with EOS, as in OLMo's token files, and are scored independently:

    file          5 6 7 E 8 9 E            two documents
    rows          E 5 6 7 E                the first, after the EOS that precedes it in training
                  E 8 9 E

So every token of a file is scored once, including its EOS and the tail after its last whole
instance. Documents longer than the model's limit are scored in windows (`requests`).
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


@dataclasses.dataclass(frozen=True)
class LabelScore:
  """The scores of a model on the documents of a label."""

  documents: int = 0
  tokens: int = 0
  bytes: int = 0  # UTF-8 bytes of the text.
  logprob: float = 0.0  # Sum over all tokens, in nats.

  @property
  def perplexity(self) -> float:
    """The perplexity per token."""
    return math.exp(min(-self.logprob / self.tokens, 700.0)) if self.tokens else math.nan

  @property
  def bits_per_byte(self) -> float:
    """Bits per byte of text, which is comparable between tokenizers."""
    return -self.logprob / math.log(2) / self.bytes if self.bytes else math.nan

  def __add__(self, other: LabelScore) -> LabelScore:
    mine, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
    return LabelScore(*(a + b for a, b in zip(mine, theirs)))

  def to_json_dict(self) -> dict[str, Any]:
    """Returns all figures as a JSON-able dict."""
    derived = {"perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}
    return {**dataclasses.asdict(self), **derived}


def score_index(
    scorer: scoring.Scorer,
    params: Any,
    index: index_lib.OlmoNpyIndex,
    tokenizer: tokenizer_lib.EvalTokenizer,
    *,
    path_remap: Mapping[str, str] | None = None,
    storage: Storage | None = None,
    limit: float | None = None,
    progress: bool = False,
) -> dict[str, LabelScore]:
  """Returns the score of each label, in the order of the index; all processes must call it.

  Args:
    path_remap: Path prefixes to replace, each with its replacement on this machine.
    storage: Storage to read the files from; by default, local files.
    limit: The number of documents to score per label, the first ones; below 1, the share of the
      documents of each file. None scores all.
    progress: Whether process 0 shows a progress bar.
  """
  files = TokenFiles.of_index(index, path_remap=path_remap, storage=storage)
  vocab_size = scorer.vocab_size(params)
  found: dict[str, LabelScore] = {entry.label: LabelScore() for entry in index.files}
  labels: list[str] = []
  rows: list[requests_lib.Row] = []
  show = progress and jax.process_index() == 0

  def read() -> None:
    total = sum(entry.size_bytes for entry in index.files)
    with progress_lib.progress_bar("reading", total, enabled=show, unit="bytes") as advance:
      for file_id, entry in enumerate(index.files):
        left = None if limit is None or limit < 1 else int(limit) - found[entry.label].documents
        documents: list[np.ndarray] = []
        if left != 0:
          documents = _documents(
              files, file_id, entry.n_tokens, eos_id=tokenizer.eos_id, vocab_size=vocab_size
          )
        if limit is not None and limit < 1:
          left = math.ceil(limit * len(documents))
        for document in documents[:left]:
          tokens = np.concatenate([[tokenizer.eos_id], document])
          rows.extend(
              requests_lib.windows(tokens, len(document), scorer.max_length, request=len(labels))
          )
          labels.append(entry.label)
          found[entry.label] += LabelScore(1, len(document), tokenizer.byte_count(document))
        advance(entry.size_bytes)

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
