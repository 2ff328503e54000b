"""How long the documents are that an EOS would make, and whether such documents are likely.

Any id may occur in text, but only the EOS ends documents: files end with it, documents are not a
few words long, and none has many millions of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Lengths are counted in eighths of an octave, so a median is true to 9 %.
_PER_OCTAVE = 8
_BINS = 64 * _PER_OCTAVE
_SHORT = 64
_ENOUGH = 10  # Fewer documents prove nothing.
_LONG = 10_000_000


class DocumentLengths:
  """The lengths of the documents of a file, counted piece by piece, or of several files.

  Attributes:
    documents: How many the EOS ends.
    longest: The most tokens of one, that after the last EOS included.
    tokens: In all pieces.
    rest: Tokens after the last EOS.
    files: How many have tokens.
    unended: How many of them do not end with the EOS.
  """

  def __init__(self) -> None:
    self._bins = np.zeros(_BINS, np.int64)
    self.documents = self.longest = self.tokens = self.rest = self.files = self.unended = 0

  def add(self, is_eos: np.ndarray) -> None:
    """Counts the next tokens of a file, given which of them are the EOS."""
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
    """Returns the lengths of several files together."""
    total = cls()
    for part in parts:
      total._bins += part._bins
      total.longest = max(total.longest, part.longest)
      for name in ("documents", "tokens", "rest", "files", "unended"):
        setattr(total, name, getattr(total, name) + getattr(part, name))
    return total

  @property
  def median(self) -> int:
    """About half of the documents are longer; 0 where there are none."""
    if not self.documents:
      return 0
    middle = int(np.searchsorted(np.cumsum(self._bins), (self.documents + 1) // 2))
    return min(self.longest, round(2 ** ((middle + 0.5) / _PER_OCTAVE)))

  def describe(self) -> str:
    """Returns the figures in one line."""
    return (
        f"{self.documents:,} documents, median about {self.median:,} tokens, longest"
        f" {self.longest:,}; {self.unended:,} of {self.files:,} files do not end with the EOS,"
        f" {self.rest / max(self.tokens, 1):.1%} of the tokens come after the last one"
    )

  def doubts(self) -> list[str]:
    """Returns the reasons to think that the id is not the EOS."""
    found = []
    if 2 * self.unended > self.files:
      found.append("most files do not end with it")
    if self.documents >= _ENOUGH and self.median < _SHORT:
      found.append("most documents would be very short")
    if self.longest > _LONG:
      found.append("a document would be very long")
    return found
