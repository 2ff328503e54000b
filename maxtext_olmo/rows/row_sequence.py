"""The rows of a source in sequence, for sources such as packing plans that count rows on demand.

Rows are counted only as far as needed:

    epoch 0 has 3 rows, epoch 1 has 4        position   0  1  2  3  4  5  6  7
    epoch 2 is not counted yet               epoch      0  0  0  1  1  1  1  2
                                             row        0  1  2  0  1  2  3  0
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from maxtext_olmo import errors
from maxtext_olmo.order import base
from maxtext_olmo.order import epochs as epochs_lib
from maxtext_olmo.rows import row_source

# A position that lies more epochs ahead than this is a mistake; counting the rows up to it would
# take minutes.
_MOST_EPOCHS_AT_ONCE = 10_000


class RowSequence:
  """The rows of a source in sequence, or in an order, epoch after epoch.

  Args:
    source: Source of the rows.
    name: Name of the order, which is part of the stream's identity.
    seed: Seed of the run.
    num_epochs: Number of epochs until the end; None for an endless stream.
    order: Order of the rows of an epoch; None takes rows in sequence.
    documents: Text that identifies the documents in the rows. It is needed if document boundaries
      come from other files, and empty if the fingerprint of the corpus identifies the documents.
  """

  history: tuple[()] = ()

  def __init__(
      self,
      source: row_source.RowSource,
      *,
      name: str,
      seed: int,
      num_epochs: int | None = None,
      order: base.Order | None = None,
      documents: str = "",
  ):
    self.source = source
    self.name = name
    self.seed = seed
    self.num_epochs = num_epochs
    self.order = order
    self.documents = documents

  @property
  def fingerprint(self) -> str:
    """The fingerprint of the data."""
    return self.source.fingerprint

  @property
  def sequence_length(self) -> int:
    """Tokens per row."""
    return self.source.row_length

  @property
  def endless(self) -> bool:
    """True if the stream has no end."""
    return self.num_epochs is None

  @property
  def num_positions(self) -> int | None:
    """The number of rows until the end; None if there is no end, or rows are not counted yet."""
    if self.num_epochs is None:
      return None
    if self.order is not None:
      return self.order.epochs.start(self.num_epochs)
    total = 0
    for epoch in range(self.num_epochs):
      rows = self.source.num_rows(epoch)
      if rows is None:
        return None
      total += rows
    return total

  @property
  def epochs(self) -> epochs_lib.Epochs | None:
    """The lengths of epochs; None if rows are counted on demand."""
    return None if self.order is None else self.order.epochs

  @property
  def drops_tails(self) -> bool:
    """True if a batch that would cross the end of an epoch starts at the next epoch instead."""
    return self.order is not None and self.order.drops_tails

  @property
  def batch_epochs(self) -> epochs_lib.Epochs | None:
    """The epochs whose ends no batch crosses; None if batches may span epochs."""
    return self.epochs if self.drops_tails else None

  def identity(self) -> dict[str, Any]:
    """Returns the values that decide which row is at which position."""
    identity = {"fingerprint": self.fingerprint, "order": self.name, "seed": self.seed}
    return {**identity, "documents": self.documents} if self.documents else identity

  def has(self, position: int) -> bool:
    """Returns whether there is a row at a position; counts rows as far as needed."""
    if self.num_epochs is None:
      return True
    end = self.num_positions
    if end is not None:
      return position < end
    start = 0
    for epoch in range(self.num_epochs):
      start += self._count(epoch, position - start)
      if position < start:
        return True
    return False

  def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the epoch and the row at each position."""
    positions = np.asarray(positions, np.int64)
    if self.order is not None:
      epochs, places = self.order.locate(positions)
      rows = np.empty_like(places)
      for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        rows[here] = self.order.ids(epoch, places[here])
      return epochs, rows
    epochs = np.zeros(positions.shape, np.int64)
    rows = positions.copy()
    last = int(positions.max(initial=0))
    epoch, start = 0, 0
    counted = 0
    while last - start >= (count := self._count(epoch, last - start)):
      start += count
      epoch += 1
      counted += self.source.num_rows(epoch) is None
      if counted > _MOST_EPOCHS_AT_ONCE:
        raise errors.OrderError(
            f"Position {last} lies more than {_MOST_EPOCHS_AT_ONCE} epochs ahead, and these rows"
            " are counted epoch by epoch. Check initial_step and olmo_initial_position."
        )
      later = positions >= start
      epochs[later] = epoch
      rows[later] = positions[later] - start
    return epochs, rows

  def positions(self, epoch: int, rows: np.ndarray) -> np.ndarray:
    """Returns the position of each row in an epoch; -1 if the epoch does not have it."""
    rows = np.asarray(rows, np.int64)
    if self.order is not None:
      places = self.order.places(epoch, rows)
      return np.where(places < 0, -1, places + self.order.epochs.start(epoch))
    last = int(rows.max(initial=0))
    counts = [self._count(earlier, sys.maxsize) for earlier in range(epoch)]
    within = (rows >= 0) & (rows < self._count(epoch, last))
    return np.where(within, rows + sum(counts), -1)

  def visits(self, epoch: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns all positions of the given rows in an epoch.

    Returns:
      Two arrays with one element per visit: the index into `rows` of the visited row, and the
      position of the visit.
    """
    positions = self.positions(epoch, rows)
    which = np.flatnonzero(positions >= 0)
    return which, positions[which]

  def positions_of(
      self, source: int, first: int, count: int, end: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns the epoch and position of each row that has tokens from a range of a file.

    Only rows at positions below `end` are returned; see `row_source.positions_of`.
    """
    return row_source.positions_of(self.source, self, source, first, count, end)

  def prepare(self, position: int) -> None:
    """Prepares the order for the epoch of a position; rows are counted when they are requested."""
    if self.order is not None:
      self.order.prepare(position)

  def look_ahead(self, position: int) -> None:
    """Starts the background work of the source, such as counting rows after a position."""
    look_ahead = getattr(self.source, "look_ahead", None)
    if look_ahead is not None:
      look_ahead(position, self.num_epochs)

  def close(self) -> None:
    """Stops the background work of the source, and closes the files of the order."""
    if self.order is not None:
      self.order.close()
    close = getattr(self.source, "close", None)
    if close is not None:
      close()

  def _count(self, epoch: int, row: int) -> int:
    """Returns the number of rows of an epoch, or a number above `row` if not all are counted."""
    count = self.source.num_rows(epoch)
    if count is None:
      counter = getattr(self.source, "count_rows", None)
      count = row + 1 if counter is None else counter(epoch, row)
    if not count:
      raise errors.CorpusError(
          "No document of the corpus has a token: there is nothing to pack. Check the files of the"
          " index."
      )
    return count
