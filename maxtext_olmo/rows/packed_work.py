"""Packs groups of files, one by one, on one machine or on many.

A group is the item of the work. Its result is the group's part of the plan, so the plan is the
results of all groups, one after another (`packed_plan`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from maxtext_olmo.corpus import boundaries
from maxtext_olmo.corpus import document_spans
from maxtext_olmo.corpus import token_files
from maxtext_olmo.corpus.work import pieces as pieces_lib
from maxtext_olmo.corpus.work import reading
from maxtext_olmo.corpus.work import run
from maxtext_olmo.rows import packed_cache
from maxtext_olmo.rows import packed_group

PART = np.dtype([("first", "<i8"), ("source", "<i4"), ("count", "<i4")])


@dataclasses.dataclass(frozen=True)
class PackingRule:
  """All settings, apart from the corpus, that decide how documents are packed.

  Attributes:
    row_length: Number of tokens per row.
    group_size: Number of files that are packed together.
    long_documents: Handling of documents longer than a row: `truncate` or `split`.
    ties: Order of equally long documents, one of `tie_order.TIES`, or `cache` to take the packing
      from the cache files of a run.
    boundaries: Rule for where documents begin and end.
  """

  row_length: int
  group_size: int
  long_documents: str
  ties: str
  boundaries: document_spans.BoundaryRule


@dataclasses.dataclass(frozen=True)
class Group:
  """Files that are packed together.

  Attributes:
    number: The number of the group.
    sources: The files, which have consecutive ids.
    reads_boundaries: Whether documents come from boundary files.
  """

  number: int
  sources: tuple[pieces_lib.SourceFile, ...]
  reads_boundaries: bool

  def __str__(self) -> str:
    return f"group {self.number} (files {self.sources[0].path} to {self.sources[-1].path})"

  @property
  def key(self) -> str:
    """A name that no other group has."""
    return f"group-{self.number}"

  @property
  def weight(self) -> int:
    """Number of bytes of tokens."""
    return sum(source.n_tokens * source.token_dtype.itemsize for source in self.sources)

  @property
  def inputs(self) -> tuple[str, ...]:
    """Paths of the files that the packing depends on."""
    paths = [source.path for source in self.sources]
    return (*map(boundaries.boundary_path, paths if self.reads_boundaries else ()), *paths)


def groups_of(sources: Sequence[pieces_lib.SourceFile], rule: PackingRule) -> list[Group]:
  """Returns the groups of the files of a corpus."""
  size = rule.group_size
  return [
      Group(number, tuple(sources[first : first + size]), rule.boundaries.source == "csv")
      for number, first in enumerate(range(0, len(sources), size))
  ]


@dataclasses.dataclass(frozen=True)
class PackWork(run.Work):
  """Packs the documents of a group.

  Attributes:
    rule: Rule to pack documents with.
    cache_dir: Directory of an OLMo-core run's cache files, if `rule.ties` is `cache`.
  """

  name: ClassVar[str] = "pack"
  version: ClassVar[int] = 1

  rule: PackingRule
  cache_dir: str = ""

  @property
  def settings(self) -> dict[str, Any]:
    """The fields that decide what a result is."""
    found = dataclasses.asdict(self.rule)
    if self.rule.ties == "cache":
      found["cache"] = packed_cache.stamp(self.cache_dir, self.rule.row_length)
    return found

  @functools.cached_property
  def cache(self) -> packed_cache.PackedCache | None:
    """The cache files of a run; None if the packing is not taken from them."""
    if self.rule.ties != "cache":
      return None
    return packed_cache.PackedCache(self.cache_dir, self.rule.row_length)

  def __call__(self, item: Group) -> dict[str, Any]:
    """Returns `bounds`, where the parts of each row begin, and `parts`, as bytes of `PART`."""
    rule, sources = self.rule, item.sources
    for source in sources:
      reading.expect(self.files, source)
    files = token_files.TokenFiles(
        tuple(source.path for source in sources),
        np.array([source.data_offset for source in sources], np.int64),
        sources[0].token_dtype,
        self.files,
    )
    counts = [source.n_tokens for source in sources]
    found = packed_group.documents_of_files(files, range(len(sources)), counts, rule.boundaries)
    documents = dataclasses.replace(found, source=found.source + np.int32(sources[0].id))
    cut = packed_group.cut(documents, rule.row_length, rule.long_documents)
    if self.cache is not None:
      table = self.cache.pack(cut, item.number)
    else:
      table = packed_group.pack(cut, rule.row_length, rule.ties)
    parts = np.empty(len(table.source), PART)
    parts["first"], parts["source"], parts["count"] = table.first, table.source, table.count
    return {
        "tokens": int(table.count.sum(dtype=np.int64)),
        "bounds": table.bounds.astype("<i8"),
        "parts": parts.view(np.uint8),
    }
