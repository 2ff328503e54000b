"""One document per row: row i is document i, truncated or padded to the length of a row.

row length 4, padding P         document 0         document 1     document 2
tokens                          5 6 7 8 9 E        5 E            6 7 E
rows                            5 6 7 8            5 E P P        6 7 E P
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from maxtext_olmo import errors
from maxtext_olmo.corpus import documents as documents_lib
from maxtext_olmo.rows import parts as parts_lib
from maxtext_olmo.rows import row_source
from maxtext_olmo.rows import segments


@dataclasses.dataclass(frozen=True)
class DocumentRows(row_source.RowSourceDefaults):
  """The documents of a corpus as rows.

  Attributes:
    documents: Document index of the corpus.
    row_length: Number of tokens per row.
    long_documents: Handling of a document that does not fit: `truncate` or `error`.
    segment_rule: Rule for where segments begin within a document.
    pad_id: Token that fills a row after its document.
    mask_paths: Path of each token file's loss mask; None if every token counts.
  """

  documents: documents_lib.DocumentIndex
  row_length: int
  long_documents: str = "error"
  segment_rule: segments.SegmentRule = segments.SegmentRule()
  pad_id: int = 0
  mask_paths: Sequence[str] | None = None

  @property
  def fingerprint(self) -> str:
    """The fingerprint of the corpus."""
    return self.documents.fingerprint

  def num_rows(self, epoch: int) -> int:
    """Returns the number of documents."""
    del epoch
    return self.documents.num_documents

  def parts(self, epoch: int, rows: np.ndarray) -> parts_lib.Parts:
    """Returns one part for each document; an empty document is a padding row."""
    del epoch
    lengths = self.documents.lengths(rows)
    if self.long_documents == "error" and lengths.max(initial=0) > self.row_length:
      worst = int(np.argmax(lengths))
      raise errors.CorpusError(
          f"Document {rows[worst]} has {lengths[worst]} tokens, but a row holds {self.row_length}."
          " Set olmo_long_documents='truncate' to drop the rest of such documents."
      )
    files, first = self.documents.locate(rows)
    count = np.minimum(lengths, self.row_length)
    table = parts_lib.Parts.one_per_row(files, first, count)
    empty = count == 0
    if not empty.any():
      return table
    kept = np.flatnonzero(~empty)
    bounds = np.concatenate([[0], np.cumsum(~empty)])
    return parts_lib.Parts(bounds, table.source[kept], table.first[kept], table.count[kept])

  def rows_of(self, epoch: int, source: int, first: int, count: int) -> np.ndarray:
    """Returns the documents whose rows contain tokens from the given range of a file."""
    del epoch
    found = self.documents.within(source, first, count)
    return found[self.documents.locate(found)[1] + self.row_length > first]
