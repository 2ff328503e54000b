"""The plan of packed rows: which documents make up each row, as OLMo-core packs them.

Files are divided into groups of `group_size`, and each group is packed separately:

    documents of a group    truncated to the row length, or split into pieces of that length
    order                   longest first; equally long documents in an order of `tie_order`
    best fit                a document goes to the fullest row with enough room, or to a new row; of
                            equally full rows, to the first that reached this level
    rows                    in the order in which they were opened, group after group

The plan is a sidecar file. Its JSON header takes the first 4096 bytes, and has a checksum of the
rest:

    groups   int64, 2 x (groups + 1)   the first row and the first part of each group, and the ends
    bounds   int64, rows + 1           where the parts of each row begin
    parts    16 bytes each             first token (int64), file (int32), number of tokens (int32)

Opening a plan reads only the header, and a row takes two small reads, whatever the size of the
plan. Groups are packed in parallel, and packing a group takes memory only for its own documents.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import numpy as np
import xxhash
from absl import logging

from maxtext_olmo import atomic
from maxtext_olmo import errors
from maxtext_olmo.corpus import document_spans
from maxtext_olmo.corpus import file_array
from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.corpus.storage import Storage
from maxtext_olmo.corpus.storage import open_storage
from maxtext_olmo.corpus.work import options as options_lib
from maxtext_olmo.corpus.work import pieces as pieces_lib
from maxtext_olmo.corpus.work import run as run_lib
from maxtext_olmo.corpus.work.options import WorkOptions
from maxtext_olmo.rows import packed_cache
from maxtext_olmo.rows import packed_work
from maxtext_olmo.rows import parts as parts_lib
from maxtext_olmo.rows.packed_work import PART as PART
from maxtext_olmo.rows.packed_work import PackingRule as PackingRule

_FORMAT = "maxtext-olmo packed rows 1"
_HEADER_BYTES = 4096
# Plans up to this size are verified when they are opened; larger plans only by `verify`.
_CHECKED_AT_OPENING = 64 << 20
_REBUILD = "Delete it; the next start of the run builds it again."


@dataclasses.dataclass(frozen=True)
class PackedPlan:
  """An open plan.

  Attributes:
    path: Path of the sidecar file.
    corpus: Fingerprint of the corpus.
    rule: Rule that documents were packed with.
    num_files: Number of token files.
    num_groups: Number of groups.
    num_rows: Number of rows.
    num_parts: Number of parts in all rows.
    num_tokens: Number of tokens in all rows, without padding.
    checksum: Checksum (hex) of everything after the header.
    storage: Storage that holds the file.
  """

  path: str
  corpus: str
  rule: PackingRule
  num_files: int
  num_groups: int
  num_rows: int
  num_parts: int
  num_tokens: int
  checksum: str
  storage: Storage = dataclasses.field(default_factory=open_storage, compare=False, repr=False)

  def __getstate__(self) -> dict[str, Any]:
    # The file is opened again in each process.
    return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

  @property
  def fingerprint(self) -> str:
    """A text that identifies the rows by corpus, rule (with the order of ties), and checksum."""
    rule = json.dumps(dataclasses.asdict(self.rule), sort_keys=True)
    text = f"{self.corpus} {rule} {self.checksum}"
    return f"packed-{self.rule.ties}:{hashlib.sha256(text.encode()).hexdigest()}"

  @functools.cached_property
  def _arrays(self) -> tuple[file_array.FileArray, file_array.FileArray, file_array.FileArray]:
    counts = (
        ("<i8", 2 * (self.num_groups + 1)),
        ("<i8", self.num_rows + 1),
        (PART, self.num_parts),
    )
    found, offset = [], _HEADER_BYTES
    for dtype, count in counts:
      found.append(file_array.FileArray(self.storage, self.path, dtype, offset, count))
      offset += count * np.dtype(dtype).itemsize
    return found[0], found[1], found[2]

  @property
  def size(self) -> int:
    """Size in bytes that the file must have."""
    numbers = 2 * (self.num_groups + 1) + self.num_rows + 1
    return _HEADER_BYTES + 8 * numbers + PART.itemsize * self.num_parts

  @functools.cached_property
  def _groups(self) -> np.ndarray:
    """The first row and first part of each group, followed by the totals (2, groups + 1)."""
    return self._arrays[0].load().reshape(2, -1)

  def parts(self, rows: np.ndarray) -> parts_lib.Parts:
    """Returns the parts of rows, in the given order."""
    _, all_bounds, all_parts = self._arrays
    firsts, ends = all_bounds[np.stack([rows, rows + 1])]
    bounds = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(ends - firsts, out=bounds[1:])
    return _table(bounds, all_parts.ranges(firsts, ends - firsts))

  def rows_of(self, source: int, first: int, count: int) -> np.ndarray:
    """Returns the rows that contain a token of the given range of a file, ascending.

    Reads only the parts of the file's group, because no other row can contain such a token.
    """
    rows, parts = self._groups
    group = source // self.rule.group_size
    low, high = int(parts[group]), int(parts[group + 1])
    table = self._arrays[2].ranges(np.array([low]), np.array([high - low]))
    hits = (table["source"] == source) & (table["first"] < first + count)
    hits &= table["first"] + table["count"] > first
    first_row, end_row = int(rows[group]), int(rows[group + 1])
    bounds = self._arrays[1].ranges(np.array([first_row]), np.array([end_row - first_row]))
    return np.unique(first_row + np.searchsorted(bounds, low + np.flatnonzero(hits), "right") - 1)

  def verify(self) -> None:
    """Reads the whole file and checks its checksum; raises CorpusError if it differs."""
    digest = xxhash.xxh3_128()
    for piece in self.storage.pieces(self.path, _HEADER_BYTES, self.size - _HEADER_BYTES):
      digest.update(piece)
    if digest.hexdigest() != self.checksum:
      raise errors.CorpusError(
          f"The plan of packed rows {self.path} is damaged: bytes {_HEADER_BYTES} to {self.size}"
          f" have the checksum {digest.hexdigest()}, but the header says {self.checksum}."
          f" {_REBUILD}"
      )


def _table(bounds: np.ndarray, parts: np.ndarray) -> parts_lib.Parts:
  columns = (np.ascontiguousarray(parts[name]) for name in ("source", "first", "count"))
  return parts_lib.Parts(bounds, *columns)


def default_path(
    index_path: str | os.PathLike[str],
    index: index_lib.OlmoNpyIndex,
    rule: PackingRule,
    cache_dir: str = "",
) -> str:
  """Returns the default path of a plan, which differs between corpora, rules and cache files."""
  values: list[Any] = [index.fingerprint, dataclasses.asdict(rule)]
  if rule.ties == "cache":
    values.append(packed_cache.stamp(cache_dir, rule.row_length))
  digest = hashlib.sha256(json.dumps(values).encode()).hexdigest()
  return f"{os.fspath(index_path)}.packed-{digest[:16]}"


def load_plan(
    path: str | os.PathLike[str],
    index: index_lib.OlmoNpyIndex,
    rule: PackingRule,
    *,
    storage: Storage | None = None,
) -> PackedPlan:
  """Opens a plan and checks that it belongs to the corpus and the rule.

  Raises:
    CorpusError: The file is missing or damaged, or belongs to another corpus or rule.
  """
  path = os.fspath(path)
  storage = open_storage() if storage is None else storage
  size = storage.size(path)
  header = storage.read(path, 0, min(size, _HEADER_BYTES))
  try:
    values = json.loads(header)
    if values.pop("format") != _FORMAT or values.pop("header") != _digest_of(values):
      raise ValueError("it has another format, or its header was changed")
    values["rule"]["boundaries"] = document_spans.BoundaryRule(**values["rule"]["boundaries"])
    values["rule"] = PackingRule(**values["rule"])
    plan = PackedPlan(path=path, storage=storage, **values)
    needed = plan.size
  except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
    raise errors.CorpusError(
        f"{path} is not a plan of packed rows ({error}). {_REBUILD}"
    ) from error
  if size != needed:
    raise errors.CorpusError(
        f"The plan of packed rows {path} is damaged: expected {needed} bytes, found {size}."
        f" {_REBUILD}"
    )
  if plan.corpus != index.fingerprint or plan.num_files != len(index.files):
    raise errors.CorpusError(
        f"The plan of packed rows {path} belongs to another corpus: it was made for {plan.corpus},"
        f" but the index is {index.fingerprint}. {_REBUILD}"
    )
  if plan.rule != rule:
    raise errors.CorpusError(
        f"The plan of packed rows {path} was made with {plan.rule}, but this run has {rule}."
        f" {_REBUILD}"
    )
  if size <= _CHECKED_AT_OPENING:
    plan.verify()
  return plan


def build_plan(
    index: index_lib.OlmoNpyIndex,
    path: str | os.PathLike[str],
    rule: PackingRule,
    *,
    cache_dir: str = "",
    path_remap: Mapping[str, str] | None = None,
    workers: int | None = None,
    progress: bool = False,
    storage: Storage | None = None,
) -> PackedPlan:
  """Packs the documents of a corpus and writes the plan.

  Groups that are packed stay packed if this process is killed: the next call continues.

  Args:
    index: Index of the corpus, with its files in the order in which they are grouped.
    path: Local path of the plan, which is written atomically.
    rule: Rule to pack documents with.
    cache_dir: Directory of an OLMo-core run's cache files, if `rule.ties` is `cache`.
    path_remap: prefix → replacement, for paths that begin differently on this machine.
    workers: Number of groups that are packed at the same time; one per core by default.
    progress: Whether to show a progress bar.
    storage: Storage that holds the token files; local files by default.
  """
  path = os.fspath(path)
  options = WorkOptions(
      workers=workers, results=options_lib.default_results(path), retry_failed=True
  )
  outcome = pack_groups(
      index,
      rule,
      options,
      cache_dir=cache_dir,
      path_remap=path_remap,
      progress=progress,
      storage=storage,
  )
  plan = write_plan(index, path, rule, outcome)
  outcome.discard()
  return plan


def pack_groups(
    index: index_lib.OlmoNpyIndex,
    rule: PackingRule,
    options: WorkOptions,
    *,
    cache_dir: str = "",
    path_remap: Mapping[str, str] | None = None,
    progress: bool = False,
    storage: Storage | None = None,
) -> run_lib.Outcome:
  """Packs all groups of a corpus, or a part of them, on one machine or on many.

  Args:
    index: Index of the corpus, with its files in the order in which they are grouped.
    rule: Rule to pack documents with.
    options: How the work is done.
    cache_dir: Directory of an OLMo-core run's cache files, if `rule.ties` is `cache`.
    path_remap: prefix → replacement, for paths that begin differently on this machine.
    progress: Whether to show a progress bar.
    storage: Storage that holds the token files; opened per process by default.
  """
  document_spans.check_rule(rule.boundaries, index.token_dtype)
  work = packed_work.PackWork(rule, cache_dir, storage=storage)
  if work.cache is not None:  # Raises if there is none, before anything is read.
    logging.info("The packing is taken from %s.", cache_dir)
  sources = pieces_lib.source_files(index, path_remap=path_remap)
  return run_lib.run_work(
      work,
      packed_work.groups_of(sources, rule),
      options,
      fingerprint=index.fingerprint,
      description="Packing documents",
      progress=progress,
  )


def write_plan(
    index: index_lib.OlmoNpyIndex,
    path: str | os.PathLike[str],
    rule: PackingRule,
    outcome: run_lib.Outcome,
) -> PackedPlan:
  """Joins the packed groups and writes the plan.

  Args:
    index: Index of the corpus.
    path: Local path of the plan, which is written atomically.
    rule: Rule that the groups were packed with.
    outcome: What `pack_groups` returned, for all groups.

  Raises:
    CorpusError: Groups could not be packed, or are missing.
  """
  path = os.fspath(path)
  outcome.check("Documents cannot be packed")
  found = [
      (len(group["bounds"]) - 1, len(group["parts"]) // PART.itemsize, group["tokens"])
      for _, group in outcome
  ]
  counts = np.array(found, np.int64).reshape(len(found), 3)
  ends = np.concatenate([np.zeros((1, 3), np.int64), np.cumsum(counts, axis=0)])
  with atomic.atomic_writer(path) as file:
    file.write(b" " * _HEADER_BYTES)
    put, checksum = _checked_writer(file)
    put(ends[:, :2].T.astype("<i8").tobytes())
    for first_part, (_, group) in zip(ends[:-1, 1].tolist(), outcome):
      put((group["bounds"][:-1] + first_part).astype("<i8").tobytes())
    put(ends[-1:, 1].astype("<i8").tobytes())
    for _, group in outcome:
      put(group["parts"].tobytes())
    values: dict[str, Any] = {
        "corpus": index.fingerprint,
        "rule": dataclasses.asdict(rule),
        "num_files": len(index.files),
        "num_groups": len(counts),
        "num_rows": int(ends[-1, 0]),
        "num_parts": int(ends[-1, 1]),
        "num_tokens": int(ends[-1, 2]),
        "checksum": checksum(),
    }
    header = json.dumps({"format": _FORMAT, "header": _digest_of(values), **values}).encode()
    file.seek(0)
    file.write(header.ljust(_HEADER_BYTES - 1) + b"\n")
  return PackedPlan(path=path, **{**values, "rule": rule})


def _checked_writer(file: BinaryIO) -> tuple[Callable[[bytes], None], Callable[[], str]]:
  """Returns a function that writes bytes, and a function that returns their checksum so far."""
  digest = xxhash.xxh3_128()

  def put(data: bytes) -> None:
    digest.update(data)
    file.write(data)

  return put, digest.hexdigest


def _digest_of(values: dict[str, Any]) -> str:
  return xxhash.xxh3_64_hexdigest(json.dumps(values, sort_keys=True).encode())
