"""Statistics of a corpus by label: tokens, documents, their lengths, and how often each id occurs.

Files are read piece by piece, on one machine or on many (`work`). The results of the pieces of a
file are joined in order, because a document may cross from one piece into the next:

    pieces of a file ──append──▶ file ──add──▶ label ──add──▶ corpus
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from maxtext_olmo.corpus.document_lengths import DocumentLengths
from maxtext_olmo.corpus.index import OlmoNpyIndex
from maxtext_olmo.corpus.storage import Storage
from maxtext_olmo.corpus.token_counts import TokenCounts
from maxtext_olmo.corpus.work import pieces as pieces_lib
from maxtext_olmo.corpus.work import reading
from maxtext_olmo.corpus.work import run
from maxtext_olmo.corpus.work.options import WorkOptions
from maxtext_olmo.errors import ConfigError

# A result takes 4 bytes per id of the vocabulary, so a large corpus has larger, and fewer, pieces.
_LARGE_BYTES = 1 << 40
_LARGE_PIECE_BYTES = 4 * pieces_lib.PIECE_BYTES


@dataclasses.dataclass(frozen=True)
class StatsWork(run.Work):
  """Counts the tokens and documents of a piece.

  Attributes:
    eos_id: Id that ends documents; None counts no documents.
  """

  name: ClassVar[str] = "stats"
  version: ClassVar[int] = 1

  eos_id: int | None = None

  def __call__(self, item: pieces_lib.Piece) -> dict[str, Any]:
    """Returns the counts of a piece."""
    counts = TokenCounts(item.source.token_dtype, self.eos_id)
    reading.expect(self.files, item.source)
    counts.read(self.files, item.source.path, item.start, item.end)
    found = {"ids": counts.ids, "outside": counts.outside}
    if self.eos_id is not None:
      found |= DocumentLengths.of_ends(counts.ends, counts.count).to_result()
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class Stats:
  """The statistics of a label, or of all labels.

  Attributes:
    label: The label; "" for all labels.
    files: Number of files.
    tokens: Number of tokens.
    ids: How often each id occurs (int64).
    outside: Number of tokens whose id is too high for any tokenizer.
    lengths: Lengths of the documents; None if no EOS was given.
  """

  label: str
  files: int
  tokens: int
  ids: np.ndarray
  outside: int
  lengths: DocumentLengths | None

  @property
  def distinct(self) -> int:
    """Number of ids that occur."""
    return int(np.count_nonzero(self.ids))

  @property
  def bits(self) -> float:
    """Entropy of the ids, in bits per token: lower for repetitive text, 0 without tokens."""
    total = int(self.ids.sum())
    shares = self.ids[self.ids > 0] / max(1, total)
    return float(-(shares * np.log2(shares)).sum()) + 0.0

  @property
  def mean_length(self) -> float:
    """Mean length of the documents; 0 if there are none."""
    lengths = self.lengths
    if lengths is None or not lengths.documents:
      return 0.0
    return (lengths.tokens - lengths.rest) / lengths.documents

  def most_frequent(self, count: int) -> list[tuple[int, int]]:
    """Returns the most frequent ids and their counts, the most frequent first."""
    order = np.lexsort((np.arange(len(self.ids)), -self.ids))[:count]
    return [(int(i), int(self.ids[i])) for i in order if self.ids[i]]


def count_pieces(
    index: OlmoNpyIndex,
    options: WorkOptions | None = None,
    *,
    eos_id: int | None = None,
    path_remap: Mapping[str, str] | None = None,
    progress: bool = False,
    storage: Storage | None = None,
    piece_bytes: int | None = None,
) -> run.Outcome:
  """Counts the tokens of all pieces, or of a part of them, on one machine or on many.

  Args:
    index: Index of the corpus.
    options: How the work is done.
    eos_id: Id that ends documents; None counts no documents.
    path_remap: prefix → replacement, for paths that begin differently on this machine.
    progress: Whether to show a progress bar.
    storage: Storage that holds the files; opened per process by default.
    piece_bytes: Size of a piece in bytes; by default, it depends on the size of the corpus.
  """
  if eos_id is not None and not 0 <= eos_id <= np.iinfo(index.token_dtype).max:
    raise ConfigError(
        f"--eos-id {eos_id} cannot occur in files of {index.token_dtype.name}. Give the id of the"
        " token that ends documents."
    )
  if piece_bytes is None:
    large = index.total_tokens * index.token_dtype.itemsize > _LARGE_BYTES
    piece_bytes = _LARGE_PIECE_BYTES if large else pieces_lib.PIECE_BYTES
  return run.run_work(
      StatsWork(eos_id, storage=storage),
      pieces_lib.pieces_of(index, piece_bytes=piece_bytes, path_remap=path_remap),
      options,
      fingerprint=index.fingerprint,
      description="Counting tokens",
      progress=progress,
  )


def make_stats(outcome: run.Outcome) -> list[Stats]:
  """Returns the statistics of each label, in the order of the files.

  Raises:
    CorpusError: Pieces failed or are missing.
  """
  outcome.check("The tokens cannot be counted")
  labels: dict[str, _LabelCounts] = {}
  for piece, result in outcome:
    labels.setdefault(piece.source.label, _LabelCounts()).add(piece, result)
  return [counts.finish(label) for label, counts in labels.items()]


def add_up(parts: Iterable[Stats]) -> Stats:
  """Returns the combined statistics of several labels."""
  parts = list(parts)
  ids = np.zeros(max((len(part.ids) for part in parts), default=0), np.int64)
  for part in parts:
    ids[: len(part.ids)] += part.ids
  lengths = [part.lengths for part in parts if part.lengths is not None]
  return Stats(
      "",
      sum(part.files for part in parts),
      sum(part.tokens for part in parts),
      ids,
      sum(part.outside for part in parts),
      DocumentLengths.total(lengths) if lengths else None,
  )


class _LabelCounts:
  """Adds up the results of a label's pieces, in the order of the files."""

  def __init__(self) -> None:
    self._files: set[int] = set()
    self._tokens = self._outside = 0
    self._ids = np.zeros(0, np.int64)
    self._done: list[DocumentLengths] = []
    self._file: DocumentLengths | None = None

  def add(self, piece: pieces_lib.Piece, result: Mapping[str, Any]) -> None:
    self._files.add(piece.file)
    self._tokens += piece.count
    self._outside += result["outside"]
    ids = result["ids"]
    if len(ids) > len(self._ids):
      self._ids = np.concatenate([self._ids, np.zeros(len(ids) - len(self._ids), np.int64)])
    self._ids[: len(ids)] += ids
    if "bins" not in result:
      return
    if piece.is_first:
      self._end_file()
      self._file = DocumentLengths()
    self._file.append(DocumentLengths.from_result(result))  # type: ignore[union-attr]

  def _end_file(self) -> None:
    if self._file is not None:
      self._done = [DocumentLengths.total([*self._done, self._file])]
    self._file = None

  def finish(self, label: str) -> Stats:
    """Returns the statistics of all pieces that were added."""
    self._end_file()
    lengths = self._done[0] if self._done else None
    return Stats(label, len(self._files), self._tokens, self._ids, self._outside, lengths)
