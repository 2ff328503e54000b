"""Mixtures of rows: the rows of several sources, interleaved by weight.

    weights 2 : 1      row    0  1  2  3  4  5
                       from   a  b  a  a  b  a
                       which  0  0  1  2  1  3       the position within that source's own stream

A mixture has no end, so all its rows are in epoch 0. Each member has its own epochs. If a mixture
follows another mixture of the same members, each member continues where it stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from maxtext_olmo import errors
from maxtext_olmo.order import interleave
from maxtext_olmo.rows import parts as parts_lib
from maxtext_olmo.rows import row_sequence
from maxtext_olmo.rows import row_source


class MixedRows:
  """The rows of several endless streams, interleaved by weight.

  Args:
    members: Streams over row sources with the same row length, padding, segment rule and
      fingerprint.
    weights: Each member's share of the rows.
    starts: Position at which each member begins: the number of its rows that earlier mixtures took.
  """

  def __init__(
      self,
      members: Sequence[row_sequence.RowSequence],
      weights: Sequence[Any],
      starts: Sequence[int] = (),
  ):
    if len(members) != len(weights):
      raise errors.ConfigError(
          f"Every member of a mixture needs a weight, got {len(weights)} weights for"
          f" {len(members)} members."
      )
    self.members = tuple(members)
    self.starts = tuple(starts) or (0,) * len(members)
    self._interleave = interleave.Interleave(interleave.counts_of_weights(weights))
    first = self.members[0].source
    for name in (
        "row_length",
        "pad_id",
        "segment_rule",
        "filter_sees_padding",
        "block_rows",
        "mask_paths",
        "fingerprint",
    ):
      if any(getattr(member.source, name) != getattr(first, name) for member in self.members):
        raise errors.ConfigError(f"All members of a mixture must have the same {name}.")
    self.row_length = first.row_length
    self.pad_id = first.pad_id
    self.segment_rule = first.segment_rule
    self.filter_sees_padding = first.filter_sees_padding
    self.block_rows = first.block_rows
    self.packs_for_all_hosts = any(
        getattr(member.source, "packs_for_all_hosts", False) for member in self.members
    )
    self.mask_paths = first.mask_paths
    self.fingerprint = first.fingerprint

  def num_rows(self, epoch: int) -> None:
    """Returns None: a mixture does not end."""
    del epoch

  def parts(self, epoch: int, rows: np.ndarray) -> parts_lib.Parts:
    """Returns the parts of the given rows."""
    del epoch
    numbers, indices = self._interleave.locate(rows)
    tables, places = [], []
    for number in np.unique(numbers).tolist():
      here = np.flatnonzero(numbers == number)
      member = self.members[number]
      positions = indices[here] + self.starts[number]
      tables.append(row_source.parts_at(member.source, member, positions))
      places.append(here)
    return parts_lib.join(tables, places, len(rows))

  def positions_of(
      self, source: int, first: int, count: int, end: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns the epoch and number of each row below `end` that has tokens from a range of a file.

    Epochs are those of the member that a row comes from.
    """
    found = [(np.zeros(0, np.int64),) * 2]
    for number, taken in enumerate(self._interleave.taken(end)):
      start = self.starts[number]
      epochs, positions = self.members[number].positions_of(source, first, count, start + taken)
      epochs, positions = epochs[positions >= start], positions[positions >= start]
      found.append((epochs, self._interleave.positions_of(number, positions - start)))
    epochs, rows = (np.concatenate(column) for column in zip(*found))
    order = np.argsort(rows)
    return epochs[order], rows[order]

  def taken_before(self, rows: np.ndarray) -> np.ndarray:
    """Returns the number of rows of each member before each row, in an array (rows, members)."""
    return self._interleave.taken_before(rows)

  def taken_until(self, row: int) -> dict[str, int]:
    """Returns how many rows of each member precede a row, including rows before the mixture."""
    taken = self._interleave.taken(row)
    return {m.name: start + int(n) for m, start, n in zip(self.members, self.starts, taken)}

  def look_ahead(self, position: int, num_epochs: int | None = None) -> None:
    """Starts the background work of the members, such as counting rows in advance."""
    del num_epochs
    for member, start, taken in zip(self.members, self.starts, self._interleave.taken(position)):
      member.look_ahead(start + taken)

  def close(self) -> None:
    """Stops the background work of the members."""
    for member in self.members:
      member.close()
