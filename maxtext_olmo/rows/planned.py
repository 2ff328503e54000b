"""Planned packing: random access to rows of packed documents, without packing all earlier rows.

The packing plan says which parts of which documents are in row k. The number of rows depends on how
the documents of an epoch fit together, so it is unknown until the rows are counted.

The documents of an epoch, in their shuffled order, are divided into windows, and each window is
packed separately:

    order of the epoch    d7 d2 d9 d4 | d0 d8 d1 d5 | d3 d6
    window                0           | 1           | 2
    rows of a window      3           | 2           | 1          → row 4 is row 1 of window 1

So finding row k takes a bisection over the row counts and the packing of one window. Within a
window, rows are in random order. The parts of a row are in the order of their documents, so the
longest part is not always first.

Rows are counted by packing one window after another, as far as needed. If a path is given, a thread
counts ahead and stores the counts in a file, so that a run that resumes in the middle of an epoch
starts immediately.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import os
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from absl import logging

from maxtext_olmo import atomic
from maxtext_olmo.corpus import documents as documents_lib
from maxtext_olmo.corpus import storage as storage_lib
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.errors import OrderError
from maxtext_olmo.order import base
from maxtext_olmo.order import feistel
from maxtext_olmo.rows import packing
from maxtext_olmo.rows import parts as parts_lib
from maxtext_olmo.rows import row_source
from maxtext_olmo.rows import segments

_CACHED_WINDOWS = 4
_SECONDS_BETWEEN_WRITES = 20.0


class PackingPlan:
  """Maps the rows of an epoch to parts of documents.

  Args:
    lengths: Function that returns the lengths of documents, given their numbers.
    order: Order of the documents of each epoch.
    identity: Text that identifies the documents, so that counts of other documents are never used.
    row_length: Number of tokens per row.
    window: Number of documents that are packed together.
    long_documents: Handling of documents longer than a row: `truncate`, `split` or `error`.
    locate: Function that returns the file and the first token of documents, given their numbers.
      None treats documents as records, which are read from token 0.
    counts_path: Prefix of the paths of the stored row counts; None does not store them.
    writes_counts: Whether this process writes the counts. One process per file is enough; the
      others only read them.
  """

  def __init__(
      self,
      lengths: Callable[[np.ndarray], np.ndarray],
      order: base.Order,
      *,
      identity: str,
      row_length: int,
      window: int,
      long_documents: str = "split",
      locate: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]] | None = None,
      counts_path: str | None = None,
      writes_counts: bool = True,
  ):
    packing.check_long_documents(long_documents)
    self._lengths = lengths
    self._locate = locate
    self._order = order
    self._row_length = row_length
    self._window = min(window, order.num_instances)
    self._long_documents = long_documents
    self.num_documents = order.num_instances
    self.num_windows = -(-order.num_instances // self._window)
    self.identity = (
        f"{identity}, {order.name} {order.seed}, rows of {row_length}, windows of {self._window},"
        f" {long_documents}"
    )
    digest = hashlib.sha256(self.identity.encode()).hexdigest()[:16]
    self._counts_path = None if counts_path is None else f"{counts_path}.{digest}"
    self._writes_counts = writes_counts
    self._make_caches()

  def _make_caches(self) -> None:
    self._lock = threading.RLock()
    self._packed: collections.OrderedDict[tuple[int, int], parts_lib.Parts] = (
        collections.OrderedDict()
    )
    self._ends: dict[int, list[int]] = (
        {}
    )  # For each epoch, the number of rows up to the end of each window counted so far.
    self._counting: set[int] = set()
    self._closed = threading.Event()

  def __getstate__(self) -> dict[str, Any]:
    caches = ("_lock", "_packed", "_ends", "_counting", "_closed")
    return {name: value for name, value in self.__dict__.items() if name not in caches}

  def __setstate__(self, state: dict[str, Any]) -> None:
    self.__dict__.update(state)
    self._make_caches()

  def parts(self, epoch: int, rows: np.ndarray) -> parts_lib.Parts:
    """Returns the parts of rows of an epoch; counts the epoch's rows as far as needed."""
    ends = np.array(self._counted(epoch, int(rows.max(initial=-1))), np.int64)
    numbers = np.searchsorted(ends, rows, side="right")
    tables, places = [], []
    for number in np.unique(numbers).tolist():
      here = np.flatnonzero(numbers == number)
      first = int(ends[number - 1]) if number else 0
      tables.append(self.window(epoch, number).take(rows[here] - first))
      places.append(here)
    return tables[0] if len(tables) == 1 else parts_lib.join(tables, places, len(rows))

  def rows_of(
      self, epoch: int, documents: np.ndarray, source: int, first: int, count: int
  ) -> np.ndarray:
    """Returns the rows of an epoch that contain tokens from a range of a file.

    Args:
      epoch: Epoch to search.
      documents: Documents that overlap the range.
      source: File of the range.
      first: First token of the range.
      count: Number of tokens of the range.
    """
    places = self._order.places(epoch, documents)
    found = [np.zeros(0, np.int64)]
    for number in np.unique(places[places >= 0] // self._window).tolist():
      table = self.window(epoch, number)
      hits = (table.source == source) & (table.first < first + count)
      hits &= table.first + table.count > first
      ends = self._counted(epoch, None, number)
      found.append(np.unique(table.row[hits]) + (ends[number - 1] if number else 0))
    return np.sort(np.concatenate(found))

  def window(self, epoch: int, number: int) -> parts_lib.Parts:
    """Returns the rows of a window; caches the last few windows."""
    with self._lock:
      found = self._packed.get((epoch, number))
      if found is not None:
        self._packed.move_to_end((epoch, number))
        return found
    found = self._pack(epoch, number)
    with self._lock:
      self._packed[epoch, number] = found
      while len(self._packed) > _CACHED_WINDOWS:
        self._packed.popitem(last=False)
    return found

  def num_rows(self, epoch: int) -> int | None:
    """Returns the number of rows of an epoch, or None while they have not all been counted."""
    ends = self._known(epoch)
    return ends[-1] if len(ends) == self.num_windows else None

  def count_rows(self, epoch: int, row: int) -> int:
    """Counts the rows of an epoch until `row` is counted or the epoch ends; returns the count."""
    return self._counted(epoch, row)[-1]

  def count(self, epochs: int) -> int:
    """Counts all rows of the first `epochs` epochs, and returns their number."""
    return sum(self._counted(epoch, None)[-1] for epoch in range(epochs))

  def count_in_background(self, epoch: int) -> threading.Thread | None:
    """Starts a thread that counts an epoch's rows; returns None if that is under way or done."""
    with self._lock:
      if epoch in self._counting or len(self._known(epoch)) == self.num_windows:
        return None
      self._counting.add(epoch)
      if self._closed.is_set():
        self._closed = threading.Event()
      closed = self._closed
    thread = threading.Thread(
        target=self._count_and_write,
        args=(epoch, closed),
        name=f"packing plan {epoch}",
        daemon=True,
    )
    thread.start()
    return thread

  def count_ahead(self, position: int, epochs: int | None) -> None:
    """Counts the rows of a position's epoch and of the next epoch in the background."""
    epoch = 0
    while (rows := self.num_rows(epoch)) and position >= rows:
      position -= rows
      epoch += 1
    for ahead in (epoch, epoch + 1):
      if epochs is None or ahead < epochs:
        self.count_in_background(ahead)

  def close(self) -> None:
    """Stops counting in the background."""
    self._closed.set()

  def _count_and_write(self, epoch: int, closed: threading.Event) -> None:
    try:
      self._count_until(epoch, closed)
      self._write(epoch)
    except CorpusError as error:
      # A caller that requests a row of that window gets the same error.
      logging.warning("The rows of the packing plan cannot be counted: %s", error)
    finally:
      with self._lock:
        self._counting.discard(epoch)

  def _count_until(self, epoch: int, closed: threading.Event) -> None:
    written = time.monotonic()
    while not closed.is_set():
      with self._lock:
        ends = self._known(epoch)
        number = len(ends)
      if number == self.num_windows:
        return
      self._append(epoch, number, self._pack(epoch, number).num_rows)
      if time.monotonic() - written > _SECONDS_BETWEEN_WRITES:
        self._write(epoch)
        written = time.monotonic()

  def _counted(self, epoch: int, row: int | None, windows: int | None = None) -> list[int]:
    """Returns the end row of each counted window of an epoch, after counting as far as needed.

    Counting stops once the window that contains `row` is counted, once `windows` windows are
    counted, or at the end of the epoch.
    """
    while True:
      with self._lock:
        ends = self._known(epoch)
        if len(ends) == self.num_windows or (row is not None and ends and ends[-1] > row):
          return ends
        if windows is not None and len(ends) >= windows:
          return ends
        number = len(ends)
      self._append(epoch, number, self.window(epoch, number).num_rows)

  def _append(self, epoch: int, number: int, rows: int) -> None:
    with self._lock:
      ends = self._ends[epoch]
      # A second thread may have counted this window in the meantime.
      if len(ends) == number:
        ends.append((ends[-1] if ends else 0) + rows)

  def _known(self, epoch: int) -> list[int]:
    with self._lock:
      if epoch not in self._ends:
        self._ends[epoch] = self._read(epoch)
      return self._ends[epoch]

  def _pack(self, epoch: int, number: int) -> parts_lib.Parts:
    first = number * self._window
    places = np.arange(first, min(first + self._window, self._order.num_instances))
    documents = self._order.ids(epoch, places)
    lengths = self._lengths(documents)
    documents, starts, lengths = self._parts(documents, lengths)
    bins, count = packing.best_fit(lengths, self._row_length)
    if count:
      bins = feistel.Bijection(count, "rows", self._order.seed, epoch, number)(bins)
    order = np.argsort(bins, kind="stable")  # Stable, to keep the order of documents within a row.
    documents, starts, lengths = documents[order], starts[order], lengths[order]
    sources, firsts = (documents, 0) if self._locate is None else self._locate(documents)
    bounds = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(bins, minlength=count), out=bounds[1:])
    return parts_lib.Parts(
        bounds, sources.astype(np.int32), firsts + starts, lengths.astype(np.int32)
    )

  def _parts(
      self, documents: np.ndarray, lengths: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cuts documents into parts that fit a row; an empty document has no parts."""
    length = self._row_length
    if self._long_documents == "error" and lengths.max(initial=0) > length:
      worst = int(np.argmax(lengths))
      raise CorpusError(
          f"Document {documents[worst]} has {lengths[worst]} tokens, but a row holds {length}. Set"
          " long_documents (olmo_long_documents in a config): 'truncate' drops the rest, 'split'"
          " divides the document."
      )
    if self._long_documents == "truncate":
      lengths = np.minimum(lengths, length)
    pieces = -(-lengths // length)
    which = np.repeat(np.arange(len(documents)), pieces)
    within = np.arange(len(which)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = within * length
    return documents[which], starts, np.minimum(lengths[which] - starts, length)

  def _file(self, epoch: int) -> str:
    return f"{self._counts_path}.epoch-{epoch}.rows"

  def _write(self, epoch: int) -> None:
    if self._counts_path is None or not self._writes_counts:
      return
    with self._lock:
      if len(self._read(epoch)) >= len(self._known(epoch)):
        return  # Another process has stored them.
      counts = np.diff(np.array(self._known(epoch), np.int64), prepend=0).astype("<u4").tobytes()
    header = {"identity": self.identity, "epoch": epoch, "crc32": zlib.crc32(counts)}
    try:
      atomic.write_atomically(self._file(epoch), json.dumps(header).encode() + b"\n" + counts)
    except OSError as error:
      logging.warning(
          "The row counts of the packing plan cannot be stored in %s (%s): a resume in the middle"
          " of an epoch will have to count all earlier rows of that epoch again.",
          self._file(epoch),
          error,
      )

  def _read(self, epoch: int) -> list[int]:
    """Returns the stored counts, which may not cover the whole epoch."""
    if self._counts_path is None or not os.path.exists(self._file(epoch)):
      return []
    try:
      head, counts = storage_lib.LocalStorage().read(self._file(epoch)).split(b"\n", 1)
      expected = {"identity": self.identity, "epoch": epoch, "crc32": zlib.crc32(counts)}
      if json.loads(head) != expected:
        raise ValueError("its checksum or identity does not match")
    except (OSError, ValueError, RecursionError) as error:
      logging.warning("%s is not used (%s); its rows are counted again.", self._file(epoch), error)
      return []
    return np.cumsum(np.frombuffer(counts, "<u4").astype(np.int64)).tolist()


@dataclasses.dataclass(frozen=True)
class PlannedRows(row_source.RowSourceDefaults):
  """Rows of packed documents; each document, or piece of a document, is a segment.

  Attributes:
    plan: Packing plan, which says which documents are in which row.
    row_length: Number of tokens per row.
    fingerprint: Fingerprint of the corpus.
    segment_rule: Rule for where segments begin.
    documents: Document index, which `rows_of` needs to find the documents of a file.
  """

  block_rows: ClassVar[int] = 1024
  packs_for_all_hosts: ClassVar[bool] = True  # A plan packs whole windows of documents.

  plan: PackingPlan
  row_length: int
  fingerprint: str
  segment_rule: segments.SegmentRule = segments.SegmentRule("part")
  documents: documents_lib.DocumentIndex | None = None

  def num_rows(self, epoch: int) -> int | None:
    """Returns the number of rows of an epoch; None until all rows have been counted."""
    return self.plan.num_rows(epoch)

  def count_rows(self, epoch: int, row: int) -> int:
    """Counts the rows of an epoch until `row` is counted or the epoch ends; returns the count."""
    return self.plan.count_rows(epoch, row)

  def parts(self, epoch: int, rows: np.ndarray) -> parts_lib.Parts:
    """Returns the parts of rows of an epoch."""
    return self.plan.parts(epoch, rows)

  def rows_of(self, epoch: int, source: int, first: int, count: int) -> np.ndarray:
    """Returns the rows of an epoch that contain tokens from a range of a file."""
    if self.documents is None:
      raise OrderError("These rows have no document index, so they cannot be searched.")
    found = self.documents.within(source, first, count)
    return self.plan.rows_of(epoch, found, source, first, count)

  def look_ahead(self, position: int, num_epochs: int | None = None) -> None:
    """Counts the rows of a position's epoch and of the next epoch in the background."""
    self.plan.count_ahead(position, num_epochs)

  def close(self) -> None:
    """Stops counting in the background."""
    self.plan.close()
