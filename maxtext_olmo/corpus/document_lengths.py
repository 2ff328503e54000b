"""Statistics of the documents that a token id would delimit, to judge whether it is the EOS.

Any id may occur in text, but only the true EOS gives plausible documents: files end with it, most
documents are longer than a few words, and none has many millions of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Lengths are counted in bins of an eighth of an octave, so the median is accurate to 9 %.
_PER_OCTAVE = 8
_BINS = 64 * _PER_OCTAVE
_SHORT = 64
_ENOUGH = 10  # Fewer documents prove nothing.
_LONG = 10_000_000


class DocumentLengths:
  """A histogram of document lengths in one file, counted piece by piece, or in several files.

  Attributes:
    documents: Number of documents that end with the EOS.
    longest: Length of the longest document, including the one after the last EOS.
    tokens: Number of tokens counted.
    rest: Number of tokens after the last EOS.
    files: Number of files that have tokens.
    unended: Number of these files that do not end with the EOS.
  """

  def __init__(self) -> None:
    self._bins = np.zeros(_BINS, np.int64)
    self.documents = self.longest = self.tokens = self.rest = self.files = self.unended = 0

  def add(self, is_eos: np.ndarray) -> None:
    """Counts the next tokens of a file.

    Args:
      is_eos: For each token, whether it is the EOS.
    """
    ends = np.flatnonzero(is_eos)
    if len(ends):
      lengths = np.diff(ends, prepend=-1 - self.rest)
      self._bins += np.bincount((np.log2(lengths) * _PER_OCTAVE).astype(int), minlength=_BINS)
      self.documents += len(ends)
      self.longest = max(self.longest, int(lengths.max()))
      self.rest = len(is_eos) - 1 - int(ends[-1])
    else:
      self.rest += len(is_eos)
    self.tokens += len(is_eos)
    self.longest = max(self.longest, self.rest)
    self.files = int(self.tokens > 0)
    self.unended = int(self.rest > 0)

  @classmethod
  def total(cls, parts: Sequence[DocumentLengths]) -> DocumentLengths:
    """Returns the combined statistics of several files."""
    total = cls()
    for part in parts:
      total._bins += part._bins
      total.longest = max(total.longest, part.longest)
      for name in ("documents", "tokens", "rest", "files", "unended"):
        setattr(total, name, getattr(total, name) + getattr(part, name))
    return total

  @property
  def median(self) -> int:
    """The approximate median length of a document; 0 if there are none."""
    if not self.documents:
      return 0
    middle = int(np.searchsorted(np.cumsum(self._bins), (self.documents + 1) // 2))
    return min(self.longest, round(2 ** ((middle + 0.5) / _PER_OCTAVE)))

  def describe(self) -> str:
    """Returns the statistics as one line of text."""
    return (
        f"{self.documents:,} documents, median about {self.median:,} tokens, longest"
        f" {self.longest:,}; {self.unended:,} of {self.files:,} files do not end with the EOS,"
        f" {self.rest / max(self.tokens, 1):.1%} of the tokens come after the last one"
    )

  def doubts(self) -> list[str]:
    """Returns the reasons to suspect that the id is not the EOS."""
    found = []
    if 2 * self.unended > self.files:
      found.append("most files do not end with it")
    if self.documents >= _ENOUGH and self.median < _SHORT:
      found.append("most documents would be very short")
    if self.longest > _LONG:
      found.append("a document would be very long")
    return found
