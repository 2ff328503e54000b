"""Batches and slices of rows that are only available as a stream.

The state of each of these datasets consists of a count and the state of the stream.
"""

from __future__ import annotations

import sys
from typing import Any

import grain

from maxtext_olmo import grain_compat
from maxtext_olmo.devices import grain_state
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import ResumeError
from maxtext_olmo.grain_llm import records as records_lib
from maxtext_olmo.grain_llm import row_batches
from maxtext_olmo.grain_llm.records import Record


class StreamBatches(grain.IterDataset[Record]):
  """Batches of a stream of rows; the state is the step and the state of the stream.

  Args:
    rows: Stream of rows.
    batching: Division of the rows into batches.
  """

  def __init__(self, rows: grain.IterDataset, batching: row_batches.Batching):
    super().__init__(rows)
    self._batching = batching

  def __iter__(self) -> grain.DatasetIterator[Record]:
    return _StreamBatchesIterator(iter(self._parent), self._batching)

  @property
  def _element_spec(self) -> dict[str, Any]:
    return self._batching.spec


class _StreamBatchesIterator(grain.DatasetIterator[Record]):

  def __init__(self, parent: grain.DatasetIterator, batching: row_batches.Batching):
    super().__init__(parent)
    self._batching = batching
    self._step = 0
    self._ended = False

  def __next__(self) -> Record:
    batching = self._batching
    size = batching.schedule.size(self._step)
    rows: list[Record] = []
    while not self._ended and len(rows) < size:
      try:
        rows.append(next(self._parent))
      except StopIteration:
        self._ended = True
    if not rows or (self._ended and batching.drop_remainder):
      raise StopIteration
    self._step += 1
    length = batching.length
    if length is None:
      # All rows count, not only this host's, so that hosts that share a batch agree on its length.
      length = max(len(row["inputs"]) for row in rows)
    mine = batching.mine[size]
    kept = [rows[i] for i in mine.tolist() if i < len(rows)]
    return records_lib.stack(kept, len(mine), length)

  def get_state(self) -> dict[str, Any]:
    return {"step": self._step, "rows": self._parent.get_state()}

  def set_state(self, state: dict[str, Any]) -> None:
    state = _read_state(state, "packed batches", "step")
    self._parent.set_state(state["rows"])
    self._step = state["step"]
    self._ended = False


class SlicedStream(grain.IterDataset[Record]):
  """A slice of a stream of rows.

  Args:
    rows: Stream of rows.
    sl: Indices of the rows, in ascending order, counted from the first row.
  """

  def __init__(self, rows: grain.IterDataset, sl: slice):
    super().__init__(rows)
    if any((bound or 0) < 0 for bound in (sl.start, sl.stop, sl.step)):
      raise ConfigError(
          f"{sl} counts from the end, which is unknown for a stream; count from the first row."
      )
    self._places = range(sys.maxsize)[sl]

  def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
    """Keeps only a slice of these rows; called by the workers of Grain's `mp_prefetch`."""
    del sequential_slice
    self._places = self._places[sl]

  def __iter__(self) -> grain.DatasetIterator[Record]:
    return _SlicedStreamIterator(iter(self._parent), self._places)

  @property
  def _element_spec(self) -> Any:
    return grain_compat.get_element_spec(self._parent)


class _SlicedStreamIterator(grain.DatasetIterator[Record]):

  def __init__(self, parent: grain.DatasetIterator, places: range):
    super().__init__(parent)
    self._places = places
    self._taken = 0  # Number of rows taken from the stream.

  def __next__(self) -> Record:
    while self._taken < self._places.stop:
      row, place = next(self._parent), self._taken
      self._taken += 1
      if place in self._places:
        return row
    raise StopIteration

  def get_state(self) -> dict[str, Any]:
    return {"taken": self._taken, "rows": self._parent.get_state()}

  def set_state(self, state: dict[str, Any]) -> None:
    state = _read_state(state, "a sliced stream", "taken")
    self._parent.set_state(state["rows"])
    self._taken = state["taken"]


def _read_state(state: Any, kind: str, count: str) -> dict[str, Any]:
  if not isinstance(state, dict) or set(state) != {count, "rows"}:
    raise ResumeError(
        f"Expected the state of {kind}, with {count!r} and 'rows', found {state!r}: it was saved by"
        " another kind of pipeline. Resume with that one."
    )
  return grain_state.from_json(state)
