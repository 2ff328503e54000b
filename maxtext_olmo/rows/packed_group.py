"""Packs the documents of one group of files into rows, as OLMo-core does.

    documents   file 0: 5 tokens, 3 tokens   file 1: 12 tokens, 2 tokens        rows of 8
    cut         5, 3, 8, 2  (truncate)       5, 3, 8, 4, 2  (split)
    order       8 5 3 2                      8 5 4 3 2
    rows        8 | 5 3 | 2                  8 | 5 3 | 4 2

Only lengths decide the packing. OLMo-core treats the files of a group as one file. Here, each
document keeps its own file and its first token in that file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from maxtext_olmo.corpus import document_spans
from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.corpus import token_files
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.rows import packing
from maxtext_olmo.rows import parts as parts_lib
from maxtext_olmo.rows import tie_order


@dataclasses.dataclass(frozen=True, eq=False)
class Documents:
  """The documents of a group, or pieces of them.

  Attributes:
    source: File of each document (int32).
    first: First token of each document in its file (int64).
    length: Number of tokens of each document (int64).
    offset: Number of tokens in all files of the group that precede each document's file (int64).
  """

  source: np.ndarray
  first: np.ndarray
  length: np.ndarray
  offset: np.ndarray

  def take(self, which: np.ndarray) -> Documents:
    """Returns the documents with the given numbers."""
    return Documents(*(getattr(self, f.name)[which] for f in dataclasses.fields(self)))


def find_documents(
    index: index_lib.OlmoNpyIndex,
    files: token_files.TokenFiles,
    numbers: Sequence[int],
    rule: document_spans.BoundaryRule,
    advance: Callable[[int], None] = lambda amount: None,
) -> Documents:
  """Returns the documents of some files.

  Args:
    index: Index of the corpus.
    files: Token files of the corpus.
    numbers: Which of the files to search, in order.
    rule: Rule for where documents begin and end.
    advance: Called with the number of bytes read since the last call.
  """
  counts = [index.files[number].n_tokens for number in numbers]
  return documents_of_files(files, numbers, counts, rule, advance)


def documents_of_files(
    files: token_files.TokenFiles,
    numbers: Sequence[int],
    counts: Sequence[int],
    rule: document_spans.BoundaryRule,
    advance: Callable[[int], None] = lambda amount: None,
) -> Documents:
  """Returns the documents of some files, given the number of tokens of each."""
  sources, firsts, lengths, offsets = [], [], [], []
  before = 0
  for number, n_tokens in zip(numbers, counts):
    first, length = document_spans.find_spans(files, number, n_tokens, rule, advance)
    if length.max(initial=0) > np.iinfo(np.int32).max:
      raise CorpusError(
          f"{files.paths[number]} has a document of {length.max()} tokens; the length must fit in"
          " 32 bits. Check olmo_eos_id."
      )
    sources.append(np.full(len(first), number, np.int32))
    firsts.append(first)
    lengths.append(length)
    offsets.append(np.full(len(first), before))
    before += n_tokens
  return Documents(*(np.concatenate(column) for column in (sources, firsts, lengths, offsets)))


def cut(documents: Documents, row_length: int, long_documents: str) -> Documents:
  """Truncates documents to the length of a row, or splits them into pieces of that length."""
  if long_documents == "truncate":
    return dataclasses.replace(documents, length=np.minimum(documents.length, row_length))
  pieces = -(-documents.length // row_length)
  which = np.repeat(np.arange(len(pieces)), pieces)
  skipped = (np.arange(len(which)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * row_length
  whole = documents.take(which)
  return dataclasses.replace(
      whole, first=whole.first + skipped, length=np.minimum(whole.length - skipped, row_length)
  )


def pack(documents: Documents, row_length: int, ties: str) -> parts_lib.Parts:
  """Packs documents into rows, and returns the rows in the order in which they were opened.

  Args:
    documents: Documents or pieces, none longer than a row.
    row_length: Number of tokens per row.
    ties: Order of equally long documents, one of `tie_order.TIES`.
  """
  ordered = documents.take(tie_order.longest_first(documents.length, ties))
  rows, count = packing.best_fit_in_order(ordered.length, row_length, queues=True)
  bounds = np.zeros(count + 1, np.int64)
  np.cumsum(np.bincount(rows, minlength=count), out=bounds[1:])
  return table(ordered.take(np.argsort(rows, kind="stable")), bounds)


def table(documents: Documents, bounds: np.ndarray) -> parts_lib.Parts:
  """Returns the table of parts of documents that are sorted by row already."""
  return parts_lib.Parts(
      bounds,
      documents.source.astype(np.int32),
      documents.first.astype(np.int64),
      documents.length.astype(np.int32),
  )
