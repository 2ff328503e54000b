"""The dataset that `make_grain_llm_dataset` returns, and how its rows are made.

`RowDataset` is an `IterDataset` of rows. If its rows are random access (padded, or packed by a
plan), the attribute `rows` gives them by position, so that batches and mixtures need not stream. If
rows are packed as they stream, `open` returns the stream, for any number of worker processes.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import grain

from maxtext_olmo import grain_compat
from maxtext_olmo.corpus import source as source_lib
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.grain_llm import records as records_lib
from maxtext_olmo.grain_llm import rows_by_position
from maxtext_olmo.grain_llm import streams
from maxtext_olmo.grain_llm.records import Record
from maxtext_olmo.order import base
from maxtext_olmo.order import mixture as mixture_lib
from maxtext_olmo.rows import planned
from maxtext_olmo.rows import prefetch


@dataclasses.dataclass(frozen=True)
class RowInfo:
  """The properties of the rows of a dataset.

  Attributes:
    length: Number of tokens per row; None if rows are not padded.
    shard: `slice` if each host has its own rows, `batch` if all hosts share one stream and each
      takes its rows of every batch.
    packed: Whether rows are packed, split or filtered, so that the number of documents does not
      determine the number of rows.
    split: Whether a document may make more than one row.
    endless: Whether the rows have no end.
    host_rows: Number of rows of each host until the end; empty if unknown or without end.
    identity: Values that decide which row is at which position, for all hosts together; empty if
      unknown.
    version_1: Identity of each host in states of version 1.
    host: Index of this host in `version_1`.
  """

  length: int | None = None
  shard: str = "slice"
  packed: bool = False
  split: bool = False
  endless: bool = False
  host_rows: tuple[int, ...] = ()
  identity: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  version_1: tuple[str, ...] = ("",)
  host: int = 0


class RowDataset(grain.IterDataset[Record]):
  """Rows, one at a time, for `make_grain_multihost_iterator` or further Grain transformations.

  `mp_prefetch` gives the same rows, in the same order, with any number of workers. If rows are
  packed as they stream, each worker packs all rows and keeps its own.

  Args:
    info: Properties of the rows.
    rows: The rows, if they are random access.
    open_stream: Function that opens the stream, for rows without random access. Its arguments are
      the number of workers and the number of elements to prefetch.
  """

  def __init__(
      self,
      info: RowInfo,
      *,
      rows: rows_by_position.RowsByPosition | None = None,
      open_stream: Callable[[int, int], grain.IterDataset] | None = None,
  ):
    super().__init__()
    self.info = info
    self.rows = rows
    self._open_stream = open_stream
    self._slice: builtins.slice | None = None

  def open(self, workers: int = 0, ahead: int = 1) -> grain.IterDataset:
    """Returns the rows as a stream, which is the same for any number of worker processes."""
    if self._open_stream is not None:
      return self._open_stream(workers, ahead)
    return prefetch.PrefetchedDataset(self.rows, workers=workers, ahead=ahead)

  def slice(self, sl: builtins.slice) -> grain.IterDataset:
    """Returns a slice of the rows, like that of a list; indices count from the first row."""
    if self.rows is not None:
      return prefetch.PrefetchedDataset(self.rows.slice(sl))
    whole = RowDataset(self.info, open_stream=self._open_stream)
    return streams.SlicedStream(whole, sl)

  def set_slice(self, sl: builtins.slice, sequential_slice: bool = False) -> None:
    """Keeps only a slice of the rows; called by the workers of Grain's `mp_prefetch`."""
    del sequential_slice
    self._slice = sl

  def __iter__(self) -> grain.DatasetIterator[Record]:
    return iter(self.open() if self._slice is None else self.slice(self._slice))

  @property
  def _element_spec(self) -> dict[str, Any]:
    """The spec for `grain.experimental.get_element_spec`."""
    return records_lib.row_spec((self.info.length,))


def shard_bounds(count: int, host: int, hosts: int) -> tuple[int, int]:
  """Returns the bounds [start, end) of a host's contiguous share.

  If shares cannot be equal, the first hosts get one element more.
  """
  if hosts < 1 or not 0 <= host < hosts:
    raise ConfigError(f"There is no host {host} of {hosts}.")
  size, rest = divmod(count, hosts)
  start = host * size + min(host, rest)
  return start, start + size + (host < rest)


