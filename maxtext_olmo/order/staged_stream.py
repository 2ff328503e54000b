"""The stream of a run with stages: at each position, the stream of the stage in force.

    stage               0: positions 0 … 3999     1: positions 4000 … 7999      2: 8000 …
    epoch in stage      0  1  2 (cut short)       0  1                          0  1  2  …
    epoch in the run    0  1  2                   2**32  2**32 + 1              2 * 2**32  …

The number of an epoch in the run encodes its stage. It does not depend on how many epochs earlier
stages have, because counting those would require the corpora of the earlier stages.
"""

from __future__ import annotations

import abc
import bisect
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.order import corpora as corpora_lib
from maxtext_olmo.order import epochs as epochs_lib
from maxtext_olmo.order import stages as stages_lib

_EPOCHS_PER_STAGE = 1 << 32


class StagedStream(abc.ABC):
  """Maps positions to rows, over the stages of a run.

  The stream of a stage is created on first use.

  Args:
    stages: Stages sorted by position; the first is at position 0.
    corpora: Indexes of the stages.
    num_epochs: Number of epochs of the last stage; None for an endless stream.
  """

  held_out = False
  history: tuple[()] = ()

  def __init__(
      self,
      stages: Sequence[stages_lib.Stage],
      corpora: corpora_lib.Corpora,
      num_epochs: int | None = None,
  ):
    self.stages = tuple(stages)
    self.corpora = corpora
    self.num_epochs = num_epochs
    self._firsts = [stage.position for stage in stages]
    self._streams: dict[int, Any] = {}
    self._connect()

  def _connect(self) -> None:
    """Creates the attributes that belong to one process and are not pickled."""
    self._lock = threading.RLock()

  def __getstate__(self) -> dict[str, Any]:
    return {name: value for name, value in self.__dict__.items() if name != "_lock"}

  def __setstate__(self, state: dict[str, Any]) -> None:
    self.__dict__.update(state)
    self._connect()

  @abc.abstractmethod
  def _make(self, number: int) -> Any:
    """Returns the stream of a stage."""

  @property
  def fingerprint(self) -> str:
    """The fingerprint of the corpus that the run began with."""
    return self.stages[0].settings.fingerprint

  @property
  def sequence_length(self) -> int:
    """Tokens per row."""
    return self.stream(0).sequence_length

  @property
  def endless(self) -> bool:
    """True if the stream has no end."""
    return self.num_epochs is None

  @property
  def num_positions(self) -> int | None:
    """The number of samples until the end; None if there is no end or it is not known yet."""
    if self.num_epochs is None:
      return None
    last = len(self.stages) - 1
    own = self.stream(last).num_positions
    return None if own is None else self._firsts[last] + own

  @property
  def drops_tails(self) -> bool:
    """True if any stage has batches that may not span epochs."""
    return False

  @property
  def batch_epochs(self) -> epochs_lib.Epochs | None:
    """The epochs whose ends no batch crosses; None if batches may span epochs in all stages."""
    return None

  def length(self, number: int) -> int | None:
    """Returns the number of positions of a stage; None for the last."""
    if number + 1 == len(self.stages):
      return None
    return self._firsts[number + 1] - self._firsts[number]

  def number_at(self, position: int) -> int:
    """Returns the number of the stage at a position."""
    return bisect.bisect_right(self._firsts, position) - 1

  def stage_of_epoch(self, epoch: int) -> tuple[int, int]:
    """Returns the stage of an epoch of the run, and the epoch's number within that stage."""
    return divmod(epoch, _EPOCHS_PER_STAGE)

  def first_epoch(self, number: int) -> int:
    """Returns the number that the first epoch of a stage has in the run."""
    return number * _EPOCHS_PER_STAGE

  def stream(self, number: int) -> Any:
    """Returns the stream of a stage, which counts positions from the stage's beginning."""
    found = self._streams.get(number)
    if found is None:
      with self._lock:
        found = self._streams.get(number) or self._make(number)
        self._streams[number] = found
    return found

  def index(self, number: int) -> index_lib.OlmoNpyIndex:
    """Returns the index of a stage."""
    return self.corpora.index(self.stages[number])

  def has(self, position: int) -> bool:
    """Returns whether there is a row at a position."""
    last = len(self.stages) - 1
    if self.num_epochs is None or position < self._firsts[last]:
      return True
    return self.stream(last).has(position - self._firsts[last])

  def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the epoch and the row at each position."""
    positions = np.asarray(positions, np.int64)
    numbers = np.searchsorted(self._firsts, positions, side="right") - 1
    epochs, ids = np.empty_like(positions), np.empty_like(positions)
    for number in np.unique(numbers).tolist():
      here = numbers == number
      found = self.stream(number).locate(positions[here] - self._firsts[number])
      epochs[here], ids[here] = found[0] + self.first_epoch(number), found[1]
    return epochs, ids

  def positions(self, epoch: int, rows: np.ndarray) -> np.ndarray:
    """Returns the position of each row in an epoch; -1 if the epoch does not have it."""
    number, own_epoch = self.stage_of_epoch(epoch)
    found = self.stream(number).positions(own_epoch, rows)
    end = self.length(number)
    there = found >= 0 if end is None else (found >= 0) & (found < end)
    return np.where(there, found + self._firsts[number], -1)

  def visits(self, epoch: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns all positions of the given rows in an epoch.

    Returns:
      Two arrays with one element per visit: the index into `rows` of the visited row, and the
      position of the visit.
    """
    number, own_epoch = self.stage_of_epoch(epoch)
    which, found = self.stream(number).visits(own_epoch, rows)
    end = self.length(number)
    if end is not None:
      which, found = which[found < end], found[found < end]
    return which, found + self._firsts[number]

  def prepare(self, position: int) -> None:
    """Prepares the order for the epoch of a position, before workers start to read there."""
    number = self.number_at(position)
    self.stream(number).prepare(position - self._firsts[number])

  def look_ahead(self, position: int) -> None:
    """Starts background work of the stage at a position, such as counting rows in advance."""
    number = self.number_at(position)
    self.stream(number).look_ahead(position - self._firsts[number])

  def close(self) -> None:
    """Closes the files of the stages and stops background work; the stream remains usable."""
    for stream in list(self._streams.values()):
      stream.close()

  def identity(self) -> dict[str, Any]:
    """Returns the identity of the first stage; `stages` describes the others."""
    return self.stream(0).identity()


