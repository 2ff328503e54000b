"""The plan of packed rows: which documents make up each row, as OLMo-core packs them.

Files are divided into groups of `group_size`, and each group is packed by itself:

    documents of a group    truncated to the row length, or split into pieces of it
    order                   longest first; equally long ones in one of the orders of `tie_order`
    best fit                each into the row with the least room that is enough; of several, the
                            one that has had this room for the longest time; else into a new row
    rows                    in the order in which they were opened, group after group

The plan is a sidecar file. Its JSON header takes the first 4096 bytes, and has a checksum of the
rest:

    groups   int64, 2 x (groups + 1)   the first row and the first part of each group, and the ends
    bounds   int64, rows + 1           where the parts of each row begin
    parts    16 bytes each             first token (int64), file (int32), number of tokens (int32)

Opening it reads the header, and a row costs two small reads: neither grows with the plan. Groups
are packed in parallel, each in the memory of its own documents.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import numpy as np
import xxhash

from maxtext_olmo import atomic
from maxtext_olmo import errors
from maxtext_olmo.cores import available_cores
from maxtext_olmo.corpus import document_spans
from maxtext_olmo.corpus import file_array
from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.corpus import scan
from maxtext_olmo.corpus import token_files
from maxtext_olmo.corpus.storage import LocalStorage
from maxtext_olmo.corpus.storage import Storage
from maxtext_olmo.corpus.storage import open_storage
from maxtext_olmo.progress import progress_bar
from maxtext_olmo.rows import packed_cache
from maxtext_olmo.rows import packed_group
from maxtext_olmo.rows import parts as parts_lib

_FORMAT = "maxtext-olmo packed rows 1"
_HEADER_BYTES = 4096
# Plans up to this size are checked completely when they are opened; larger ones by `verify`.
_CHECKED_AT_OPENING = 64 << 20
_REBUILD = "Delete it; the next start of the run builds it again."
PART = np.dtype([("first", "<i8"), ("source", "<i4"), ("count", "<i4")])


@dataclasses.dataclass(frozen=True)
class PackingRule:
  """Everything apart from the corpus that decides how documents are packed.

  Attributes:
    row_length: Number of tokens per row.
    group_size: Number of files that are packed together.
    long_documents: What happens to documents longer than a row: `truncate` or `split`.
    ties: Order of equally long documents (`tie_order.TIES`), or `cache`: as in a run's own files.
    boundaries: Where documents begin and end.
  """

  row_length: int
  group_size: int
  long_documents: str
  ties: str
  boundaries: document_spans.BoundaryRule


@dataclasses.dataclass(frozen=True)
class PackedPlan:
  """An open plan.

  Attributes:
    path: Path of the sidecar file.
    corpus: Fingerprint of the corpus.
    rule: How documents were packed.
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
    """Identifies the rows: the corpus, the rule with the order of ties, and the result."""
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
    """The first row and the first part of each group, and the ends (2, groups + 1)."""
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

  Args:
    index: Index of the corpus, with its files in the order in which they are grouped.
    path: Local path of the plan, which is written atomically.
    rule: How documents are packed.
    cache_dir: With the ties `cache`, the directory of the cache files of a run of OLMo-core.
    path_remap: prefix → replacement, for paths that begin differently on this machine.
    workers: Number of groups that are packed at the same time; one per core by default.
    progress: Whether to show a progress bar.
    storage: Storage that holds the token files; local files by default.
  """
  path = os.fspath(path)
  document_spans.check_rule(rule.boundaries, index.token_dtype)
  files = token_files.TokenFiles.of_index(index, path_remap=path_remap, storage=storage)
  cache = packed_cache.PackedCache(cache_dir, rule.row_length) if rule.ties == "cache" else None
  total = sum(entry.n_tokens for entry in index.files) * index.token_dtype.itemsize
  num_groups = -(-len(index.files) // rule.group_size)
  with atomic.write_errors(path):
    folder = tempfile.TemporaryDirectory(
        prefix=".packed_", dir=os.path.dirname(path) or ".", ignore_cleanup_errors=True
    )
  with folder as name:
    with progress_bar("Packing documents", total, enabled=progress, unit="bytes") as advance:

      def pack(group: int) -> tuple[int, int, int]:
        numbers = range(
            group * rule.group_size, min((group + 1) * rule.group_size, len(index.files))
        )
        documents = packed_group.find_documents(index, files, numbers, rule.boundaries, advance)
        cut = packed_group.cut(documents, rule.row_length, rule.long_documents)
        if cache is not None:
          table = cache.pack(cut, group)
        else:
          table = packed_group.pack(cut, rule.row_length, rule.ties)
        parts = np.empty(len(table.source), PART)
        parts["first"], parts["source"], parts["count"] = table.first, table.source, table.count
        with atomic.write_errors(path):
          table.bounds.astype("<i8").tofile(_temporary(name, group, "bounds"))
          parts.tofile(_temporary(name, group, "parts"))
        return table.num_rows, len(parts), int(table.count.sum(dtype=np.int64))

      workers = workers or available_cores()
      results, problems = scan.map_files(pack, num_groups, workers=workers, block=1)
    found = scan.all_or_error(results, problems, "Documents cannot be packed")
    counts = np.array(found, np.int64).reshape(num_groups, 3)
    return _assemble(path, name, index, rule, counts)


def _assemble(
    path: str, folder: str, index: index_lib.OlmoNpyIndex, rule: PackingRule, counts: np.ndarray
) -> PackedPlan:
  """Joins the temporary files of the groups, given the rows, parts and tokens of each."""
  ends = np.concatenate([np.zeros((1, 3), np.int64), np.cumsum(counts, axis=0)])
  with atomic.atomic_writer(path) as file:
    file.write(b" " * _HEADER_BYTES)
    put, checksum = _checked_writer(file)
    put(ends[:, :2].T.astype("<i8").tobytes())
    for group, first_part in enumerate(ends[:-1, 1].tolist()):
      bounds = np.frombuffer(LocalStorage().read(_temporary(folder, group, "bounds")), "<i8")
      put((bounds[:-1] + first_part).astype("<i8").tobytes())
    put(ends[-1:, 1].astype("<i8").tobytes())
    for group in np.flatnonzero(counts[:, 1]).tolist():
      for piece in LocalStorage().pieces(_temporary(folder, group, "parts")):
        put(piece)
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
  """Returns a function that writes bytes, and one that returns the checksum of all of them."""
  digest = xxhash.xxh3_128()

  def put(data: bytes) -> None:
    digest.update(data)
    file.write(data)

  return put, digest.hexdigest


def _temporary(folder: str, group: int, what: str) -> str:
  return os.path.join(folder, f"{group}.{what}")


def _digest_of(values: dict[str, Any]) -> str:
  return xxhash.xxh3_64_hexdigest(json.dumps(values, sort_keys=True).encode())
