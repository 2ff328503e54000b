"""Statistics of document lengths, to judge whether a token id is really the EOS.

Any id may occur in text, but only the true EOS divides the text into plausible documents: files end
with it, most documents are longer than a few words, and none has many millions of tokens.

The lengths of consecutive ranges of a file can be joined, so the ranges may be read by different
machines. The first document of a range joins what the range before it left open:

    tokens     5  6  0  7 | 8  0  9
    range 0    ───────  ─         documents: 1, lead 3, rest 1
    range 1                ────  ─  documents: 1, lead 2, rest 1
    joined     documents of 3 and of 1 + 2 tokens, rest 1
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# The histogram has eight bins for each doubling of the length, so the median is accurate to 9 %.
_PER_OCTAVE = 8
_BINS = 64 * _PER_OCTAVE
_USUAL = 1 << 14
_SHORT = 64
_ENOUGH = 10  # Fewer documents prove nothing.
_LONG = 10_000_000
_COUNTS = ("documents", "lead", "longest", "tokens", "rest")


class DocumentLengths:
  """A histogram of document lengths, of a range of a file or summed over files.

  Attributes:
    documents: Number of documents that end with the EOS.
    lead: Length of the first of them, which is not in the histogram; 0 if there is none.
    longest: Length of the longest document; tokens after the last EOS count as a document here.
    tokens: Number of tokens counted.
    rest: Number of tokens after the last EOS.
    files: Number of files that have tokens.
    unended: Number of these files that do not end with the EOS.
  """

  def __init__(self) -> None:
    self._bins = np.zeros(_BINS, np.int64)
    self.documents = self.lead = self.longest = self.tokens = self.rest = 0
    self.files = self.unended = 0

  @classmethod
  def of_ends(cls, ends: np.ndarray, count: int) -> DocumentLengths:
    """Returns the lengths in a range of tokens.

    Args:
      ends: Places of the EOS in the range, ascending (int64).
      count: Number of tokens in the range.
    """
    found = cls()
    found.tokens, found.documents, found.rest = count, len(ends), count
    if len(ends):
      lengths = np.diff(ends)
      found._bins += np.bincount(_look_up_bins(lengths), minlength=_BINS)
      found.lead = int(ends[0]) + 1
      found.rest = count - 1 - int(ends[-1])
      found.longest = max(found.lead, int(lengths.max(initial=0)))
    found.longest = max(found.longest, found.rest)
    found.files, found.unended = int(count > 0), int(found.rest > 0)
    return found

  def append(self, later: DocumentLengths) -> None:
    """Adds the lengths of the range that follows this one in the same file."""
    if later.documents:
      joined = self.rest + later.lead
      if self.documents:
        self._bins[_bin(np.array(joined))] += 1
      else:
        self.lead = joined
      self._bins += later._bins
      self.rest = later.rest
    else:
      joined = self.rest = self.rest + later.tokens
    self.documents += later.documents
    self.longest = max(self.longest, joined, later.longest)
    self.tokens += later.tokens
    self.files, self.unended = int(self.tokens > 0), int(self.rest > 0)

  @classmethod
  def total(cls, parts: Sequence[DocumentLengths]) -> DocumentLengths:
    """Returns the combined statistics of several files."""
    total = cls()
    for part in parts:
      total._bins += part._all_bins()
      total.longest = max(total.longest, part.longest)
      for name in ("documents", "tokens", "rest", "files", "unended"):
        setattr(total, name, getattr(total, name) + getattr(part, name))
    return total

  def to_result(self) -> dict[str, Any]:
    """Returns the lengths of a range as JSON values and an array."""
    return {"counts": [getattr(self, name) for name in _COUNTS], "bins": self._bins}

  @classmethod
  def from_result(cls, result: Mapping[str, Any]) -> DocumentLengths:
    """Returns the lengths that `to_result` has described."""
    found = cls()
    found._bins += result["bins"]
    for name, value in zip(_COUNTS, result["counts"], strict=True):
      setattr(found, name, value)
    found.files, found.unended = int(found.tokens > 0), int(found.rest > 0)
    return found

  def _all_bins(self) -> np.ndarray:
    bins = self._bins.copy()
    if self.lead:
      bins[_bin(np.array(self.lead))] += 1
    return bins

  @property
  def median(self) -> int:
    """The approximate median length of a document; 0 if there are none."""
    if not self.documents:
      return 0
    middle = int(np.searchsorted(np.cumsum(self._all_bins()), (self.documents + 1) // 2))
    return min(self.longest, round(2 ** ((middle + 0.5) / _PER_OCTAVE)))

  def octaves(self) -> tuple[np.ndarray, np.ndarray]:
    """Returns the powers of two up to the longest document, and the documents from each one on."""
    counts = self._all_bins().reshape(-1, _PER_OCTAVE).sum(axis=1)
    counts = counts[: int(np.flatnonzero(counts)[-1]) + 1] if counts.any() else counts[:0]
    return 2 ** np.arange(len(counts), dtype=np.int64), counts

  def describe(self) -> str:
    """Returns the statistics as one line of text."""
    return (
        f"{self.documents:,} documents, median about {self.median:,} tokens, longest"
        f" {self.longest:,}; {self.unended:,} of {self.files:,} files do not end with the EOS,"
        f" {self.rest / max(self.tokens, 1):.1%} of the tokens come after the last EOS"
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


def _look_up_bins(lengths: np.ndarray) -> np.ndarray:
  """Returns `_bin(lengths)` of an array, three times as fast if few documents are long."""
  table = _bins_of_usual_lengths()
  bins = table[np.minimum(lengths, len(table) - 1)]
  unusual = np.flatnonzero(lengths >= len(table))
  bins[unusual] = _bin(lengths[unusual])
  return bins


@functools.cache
def _bins_of_usual_lengths() -> np.ndarray:
  bins = _bin(np.maximum(np.arange(_USUAL), 1)).astype(np.uint16)
  bins.flags.writeable = False
  return bins


def _bin(lengths: np.ndarray) -> np.ndarray:
  found: np.ndarray = (np.log2(lengths) * _PER_OCTAVE).astype(np.int64)
  return found