class Place(NamedTuple):
  """The stage, epoch and place of a position.

  Attributes:
    stage: Number of the stage; None without stages.
    epoch: Epoch, counted from the beginning of the stage.
    place: Place in that epoch.
    length: Number of places of that epoch before its end or the next stage; None if the places have
      not been counted.
  """

  stage: int | None
  epoch: int
  place: int
  length: int | None


def place_of(stream: Any, position: int) -> Place:
  """Returns the stage, epoch and place of a position of a stream, which may have no stages."""
  stage, own, first = stage_at(stream, position)
  epoch, place = (int(found[0]) for found in own.locate(np.array([position - first])))
  if own.epochs is None:
    return Place(stage, epoch, place, None)
  start, length = own.epochs.start(epoch), own.epochs.length(epoch)
  end = None if stage is None else stream.length(stage)
  return Place(
      stage, epoch, position - first - start, length if end is None else min(length, end - start)
  )


def stage_at(stream: Any, position: int) -> tuple[int | None, Any, int]:
  """Returns the stage at a position, its stream, and the first position of the stage.

  Without stages, these are None, the stream itself, and 0.
  """
  if not isinstance(stream, StagedStream):
    return None, stream, 0
  number = stream.number_at(position)
  return number, stream.stream(number), stream.stages[number].position
