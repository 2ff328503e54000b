"""Streams of rows: which row of which epoch each position of a run holds.

`order.stream.Stream` shuffles rows whose number is known. `RowSequence` takes rows in sequence, as
a packing plan wants it, whose rows are counted as they are needed:

    rows of epochs 0, 1, 2   3, 4, not counted yet     position   0  1  2  3  4  5  6  7
                                                       epoch      0  0  0  1  1  1  1  2
                                                       row        0  1  2  0  1  2  3  0
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from maxtext_olmo import errors
from maxtext_olmo.order import base
from maxtext_olmo.order import epochs as epochs_lib
from maxtext_olmo.rows import parts as parts_lib
from maxtext_olmo.rows import row_source


class RowStream(Protocol):
  """Position → (epoch, row)."""

  @property
  def endless(self) -> bool:
    """Whether there is no end."""

  @property
  def num_positions(self) -> int | None:
    """The number of positions until the end; None where there is none, or it is not counted."""

  def has(self, position: int) -> bool:
    """Returns whether there is a row at a position."""

  def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the epochs and the rows at some positions."""


class RowSequence:
  """The rows of a source in sequence, or in an order, epoch after epoch.

  Args:
    source: The rows.
    name: What decides which row comes at which position, for the identity of the stream.
    seed: The seed of the run.
    num_epochs: Epochs until the end; None for no end.
    order: Which row comes at which place; None takes rows in sequence.
  """

  drops_tails = False
  history: tuple[()] = ()

  def __init__(
      self,
      source: row_source.RowSource,
      *,
      name: str,
      seed: int,
      num_epochs: int | None = None,
      order: base.Order | None = None,
  ):
    self.source = source
    self.name = name
    self.seed = seed
    self.num_epochs = num_epochs
    self.order = order

  @property
  def fingerprint(self) -> str:
    """The fingerprint of the data."""
    return self.source.fingerprint

  @property
  def sequence_length(self) -> int:
    """Tokens of a row."""
    return self.source.row_length

  @property
  def endless(self) -> bool:
    """Whether there is no end."""
    return self.num_epochs is None

  @property
  def num_positions(self) -> int | None:
    """The number of rows until the end; None where there is no end, or it has not been counted."""
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
    """The lengths of epochs, where they are known for good."""
    return None if self.order is None else self.order.epochs

  def identity(self) -> dict[str, Any]:
    """Returns what decides which row comes at which position."""
    return {"fingerprint": self.fingerprint, "order": self.name, "seed": self.seed}

  def has(self, position: int) -> bool:
    """Returns whether there is a row at a position; counts rows as far as that takes."""
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
    """Returns the epochs and the rows at some positions."""
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
    while last - start >= (count := self._count(epoch, last - start)):
      start += count
      epoch += 1
      later = positions >= start
      epochs[later] = epoch
      rows[later] = positions[later] - start
    return epochs, rows

  def prepare(self, position: int) -> None:
    """Does nothing: what rows need is counted when they are asked for."""

  def look_ahead(self, position: int) -> None:
    """Lets the source prepare in the background what a resume near a position would need."""
    look_ahead = getattr(self.source, "look_ahead", None)
    if look_ahead is not None:
      look_ahead(position, self.num_epochs)

  def close(self) -> None:
    """Ends what the source runs in the background."""
    close = getattr(self.source, "close", None)
    if close is not None:
      close()

  def _count(self, epoch: int, row: int) -> int:
    """Returns the rows of an epoch, or, where they are not all counted, a number above `row`."""
    count = self.source.num_rows(epoch)
    if count is None:
      counter = getattr(self.source, "count_rows", None)
      count = row + 1 if counter is None else counter(epoch, row)
    if not count:
      raise errors.CorpusError("No document of the corpus has a token: there is nothing to pack.")
    return count


def parts_at(
    source: row_source.RowSource, stream: RowStream, positions: np.ndarray
) -> parts_lib.Parts:
  """Returns the parts of the rows at some positions, which may span epochs."""
  epochs, rows = stream.locate(positions)
  if not epochs.size or epochs.min() == epochs.max():
    return source.parts(int(epochs[0]) if epochs.size else 0, rows)
  tables, places = [], []
  for epoch in np.unique(epochs).tolist():
    here = np.flatnonzero(epochs == epoch)
    tables.append(source.parts(epoch, rows[here]))
    places.append(here)
  return parts_lib.join(tables, places, len(rows))
