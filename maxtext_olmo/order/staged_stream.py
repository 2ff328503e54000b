"""The stream of a run with stages: at each position, the stream of the stage in force.

The stream of a stage is created on first use, because the bitmap of what was seen before it may
take a while to build; `look_ahead` builds it in the background before the stage begins.
"""

from __future__ import annotations

import bisect
import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import logging

from maxtext_olmo import errors
from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.order import corpora as corpora_lib
from maxtext_olmo.order import epochs as epochs_lib
from maxtext_olmo.order import mixture as mixture_lib
from maxtext_olmo.order import seen as seen_lib
from maxtext_olmo.order import staged_epochs
from maxtext_olmo.order import stages as stages_lib
from maxtext_olmo.order import stored
from maxtext_olmo.order import stream as stream_lib

# Building a bitmap starts when this share of the run before its stage remains.
_AHEAD = 0.1


class StagedStream:
  """Maps positions to instance ids, over the stages of a run.

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
    self._streams: dict[int, stream_lib.Stream] = {}
    self._first_epochs = [0]
    self._unprepared: set[int] = set()
    self._connect()

  def _connect(self) -> None:
    """Creates the members that belong to one process and are not pickled."""
    self._lock = threading.RLock()
    self._stop = threading.Event()
    self._thread: threading.Thread | None = None

  def __getstate__(self) -> dict[str, Any]:
    left_out = ("_lock", "_stop", "_thread")
    return {name: value for name, value in self.__dict__.items() if name not in left_out}

  def __setstate__(self, state: dict[str, Any]) -> None:
    self.__dict__.update(state)
    self._connect()

  @property
  def fingerprint(self) -> str:
    """The fingerprint of the corpus that the run began with."""
    return self.stages[0].settings.fingerprint

  @property
  def sequence_length(self) -> int:
    """Tokens per instance."""
    return self.corpora.base.sequence_length

  @property
  def split(self) -> stream_lib.Split:
    """The split of the corpus that the run began with."""
    return self.stream(0).split

  @property
  def endless(self) -> bool:
    """True if the stream has no end."""
    return self.num_epochs is None

  @property
  def num_positions(self) -> int | None:
    """The number of samples until the end; None if there is no end or it is not known yet."""
    last = len(self.stages) - 1
    if self.num_epochs is None or (self._needs_bitmap(last) and last not in self._streams):
      return None
    return self._firsts[last] + self.stream(last).num_positions  # type: ignore[operator]

  @property
  def drops_tails(self) -> bool:
    """True if any stage has batches that may not span epochs."""
    return any(stage.settings.drops_tails for stage in self.stages)

  @property
  def batch_epochs(self) -> epochs_lib.Epochs | None:
    """The epochs whose ends no batch crosses; None if batches may span epochs in all stages."""
    return staged_epochs.batch_epochs(self.stages, self.corpora)

  @property
  def epochs(self) -> StagedEpochs:
    """The lengths of epochs."""
    return StagedEpochs(self)

  def length(self, number: int) -> int | None:
    """Returns the number of positions of a stage; None for the last."""
    if number + 1 == len(self.stages):
      return None
    return self._firsts[number + 1] - self._firsts[number]

  def number_at(self, position: int) -> int:
    """Returns the number of the stage at a position."""
    return bisect.bisect_right(self._firsts, position) - 1

  def stage_of_epoch(self, epoch: int) -> tuple[int, int]:
    """Returns the number of the stage of an epoch of the run, and the stage's own epoch."""
    number = 0
    while number + 1 < len(self.stages) and epoch >= self.first_epoch(number + 1):
      number += 1
    return number, epoch - self.first_epoch(number)

  def first_epoch(self, number: int) -> int:
    """Returns the epoch of the run with which a stage begins."""
    if number < len(self._first_epochs):
      return self._first_epochs[number]
    with self._lock:
      while len(self._first_epochs) <= number:
        epochs = self._count_epochs(len(self._first_epochs) - 1)
        self._first_epochs.append(self._first_epochs[-1] + epochs)
      return self._first_epochs[number]

  def _count_epochs(self, number: int) -> int:
    """Returns the number of epochs that a stage begins before the next stage."""
    try:
      return self.stream(number).epochs.epoch(self.length(number) - 1) + 1  # type: ignore
    except errors.CorpusError as error:
      # Epoch numbers are for display only; the rows of later stages do not depend on them.
      logging.warning("The epochs of %s are counted as one: %s", self.stages[number].name, error)
      return 1

  def stream(self, number: int) -> stream_lib.Stream:
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

  def _make(self, number: int) -> stream_lib.Stream:
    settings = self.stages[number].settings
    index = self.index(number)
    last = number + 1 == len(self.stages)
    how: dict[str, Any] = {
        "order": settings.order,
        "seed": settings.seed,
        "split": self.corpora.split(index),
        "num_epochs": self.num_epochs if last else None,
        "seen": None,
    }
    taken: dict[str, int] = {}
    if settings.leave_out_seen:
      how["seen"] = self._seen(number).open(self._stop)
    elif settings.mixture:
      taken, since = self._taken_before(number)
      if since is not None:
        how["seen"] = self._seen(since).open(self._stop)
    try:
      if settings.mixture:
        return mixture_lib.mixture_stream(
            index, dict(settings.mixture), settings.unit, taken=taken, **how
        )
      consumed = "" if number else self.corpora.consumed_path
      return stream_lib.train_stream(
          index, cache_dir=self.corpora.cache_dir or None, consumed_path=consumed, **how
      )
    except errors.ConfigError as error:
      if not number:
        raise
      raise errors.ConfigError(f"{self.stages[number].name}: {error}") from error

  def _taken_before(self, number: int) -> tuple[dict[str, int], int | None]:
    """Returns what earlier mixtures have taken of a stage's labels.

    Returns:
      The number of chunks taken of each label, and the stage whose bitmap the first epochs of the
      labels leave out, or None.
    """
    mine = self.stages[number].settings
    taken: dict[str, int] = {}
    since = None
    for earlier in range(number):
      settings = self.stages[earlier].settings
      if not settings.mixture or settings.shares_labels != mine.shares_labels:
        continue
      if settings.leave_out_seen:
        since, taken = earlier, {}
      order = self.stream(earlier).order
      taken |= order.taken(-(-self.length(earlier) // order.chunk_size))  # type: ignore
    return taken, since

  def _needs_bitmap(self, number: int) -> bool:
    return self.stages[number].settings.leave_out_seen

  def _seen(self, number: int) -> seen_lib.SeenFile:
    """Returns the bitmap of what was seen before a stage."""
    index = self.index(number)
    split = self.corpora.split(index)

    def parts() -> list[seen_lib.Part]:
      return [
          seen_lib.Part(
              self.index(earlier),
              self.stream(earlier),
              self.length(earlier),  # type: ignore[arg-type]
              "" if earlier else self.corpora.consumed_path,
          )
          for earlier in range(number)
      ]

    described = [
        dataclasses.replace(stage, shared=()).to_json() | {"index_path": ""}
        for stage in self.stages[: number + 1]
    ]
    consumed = self.stream(0).order.name if self.corpora.consumed_path else ""
    key = {
        "stages": described,
        "sequence_length": self.sequence_length,
        "split": self.stream(0).split.identity(),
        "consumed": consumed,
        # Directories are no part of a fingerprint, so which files are the same may change.
        "shared": [
            seen_lib.SharedFiles(self.index(earlier), index).digest
            for earlier in range(number)
            if self.stages[earlier].settings.fingerprint != index.fingerprint
        ],
    }
    directory = self.corpora.cache_dir or stored.default_cache_dir()
    return seen_lib.SeenFile(directory, key, index, split, parts)

  def has(self, position: int) -> bool:
    """Returns whether there is an instance at a position."""
    last = len(self.stages) - 1
    if self.num_epochs is None or position < self._firsts[last]:
      return True
    return self.stream(last).has(position - self._firsts[last])

  def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the epoch and the instance id at each position."""
    positions = np.asarray(positions, np.int64)
    numbers = np.searchsorted(self._firsts, positions, side="right") - 1
    epochs, ids = np.empty_like(positions), np.empty_like(positions)
    for number in np.unique(numbers).tolist():
      here = numbers == number
      found = self.stream(number).locate(positions[here] - self._firsts[number])
      epochs[here], ids[here] = found[0] + self.first_epoch(number), found[1]
    return epochs, ids

  def positions(self, epoch: int, rows: np.ndarray) -> np.ndarray:
    """Returns the position of each instance in an epoch; -1 if the epoch does not have it."""
    number, own_epoch = self.stage_of_epoch(epoch)
    found = self.stream(number).positions(own_epoch, rows)
    end = self.length(number)
    there = found >= 0 if end is None else (found >= 0) & (found < end)
    return np.where(there, found + self._firsts[number], -1)

  def visits(self, epoch: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns all positions of instances in an epoch: indices into `rows`, and the positions."""
    number, own_epoch = self.stage_of_epoch(epoch)
    which, found = self.stream(number).visits(own_epoch, rows)
    end = self.length(number)
    if end is not None:
      which, found = which[found < end], found[found < end]
    return which, found + self._firsts[number]

  def prepare(self, position: int) -> None:
    """Prepares the order of a position's epoch before workers start that read from there."""
    number = self.number_at(position)
    self.stream(number).prepare(position - self._firsts[number])

  def look_ahead(self, position: int) -> None:
    """Builds the bitmap of a stage that begins soon, in the background."""
    number = self.number_at(position) + 1
    if number >= len(self.stages) or number in self._streams or number in self._unprepared:
      return
    if self._thread is not None:
      return
    if self._needs_bitmap(number) and position >= self._firsts[number] * (1 - _AHEAD):
      self._thread = threading.Thread(
          target=self._build, args=(number,), name="olmo_stage", daemon=True
      )
      self._thread.start()

  def _build(self, number: int) -> None:
    try:
      # The lock of this stream is not taken while the file's is held, which would be a deadlock.
      for earlier in range(number):
        self.stream(earlier)
      # Without the lock of this stream, because batches are located in the meantime.
      self._seen(number).open(self._stop)
      self.stream(number)
    except InterruptedError:
      pass
    except errors.MaxtextOlmoError as error:  # It is raised again when the stage begins.
      self._unprepared.add(number)
      logging.warning("%s cannot be prepared: %s", self.stages[number].name, error)
    finally:
      self._thread = None

  def close(self) -> None:
    """Closes the files of the orders and stops background work; the stream remains usable."""
    thread = self._thread
    if thread is not None:
      self._stop.set()
      thread.join()
      self._stop.clear()
    for stream in list(self._streams.values()):
      stream.close()

  def identity(self) -> dict[str, Any]:
    """Returns the identity of the first stage; `stages` describes the others."""
    return self.stream(0).identity()


@dataclasses.dataclass(frozen=True)
class StagedEpochs:
  """Maps positions to epochs and back, with epochs numbered over all stages.

  Attributes:
    stream: Stream of the run.
  """

  stream: StagedStream

  def epoch(self, position: int) -> int:
    """Returns the epoch of a position."""
    return int(self._locate(position)[0])

  def start(self, epoch: int) -> int:
    """Returns the position of an epoch's first place."""
    number, own_epoch = self.stream.stage_of_epoch(epoch)
    own = self.stream.stream(number).epochs.start(own_epoch)
    return self.stream.stages[number].position + own

  def length(self, epoch: int) -> int:
    """Returns the number of places of an epoch."""
    number, own_epoch = self.stream.stage_of_epoch(epoch)
    whole, end = self.stream.stream(number).epochs.length(own_epoch), self.stream.length(number)
    start = self.stream.stream(number).epochs.start(own_epoch)
    return whole if end is None else min(whole, end - start)

  def _locate(self, position: int) -> tuple[int, int]:
    number = self.stream.number_at(position)
    own = position - self.stream.stages[number].position
    epoch = self.stream.stream(number).epochs.epoch(own)
    return self.stream.first_epoch(number) + epoch, own