def window_of(source: Any, num_documents: int, bins: int, length: int) -> int:
  """Returns the number of documents that make about `bins` rows, given their mean length."""
  is_corpus = isinstance(source, source_lib.OlmoDocumentSource)
  tokens = source.documents.num_tokens if is_corpus else source.num_tokens
  return max(1, round(bins * length * num_documents / max(1, tokens)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowMaker:
  """Makes the rows that the arguments of `make_grain_llm_dataset` define.

  `hosts` is 1 if all hosts share one stream; `shift` is the `direction` of `records.shifted`.
  """

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
  shift: str | None
  eod_token_id: int
  pad: bool
  shard: str
  long_documents: str
  counts_path: str | None

  def make(self) -> RowDataset:
    """Makes the dataset; its rows are random access if they are padded or packed by a plan."""
    share, epochs = self._share(self.host), self.num_epochs
    host_rows: tuple[int, ...] = ()
    if not share and (epochs is None or self.packing == "planned"):
      raise ConfigError(
          f"Host {self.host} of {self.hosts} has no document to make rows of: there are only"
          f" {len(self.documents)} documents. Use fewer hosts, or shard='batch'."
      )
    rows: rows_by_position.RowsByPosition | None = None
    if self.packing == "planned":
      rows = rows_by_position.PlannedRecords(
          self._source,
          self._plan(self.host),
          self.length,
          shift=self.shift,
          eod_token_id=self.eod_token_id,
          num_epochs=epochs,
      )
      # Every host counts the rows of all hosts, so they agree without communicating.
      if epochs is not None and self.hosts > 1:
        host_rows = tuple(self._plan(host).count(epochs) for host in range(self.hosts))
    elif not self._packed:
      rows = rows_by_position.MapRows(
          self._records().map(self._to_row), len(share), self.length if self.pad else None
      )
      if epochs is not None:
        host_rows = tuple(epochs * len(self._share(host)) for host in range(self.hosts))
    info = RowInfo(
        length=self.length if self.pad or self.packing else None,
        shard=self.shard,
        packed=self._packed,
        split=self._split,
        endless=epochs is None,
        host_rows=host_rows,
        identity=self._identity(),
        version_1=tuple(map(self._identity_of_version_1, range(self.hosts))),
        host=self.host,
    )
    return RowDataset(info, rows=rows, open_stream=self._stream if rows is None else None)

  @property
  def _packed(self) -> bool:
    filters = grain.transforms.Filter
    return (
        self.packing is not None
        or self._split
        or any(isinstance(operation, filters) for operation in self.operations)
    )

  @property
  def _split(self) -> bool:
    flat_map = grain_compat.FlatMapTransform
    return self.long_documents == "split" or any(
        isinstance(operation, flat_map) for operation in self.operations
    )

  def _share(self, host: int) -> range:
    return range(*shard_bounds(len(self.documents), host, self.hosts))

  @property
  def _what(self) -> str:
    what = (
        repr(self.dataset) if hasattr(self.dataset, "read_parts") else type(self.dataset).__name__
    )
    return f"{what} of {len(self.documents)} documents"

  def _identity(self) -> dict[str, Any]:
    return {
        "documents": self._what,
        "order": self.order,
        "seed": self.seed,
        "hosts": f"{self.hosts} with a share each" if self.hosts > 1 else "any",
        "packing": self.packing or "none",
        "row_length": self.length,
        "bins": self.bins if self.packing else None,
        "long_documents": self.long_documents,
    }

  def _identity_of_version_1(self, host: int) -> str:
    """Returns a text that identifies a host's rows, in states of version 1 and in stored counts."""
    fields = [
        self._what,
        f"{self.order} {self.seed}",
        f"host {host} of {self.hosts}" if self.hosts > 1 else "all hosts",
        f"{self.packing or 'unpacked'} rows of {self.length}",
        f"bins {self.bins}" if self.packing else "",
        f"long documents {self.long_documents}",
    ]
    return ", ".join(filter(None, fields))

  def _make_order(self, host: int) -> base.Order:
    share = self._share(host)
    text = f"{self.seed}\x1f{host}\x1f{self.hosts}"
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
    return mixture_lib.RangesOrder(
        mixture_lib.Ranges([(share.start, share.stop)]), self.order, seed
    )

  def _records(self) -> grain.MapDataset:
    """Returns this host's documents, in order, epoch after epoch, as records."""
    if not self._share(self.host):
      return self.documents.slice(slice(0, 0))
    order = self._make_order(self.host)
    ordered = rows_by_position.OrderedDataset(self.documents, order, self.num_epochs)
    return ordered.seed(self.seed).apply(self.operations).map(records_lib.record_of)

  @property
  def _to_row(self) -> Callable[[Record], Record]:
    return functools.partial(
        records_lib.to_row,
        length=self.length,
        long_documents=self.long_documents,
        pad=self.pad,
        shift=self.shift,
        eod_token_id=self.eod_token_id,
    )

  def _stream(self, workers: int, ahead: int) -> grain.IterDataset:
    documents = prefetch.PrefetchedDataset(
        self._records(), workers=workers, ahead=max(ahead, 2 * self.bins) if workers else ahead
    )
    if self.packing != "concat_then_split" or self.long_documents != "split":
      documents = grain_compat.FlatMapIterDataset(
          documents, records_lib.SplitDocuments(self.length, self.long_documents)
      )
    if self.packing is None:
      return documents.map(self._to_row)
    rows = records_lib.pack_stream(
        documents,
        self.packing,
        length=self.length,
        bins=self.bins,
        shuffle=self.order != "sequential",
        seed=self.seed % (1 << 32),
        masks=self._masks(),
    )
    return rows.map(
        functools.partial(records_lib.shifted, direction=self.shift, eod_token_id=self.eod_token_id)
    )

  def _masks(self) -> tuple[str, ...]:
    """Returns the sides for which records have their own segmentation.

    The first record that is not filtered out decides for all records.
    """
    records = self.documents.seed(self.seed).apply(self.operations)
    for number in range(len(records)):
      element = records[number]
      if element is None:
        continue
      record = records_lib.record_of(element)
      return tuple(side for side in records_lib.SIDES if f"{side}_segmentation" in record)
    return ()

  @functools.cached_property
  def _source(self) -> source_lib.OlmoDocumentSource | rows_by_position.RecordParts:
    # A corpus knows the lengths of its documents and reads parts of them; otherwise, whole records
    # are read.
    is_corpus = isinstance(self.dataset, source_lib.OlmoDocumentSource)
    if is_corpus and not self.operations:
      return self.dataset
    return rows_by_position.RecordParts(self.documents.seed(self.seed).apply(self.operations))

  def _plan(self, host: int) -> planned.PackingPlan:
    return planned.PackingPlan(
        self._source.lengths,
        self._make_order(host),
        identity=self._identity_of_version_1(self.host),
        row_length=self.length,
        window=window_of(self._source, len(self.documents), self.bins, self.length),
        long_documents=self.long_documents,
        counts_path=self.counts_path,
    )
