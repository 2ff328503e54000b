"""How `make_grain_llm_dataset` makes rows: padded, packed as they come, or packed by a plan."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from typing import Any

import grain

from maxtext_olmo.corpus import source as source_lib
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.grain_llm import records as records_lib
from maxtext_olmo.grain_llm import row_dataset
from maxtext_olmo.grain_llm import row_source
from maxtext_olmo.order import base
from maxtext_olmo.order import mixture as mixture_lib
from maxtext_olmo.rows import packing as packing_lib
from maxtext_olmo.rows import planned
from maxtext_olmo.rows import prefetch


def shard_bounds(count: int, host: int, hosts: int) -> tuple[int, int]:
  """Returns the bounds [start, end) of a host's contiguous share.

  If shares cannot be equal, the first hosts get one element more.
  """
  if hosts < 1 or not 0 <= host < hosts:
    raise ConfigError(f"There is no host {host} of {hosts}.")
  size, rest = divmod(count, hosts)
  start = host * size + min(host, rest)
  return start, start + size + (host < rest)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowMaker:
  """The arguments of `make_grain_llm_dataset`; `hosts` is 1 if all hosts share one stream."""

  dataset: Any
  documents: grain.MapDataset
  operations: tuple[Any, ...]
  host: int
  hosts: int
  order: str
  seed: int
  num_epochs: int | None
  length: int
  packing: str | None
  bins: int
  shift: row_source.Shift
  pad: bool
  shard: str
  long_documents: str
  counts_path: str | None

  def __post_init__(self):
    start, end = self._bounds(self.host)
    if start == end and (self.num_epochs is None or self.packing == "planned"):
      raise ConfigError(
          f"Host {self.host} of {self.hosts} has no document to make rows of: there are only"
          f" {len(self.documents)}. Use fewer hosts, or shard='batch'."
      )

  def _bounds(self, host: int) -> tuple[int, int]:
    return shard_bounds(len(self.documents), host, self.hosts)

  def make(self) -> row_dataset.RowDataset:
    """Makes the rows: random access if their number follows from the lengths of the documents."""
    if self.packing == "planned":
      info = self._info(self._planned_rows_of_hosts())
      return row_dataset.RowDataset(info, rows=self._planned())
    streams = self.packing is not None or self.long_documents == "split" or self._filters
    if streams:
      return row_dataset.RowDataset(self._info(), open_stream=self._stream)
    to_row = row_dataset.ToRow(self.length, self.long_documents, self.pad, self.shift)
    shares = [end - start for start, end in map(self._bounds, range(self.hosts))]
    epochs = self.num_epochs
    return row_dataset.RowDataset(
        self._info(() if epochs is None else tuple(epochs * share for share in shares)),
        rows=row_source.MapRows(
            self._records().map(to_row),
            shares[self.host],
            self.length if self.pad else None,
        ),
    )

  @property
  def _filters(self) -> bool:
    kinds = (grain.transforms.Filter, grain.experimental.FlatMapTransform)
    return any(isinstance(operation, kinds) for operation in self.operations)

  def _info(self, host_rows: tuple[int, ...] = ()) -> row_dataset.RowInfo:
    packed = self.packing is not None or self.long_documents == "split"
    return row_dataset.RowInfo(
        length=self.length if self.pad or self.packing else None,
        shard=self.shard,
        packed=packed or self._filters,
        endless=self.num_epochs is None,
        host_rows=host_rows,
        identity=self._identity(),
        version_1=tuple(map(self._identity_of_version_1, range(self.hosts))),
        host=self.host,
    )

  @property
  def _what(self) -> str:
    dataset = self.dataset
    return repr(dataset) if hasattr(dataset, "read_parts") else type(dataset).__name__

  def _identity(self) -> dict[str, Any]:
    return {
        "documents": f"{self._what} of {len(self.documents)} documents",
        "order": self.order,
        "seed": self.seed,
        "hosts": f"{self.hosts} with a share each" if self.hosts > 1 else "any",
        "packing": self.packing or "none",
        "row_length": self.length,
        "bins": self.bins if self.packing else None,
        "long_documents": self.long_documents,
    }

  def _identity_of_version_1(self, host: int) -> str:
    """Returns what states of version 1, and the counts of a plan, name a host's rows by."""
    fields = [
        f"{self._what} of {len(self.documents)} documents",
        f"{self.order} {self.seed}",
        f"host {host} of {self.hosts}" if self.hosts > 1 else "all hosts",
        f"{self.packing or 'unpacked'} rows of {self.length}",
        f"bins {self.bins}" if self.packing else "",
        f"long documents {self.long_documents}",
    ]
    return ", ".join(filter(None, fields))

  def _make_order(self, start: int, end: int, host: int) -> base.Order:
    text = f"{self.seed}\x1f{host}\x1f{self.hosts}"
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
    return mixture_lib.RangesOrder(mixture_lib.Ranges([(start, end)]), self.order, seed)

  def _records(self) -> grain.MapDataset:
    """Returns this host's documents, in order, epoch after epoch, as records."""
    start, end = self._bounds(self.host)
    if start == end:
      return self.documents.slice(slice(0, 0))
    order = self._make_order(start, end, self.host)
    ordered = row_source.OrderedDataset(self.documents, order, self.num_epochs)
    return ordered.seed(self.seed).apply(self.operations).map(row_dataset.ToRecord())

  def _stream(self, workers: int, ahead: int) -> grain.IterDataset:
    documents = prefetch.PrefetchedDataset(
        self._records(), workers=workers, ahead=max(ahead, 2 * self.bins) if workers else ahead
    )
    if self.packing != "concat_then_split" or self.long_documents != "split":
      documents = grain.experimental.FlatMapIterDataset(
          documents, row_dataset.SplitDocuments(self.length, self.long_documents)
      )
    if self.packing is None:
      return documents.map(
          row_dataset.ToRow(self.length, self.long_documents, self.pad, self.shift)
      )
    rows = packing_lib.pack_stream(
        documents,
        self.packing,
        length=self.length,
        bins=self.bins,
        shuffle=self.order != "sequential",
        seed=self.seed % (1 << 32),
        masks=self._masks(),
    )
    return rows.map(row_dataset.ShiftRow(self.shift))

  def _masks(self) -> tuple[str, ...]:
    """Returns the sides for which records have a segmentation of their own.

    The first record that is not filtered out decides for all.
    """
    for element in self.documents.seed(self.seed).apply(self.operations):
      record = records_lib.record_of(element)
      return tuple(side for side in records_lib.SIDES if f"{side}_segmentation" in record)
    return ()

  @functools.cached_property
  def _source(self) -> Any:
    # A corpus knows the lengths of its documents and reads parts of them; else, records are read.
    is_corpus = isinstance(self.dataset, source_lib.OlmoDocumentSource)
    if is_corpus and not self.operations:
      return self.dataset
    return row_source.RecordParts(self.documents.seed(self.seed).apply(self.operations))

  def _planned(self) -> row_source.PlannedRows:
    return row_source.PlannedRows(
        self._source,
        self._plan(self.host),
        self.length,
        shift=self.shift,
        num_epochs=self.num_epochs,
    )

  def _plan(self, host: int) -> planned.PackingPlan:
    start, end = self._bounds(host)
    return planned.PackingPlan(
        self._source.lengths,
        self._make_order(start, end, host),
        identity=self._identity_of_version_1(self.host),
        row_length=self.length,
        window=window_of(self._source, len(self.documents), self.bins, self.length),
        long_documents=self.long_documents,
        counts_path=self.counts_path,
    )

  def _planned_rows_of_hosts(self) -> tuple[int, ...]:
    """Returns the rows of each host if hosts have documents of their own and these end.

    Every host counts the rows of all, so they agree without talking.
    """
    if self.num_epochs is None or self.hosts == 1:
      return ()
    return tuple(self._plan(host).count(self.num_epochs) for host in range(self.hosts))


def window_of(source: Any, num_documents: int, bins: int, length: int) -> int:
  """Returns how many documents make about `bins` rows, judged by their mean length."""
  if isinstance(source, source_lib.OlmoDocumentSource):
    tokens = source.documents.num_tokens
  else:
    tokens = source.num_tokens
  return max(1, round(bins * length * num_documents / max(1, tokens)))
