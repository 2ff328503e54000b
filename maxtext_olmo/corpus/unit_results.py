"""The results of tokenizing units: which files cannot be read, and what each label contains.

`tokenize_units` produces these results, and `assemble_parts` uses them.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from maxtext_olmo.corpus import assemble_parts
from maxtext_olmo.corpus import text_files
from maxtext_olmo.corpus import text_units
from maxtext_olmo.corpus import tokenize_units
from maxtext_olmo.errors import CorpusError


class UnitResult(NamedTuple):
  """The result of a unit.

  Attributes:
    path: Path or URL of its tokens.
    slices: What its slices contain.
  """

  path: str
  slices: list[tokenize_units.SliceResult]

  @property
  def is_complete(self) -> bool:
    """Whether all its slices could be read to the end."""
    return not any(counts.error for counts in self.slices)


class Found(NamedTuple):
  """What a corpus will contain.

  Attributes:
    units: The tokenized units of each label.
    empty: Number of empty documents.
  """

  units: dict[str, list[assemble_parts.TokenizedUnit]]
  empty: int


def read_results(
    outcome: Iterable[tuple[text_units.TextUnit, Mapping[str, Any]]], place: str
) -> dict[str, UnitResult]:
  """Returns the result of each unit, by key; `place` is the directory or URL of the tokens."""
  return {
      unit.key: UnitResult(
          f"{place}/{result['file']}",
          [tokenize_units.SliceResult(*fields) for fields in result["slices"]],
      )
      for unit, result in outcome
  }


def find_unreadable(
    units: Iterable[text_units.TextUnit], results: Mapping[str, UnitResult]
) -> dict[str, str]:
  """Returns why files cannot be read completely, by path."""
  found: dict[str, str] = {}
  for unit in units:
    for piece, counts in zip(unit.slices, results[unit.key].slices):
      if counts.error:
        found.setdefault(piece.path, counts.error)
  return found


def join_units(
    units: Mapping[str, Sequence[text_units.TextUnit]],
    results: Mapping[str, UnitResult],
    unreadable: Container[str],
) -> Found:
  """Returns what the units of each label contain, without the files that cannot be read.

  Args:
    units: The units of each label, in order.
    results: The result of each unit, by key.
    unreadable: Paths of the files to leave out.

  Raises:
    CorpusError: A label has no documents.
  """
  found: dict[str, list[assemble_parts.TokenizedUnit]] = {}
  empty = 0
  for label, some in units.items():
    kept = found.setdefault(label, [])
    lines = 0
    for unit in some:
      path, counted = results[unit.key]
      slices = []
      for piece, counts in zip(unit.slices, counted):
        lines = lines if piece.first else 0  # A file begins.
        source = text_files.printable_path(piece.path)
        slices.append(assemble_parts.UnitSlice(source, lines, piece.path not in unreadable))
        lines += counts.lines
      chosen = [counts for counts, piece in zip(counted, slices) if piece.is_kept]
      empty += sum(counts.empty for counts in chosen)
      kept.append(
          assemble_parts.TokenizedUnit(
              path,
              n_tokens=sum(counts.tokens for counts in counted),
              kept_tokens=sum(counts.tokens for counts in chosen),
              kept_documents=sum(counts.documents for counts in chosen),
              slices=tuple(slices),
          )
      )
    if not any(unit.kept_documents for unit in kept):
      raise CorpusError(f"The label {label!r} has no document with text in it.")
  return Found(found, empty)
