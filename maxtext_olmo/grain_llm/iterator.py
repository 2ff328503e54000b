"""The iterator that the `make_grain_llm_*` functions return: global batches, epochs, and a state.

The state is that of `devices.grain_state`, with the rows taken as `position`. Its identity names
the stream of the whole run, so it is the same on all hosts. If rows are random access, a run may
resume from the position with another batch size.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from maxtext_olmo import metrics as metrics_lib
from maxtext_olmo.devices import grain_state
from maxtext_olmo.devices import multihost
from maxtext_olmo.errors import ResumeError
from maxtext_olmo.grain_llm import row_source
from maxtext_olmo.order import schedule as schedule_lib

# Makes this host's batches for a schedule, from step 0 on.
MakeLoader = Callable[[schedule_lib.BatchSchedule], Iterable[Any]]


@dataclasses.dataclass(frozen=True)
class Lengths:
  """How long an iterator is.

  Attributes:
    epoch: Maps a schedule and a first step to the steps of an epoch that begins there; None if
      unknown.
    rest: Maps a schedule and a first step to the steps to the end of the data; None if it has not
      been counted yet, or if there is no end.
    settled: Whether `epoch` is known now, and hence on all hosts. Only then do epochs end by it;
      otherwise only the data ends them.
    unknown: Returns why the length is not known.
  """

  epoch: Callable[[schedule_lib.BatchSchedule, int], int | None]
  rest: Callable[[schedule_lib.BatchSchedule, int], int | None]
  settled: bool
  unknown: Callable[[], str]

  def of_epoch(self, schedule: schedule_lib.BatchSchedule, first: int) -> int | None:
    """Returns the number of steps after which an epoch ends."""
    return self.epoch(schedule, first) if self.settled else None


@dataclasses.dataclass(frozen=True)
class Stream:
  """The stream that an iterator's state belongs to.

  Attributes:
    identity: What decides which row comes at which position, for the run as a whole.
    version_1: The identities that states of version 1 may have.
    per_process: Whether each process has a stream, and so a state, of its own.
  """

  identity: Mapping[str, Any]
  version_1: frozenset[str]
  per_process: bool

  def check(self, saved: grain_state.GrainState) -> None:
    """Raises ResumeError if a state belongs to another stream."""
    was = saved.identity
    if isinstance(was, str):
      if was in self.version_1:
        return
      lines = [f"  it was saved by {was}", f"  this is {' or '.join(sorted(self.version_1))}"]
    else:
      now, was = dict(self.identity), dict(was or {})
      lines = [
          f"  {name}: the state has {was.get(name)!r}, this run has {now.get(name)!r}"
          for name in sorted({*now, *was})
          if was.get(name) != now.get(name)
      ]
      if not lines:
        return
    raise ResumeError(
        "The state belongs to another stream, so resuming would repeat and skip data:\n"
        + "\n".join(lines)
        + "\nSet these back, or start a new run without this state."
    )


class LLMIterator(multihost.MultiHostDataLoadIterator):
  """Global batches of a language-model pipeline, epoch after epoch.

  Args:
    make_loader: Makes this host's batches for a schedule.
    schedule: The rows that this host's batches take from its stream.
    global_mesh: The mesh to shard over.
    lengths: How long an epoch is.
    stream: What a state must belong to.
    rows: The rows if they are random access; then the batch sizes of a state and of this run may
      differ.
    **kwargs: As for `MultiHostDataLoadIterator`.
  """

  def __init__(
      self,
      make_loader: MakeLoader,
      schedule: schedule_lib.BatchSchedule,
      global_mesh: jax.sharding.Mesh,
      *,
      lengths: Lengths,
      stream: Stream,
      rows: row_source.RowSource | None,
      **kwargs: Any,
  ):
    self._make_loader = make_loader
    self._schedule = schedule
    self._lengths = lengths
    self._stream = stream
    self._rows = rows
    self._metrics = metrics_lib.Metrics()
    super().__init__(
        make_loader(schedule), global_mesh, iterator_length=lengths.of_epoch(schedule, 0), **kwargs
    )

  @property
  def position(self) -> int:
    """Rows taken from this host's stream, or from the stream that all hosts share."""
    return self._schedule.start(self.step)

  def __next__(self) -> Any:
    asked_at = time.perf_counter()
    self._count_ahead()
    batch = super().__next__()
    self._metrics.served(step=self.step - 1, asked_at=asked_at)
    return batch

  def metrics(self) -> dict[str, float]:
    """Returns `batches` and `wait_seconds`; these pipelines do not measure the stages."""
    found = self._metrics.snapshot()
    return {name: found[name] for name in ("batches", "wait_seconds")}

  def __len__(self) -> int:
    self._count_ahead()
    length = self.iterator_length
    if length is None:
      length = self._lengths.rest(self._schedule, self._epoch_start)
    if length is None:
      raise TypeError(f"This iterator has no length: {self._lengths.unknown()}")
    return length

  def reset(self) -> None:
    """Starts an epoch: the next one or, with `reset_after_epoch`, the first one again."""
    if self.reset_after_epoch:
      self._close_loader()
    super().reset()
    self.iterator_length = self._lengths.of_epoch(self._schedule, self._epoch_start)

  def set_state(self, state: dict[str, Any]) -> None:
    """Moves to where `get_state` was called; ResumeError, and no change, for another stream."""
    saved = grain_state.read(state)
    if saved.identity is None or saved.position is None:
      raise ResumeError(
          "The state has no identity or no position: it was not saved by this kind of iterator."
      )
    self._stream.check(saved)
    schedule = self._schedule
    if schedule.start(saved.step) != saved.position and self._rows is not None:
      schedule = schedule.anchored(saved.step, saved.position)
      self._close_loader()
      self.dataloader = self._make_loader(schedule)
      self.local_iterator = iter(self.dataloader)
      # The epoch of other batch sizes ends here, at the end of one of its batches.
      saved = dataclasses.replace(saved, epoch_start=saved.step)
    length = self._lengths.of_epoch(schedule, saved.epoch_start)
    self._move_to(saved)
    self._schedule, self.iterator_length = schedule, length

  def close(self) -> None:
    """Stops worker processes and threads; idempotent."""
    self._close_loader()
    if self._rows is not None:
      self._rows.close()

  @property
  def _own_iterator(self) -> bool:
    return self._stream.per_process

  def _state(self) -> grain_state.GrainState:
    return dataclasses.replace(super()._state(), identity=dict(self._stream.identity))

  def _count_ahead(self) -> None:
    if self._rows is not None:
      self._rows.count_ahead(self.position)

  def _close_loader(self) -> None:
    super().close()
    # Grain's threads end now, not at interpreter exit, when what they need may be gone.
    self.local_iterator = _Closed()


class _Closed:
  """Stands in for a data iterator that was closed."""

  def __iter__(self) -> _Closed:
    return self

  def __next__(self) -> Any:
    raise ValueError("This iterator has been closed.")

  def get_state(self) -> Any:
    raise ValueError("This iterator has been closed.")
