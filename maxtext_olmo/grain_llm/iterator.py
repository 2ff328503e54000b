"""The iterator that the `make_grain_llm_*` functions return: epochs of a length that is true, and a state.

    {"step": 3, "iterator_length": 20, "epoch_start": 40, "position": 172, "identity": "…", "iterator": {…}}

`step` counts within the epoch, `epoch_start` is the first step of the epoch, and `position` is how many rows were taken. Where
rows are random access, a run may go on from the position with another batch size.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax

from maxtext_olmo import metrics as metrics_lib
from maxtext_olmo.devices import multihost
from maxtext_olmo.errors import ResumeError
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.rows import rows as rows_lib

# A schedule → this host's batches from step 0 on.
MakeLoader = Callable[[schedule_lib.BatchSchedule], Iterable[Any]]


@dataclasses.dataclass(frozen=True)
class Lengths:
  """How long an iterator is.

  Attributes:
    epoch: Schedule, first step → the steps of an epoch that begins there; None where it cannot be known.
    rest: Schedule, first step → the steps to the end of the data; None where it is not known yet, or there is none.
    settled: Whether `epoch` is known now, and so on all hosts: only then do epochs end by it. Else only the data ends.
    unknown: Why the length is not known.
  """

  epoch: Callable[[schedule_lib.BatchSchedule, int], int | None]
  rest: Callable[[schedule_lib.BatchSchedule, int], int | None]
  settled: bool
  unknown: Callable[[], str]

  def of_epoch(self, schedule: schedule_lib.BatchSchedule, first: int) -> int | None:
    """The steps after which an epoch ends."""
    return self.epoch(schedule, first) if self.settled else None


class LLMIterator(multihost.MultiHostDataLoadIterator):
  """Global batches of a language-model pipeline, epoch after epoch.

  Args:
    make_loader: Makes this host's batches for a schedule.
    schedule: The rows that this host's batches take from its stream.
    global_mesh: The mesh to shard over.
    lengths: How long an epoch is.
    identity: Names the stream; a state of another is refused.
    rows: The rows, where they are random access: then the batch sizes of a state and of this run may differ.
    **kwargs: As `MultiHostDataLoadIterator` has them.
  """

  def __init__(
      self,
      make_loader: MakeLoader,
      schedule: schedule_lib.BatchSchedule,
      global_mesh: jax.sharding.Mesh,
      *,
      lengths: Lengths,
      identity: str,
      rows: rows_lib.RowSource | None,
      **kwargs: Any,
  ):
    self._make_loader = make_loader
    self._schedule = schedule
    self._lengths = lengths
    self._identity = identity
    self._rows = rows
    self._first_step = 0
    self._metrics = metrics_lib.Metrics()
    super().__init__(
        make_loader(schedule), global_mesh, iterator_length=lengths.of_epoch(schedule, 0), **kwargs
    )

  @property
  def step(self) -> int:
    """Steps done in all epochs."""
    return self._first_step + self.step_counter

  @property
  def position(self) -> int:
    """Rows taken from this host's stream, or from all hosts' where they share one."""
    return self._schedule.start(self.step)

  def __next__(self) -> Any:
    asked_at = time.perf_counter()
    if self._rows is not None:
      self._rows.count_ahead(self.position)
    batch = super().__next__()
    self._metrics.served(step=self.step - 1, asked_at=asked_at)
    return batch

  def metrics(self) -> dict[str, float]:
    """What loading has cost so far: `batches` and `wait_seconds`; what its parts cost, these pipelines do not say."""
    found = self._metrics.snapshot()
    return {name: found[name] for name in ("batches", "wait_seconds")}

  def __len__(self) -> int:
    if self._rows is not None:
      self._rows.count_ahead(self.position)
    length = self.iterator_length
    if length is None:
      length = self._lengths.rest(self._schedule, self._first_step)
    if length is None:
      raise TypeError(f"This iterator has no length: {self._lengths.unknown()}")
    return length

  def reset(self) -> None:
    """Begins an epoch: the next one, or, with `reset_after_epoch`, the first one again."""
    self._first_step = 0 if self.reset_after_epoch else self.step
    self.step_counter = 0
    if self.reset_after_epoch:
      self._close_loader()
      self.local_iterator = iter(self.dataloader)
    self.iterator_length = self._lengths.of_epoch(self._schedule, self._first_step)

  def get_state(self) -> dict[str, Any]:
    """Where this host is."""
    return {
        **super().get_state(),
        "epoch_start": self._first_step,
        "position": self.position,
        "identity": self._identity,
    }

  def set_state(self, state: dict[str, Any]) -> None:
    """Goes to where `get_state` was called; ResumeError, and no change, where that was another stream."""
    missing = {"step", "epoch_start", "position", "identity"} - set(state)
    if missing:
      raise ResumeError(
          f"The state has no {', no '.join(sorted(missing))}: it was not saved by this kind of iterator."
      )
    if state["identity"] != self._identity:
      raise ResumeError(
          "The state belongs to another stream, so that going on would repeat and skip data:\n"
          f"  it was saved by {state['identity']}\n  this is            {self._identity}"
      )
    steps = state["epoch_start"] + state["step"]
    schedule = self._schedule
    if schedule.start(steps) != state["position"] and self._rows is not None:
      schedule = schedule.anchored(steps, state["position"])
      self._close_loader()
      self.dataloader = self._make_loader(schedule)
      self.local_iterator = iter(self.dataloader)
      # What was an epoch of other batches ends where this one's batches end.
      state = {**state, "step": 0, "epoch_start": steps}
    self._schedule, self._first_step = schedule, state["epoch_start"]
    self.iterator_length = self._lengths.of_epoch(schedule, self._first_step)
    super().set_state({**state, "iterator_length": self.iterator_length})

  def close(self) -> None:
    """Ends worker processes and threads; idempotent."""
    self._close_loader()
    if self._rows is not None:
      self._rows.close()

  def _close_loader(self) -> None:
    if hasattr(self.local_iterator, "close"):
      self.local_iterator.close()
    # What Grain keeps for it goes now, not when the interpreter exits and has taken apart what it needs to.
    self.local_iterator = _Closed()


class _Closed:

  def __iter__(self) -> _Closed:
    return self

  def __next__(self) -> Any:
    raise ValueError("This iterator has been closed.")
