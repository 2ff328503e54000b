"""Assembles the parts of a corpus from tokenized units: the second of the two steps of making one.

    units    ├── u0 ──┼── u1 ──┼── u2 ──┼── u3 ──┼── u4 ──┤
    parts    ├─ part-00000 ─┼─ part-00001 ─┼─ part-00002 ─┤
    groups   ├────────────── g0 ───────────┼───── g1 ─────┤

A part ends with the document that fills it, as if one process had written all documents in order.
So the parts depend neither on how the text was divided into units, nor on which worker tokenized
them. A group of parts is assembled by one worker.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

from maxtext_olmo.corpus import boundaries
from maxtext_olmo.corpus import part_files
from maxtext_olmo.corpus.storage import Storage
from maxtext_olmo.corpus.work import reading
from maxtext_olmo.corpus.work import tasks
from maxtext_olmo.errors import CorpusError

GROUP_TOKENS = 1 << 24


@dataclasses.dataclass(frozen=True, slots=True)
class UnitSlice:
  """A slice of a text file in a tokenized unit.

  Attributes:
    source: Path of the text file.
    lines_before: Number of lines of the file before the slice.
    is_kept: Whether its documents become part of the corpus.
  """

  source: str
  lines_before: int
  is_kept: bool


@dataclasses.dataclass(frozen=True, slots=True)
class TokenizedUnit:
  """A unit that was tokenized.

  Attributes:
    path: Path or URL of its token file.
    n_tokens: Number of tokens in that file.
    kept_tokens: Number of tokens of the documents that are kept.
    kept_documents: Number of documents that are kept.
    slices: Its slices.
  """

  path: str
  n_tokens: int
  kept_tokens: int
  kept_documents: int
  slices: tuple[UnitSlice, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class PartGroup:
  """Consecutive parts of a label, and the units that hold their documents.

  Attributes:
    label: The label.
    first_part: Number of the first part.
    units: The units, in order.
    skipped: Number of kept documents of the first unit that belong to earlier parts.
    documents: Number of documents.
    tokens: Number of tokens.
  """

  label: str
  first_part: int
  units: tuple[TokenizedUnit, ...]
  skipped: int
  documents: int
  tokens: int

  def __str__(self) -> str:
    return f"part {self.first_part} of {self.label}"

  @property
  def key(self) -> str:
    """A name that only a group with the same parts from the same units has."""
    return hashlib.sha256(json.dumps(dataclasses.astuple(self)).encode()).hexdigest()[:24]

  @property
  def weight(self) -> int:
    """Number of tokens."""
    return self.tokens

  @property
  def inputs(self) -> tuple[str, ...]:
    """No files: the names of the units identify their contents."""
    return ()


def plan_groups(
    label: str,
    units: Sequence[TokenizedUnit],
    tokens_per_file: int,
    read_lengths: Callable[[TokenizedUnit], Iterable[int]],
    group_tokens: int = GROUP_TOKENS,
) -> list[PartGroup]:
  """Returns the groups of a label, in order.

  Args:
    label: The label.
    units: Its units, in order.
    tokens_per_file: A part ends after the document that reaches this number of tokens.
    read_lengths: Returns the number of tokens of each document that is kept. Called only for units
      in which a part ends.
    group_tokens: A group ends with the part that reaches this number of tokens.
  """
  groups: list[PartGroup] = []
  first_unit, skipped, documents, tokens = 0, 0, 0, 0  # Of the group.
  first_part, part, part_tokens = 0, 0, 0

  def group(end: int) -> PartGroup:
    chosen = tuple(units[first_unit:end])
    return PartGroup(label, first_part, chosen, skipped, documents, tokens)

  for number, unit in enumerate(units):
    if part_tokens + unit.kept_tokens < tokens_per_file:
      part_tokens += unit.kept_tokens
      documents += unit.kept_documents
      tokens += unit.kept_tokens
      continue
    for place, length in enumerate(read_lengths(unit), start=1):
      part_tokens += length
      documents += 1
      tokens += length
      if part_tokens < tokens_per_file:
        continue
      part, part_tokens = part + 1, 0
      if tokens >= group_tokens:
        groups.append(group(number + 1))
        is_last = place == unit.kept_documents
        first_unit, skipped = (number + 1, 0) if is_last else (number, place)
        first_part, documents, tokens = part, 0, 0
  if documents:
    groups.append(group(len(units)))
  return groups


def read_lengths(storage: Storage, unit: TokenizedUnit) -> Iterator[int]:
  """Yields the number of tokens of each document of a unit that is kept."""
  path = boundaries.boundary_path(unit.path)
  for block in boundaries.read_boundaries(storage, path, unit.n_tokens):
    for length, number in zip(block.lengths.tolist(), block.sources):
      if unit.slices[int(number)].is_kept:
        yield length


@dataclasses.dataclass(frozen=True)
class AssembleParts(tasks.Work):
  """Work that writes the parts of a group.

  Attributes:
    directory: Directory or URL with a directory for each label.
    itemsize: Size of a token in bytes.
    tokens_per_file: A part ends after the document that reaches this number of tokens.
  """

  name: ClassVar[str] = "assemble"
  version: ClassVar[int] = 1

  directory: str
  itemsize: int
  tokens_per_file: int

  def __call__(self, group: PartGroup) -> dict[str, Any]:
    """Writes the parts of a group and returns the names of their token files."""
    directory = os.path.join(self.directory, group.label)
    documents = self._documents(group)
    return {
        "parts": part_files.write_parts(
            documents, directory, self.tokens_per_file, group.first_part
        )
    }

  def _documents(self, group: PartGroup) -> Iterator[part_files.EncodedDocument]:
    skip, left, tokens = group.skipped, group.documents, 0
    for unit in group.units:
      for document in part_files.read_part(self.files, unit.path, self.itemsize):
        piece = unit.slices[int(document.source)]
        if not piece.is_kept:
          continue
        if skip:
          skip -= 1
          continue
        if not left:
          break
        reading.raise_if_stopped()
        left -= 1
        tokens += document.length
        line = (document.line or 0) + piece.lines_before
        yield document._replace(
            name=document.name or f"{piece.source}:{line}", source=piece.source, line=line
        )
    if left or tokens != group.tokens:
      raise CorpusError(
          f"The tokenized units of {group} have {tokens} tokens; expected {group.tokens}. Remove"
          f" {os.path.dirname(group.units[0].path)} and run the command again."
      )
