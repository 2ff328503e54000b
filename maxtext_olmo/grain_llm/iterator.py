"""The iterator that the `make_grain_llm_*` functions return: global batches, epochs, and a state.

The state has the format of `devices.grain_state`; its `position` is the number of rows taken. Its
identity describes the stream of the whole run, and is the same on all hosts. If rows are random
access, a run may resume from the position with a different batch size.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from maxtext_olmo import metrics as metrics_lib
from maxtext_olmo.devices import grain_state
from maxtext_olmo.devices import multihost
from maxtext_olmo.errors import OrderError
from maxtext_olmo.errors import ResumeError
from maxtext_olmo.grain_llm import batches as batches_lib
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.order import status


class LLMIterator(multihost.MultiHostDataLoadIterator):
  """Iterates over the global batches of a language-model pipeline, epoch after epoch.

  Args:
    batches: Batches of this host.
    **kwargs: As for `MultiHostDataLoadIterator`.
  """

  def __init__(self, batches: batches_lib.Batches, **kwargs: Any):
    self._batches = batches
    self._schedule = batches.schedule
    self._metrics = metrics_lib.Metrics()
    length = self._epoch_length(0)  # This may count the rows of a plan, which `loader` needs.
    super().__init__(
        batches.loader(self._schedule),
        batches.mesh,
        length,
        None if batches.lengths is None else sum(batches.lengths),
        data_sharding=batches.spec,
        tail=batches.tail,
        **kwargs,
    )

  @property
  def position(self) -> int:
    """The number of rows taken from this host's stream, or from the stream that all hosts share."""
    return self._schedule.start(self.step)

  def _next(self) -> Any:
    asked_at = time.perf_counter()
    self._count_ahead()
    batch = super()._next()
    self._metrics.served(step=self.step - 1, asked_at=asked_at)
    return batch

  def metrics(self) -> dict[str, float]:
    """Returns `batches` and `wait_seconds`; these pipelines measure nothing else."""
    found = self._metrics.snapshot()
    return {name: found[name] for name in ("batches", "wait_seconds")}

  def describe(self) -> status.RunStatus:
    """Returns the status of the run; rows that are packed as they stream have no epoch numbers."""
    with self._lock:
      return status.RunStatus(
          step=self.step,
          position=self.position,
          tokens=self.position * (self._batches.info.length or 0),
          epoch=None,
          identity=dict(self._batches.info.identity),
      )

  def explain(self, step: int) -> NoReturn:
    """Raises OrderError, because these rows have no table of parts."""
    raise OrderError(
        f"Step {step} cannot be explained: these rows are packed as they stream, so a row has no"
        " position of its own. Rows of olmo_packing='planned' can be explained."
    )

  def __len__(self) -> int:
    with self._lock:
      self._count_ahead()
      if self.iterator_length is not None:
        return self.iterator_length
      steps = self._batches.num_steps(self._schedule)
    if steps is None:
      raise TypeError(f"This iterator has no length: {self._batches.why_no_length()}")
    return max(0, steps - self._epoch_start)

  def reset(self) -> None:
    """Starts an epoch: the next one or, with `reset_after_epoch`, the first one again."""
    with self._lock:
      if self.reset_after_epoch:
        self._use(self._batches.schedule)
        self._close_loader()
      super().reset()
      self.iterator_length = self._epoch_length(self._epoch_start)

  def set_state(self, state: dict[str, Any]) -> None:
    """Moves to the step at which a state was saved.

    Raises:
      ResumeError: The state belongs to another stream; the iterator is unchanged.
    """
    saved = grain_state.read(state)
    if saved.identity is None or saved.position is None:
      raise ResumeError(
          "The state has no identity or no position: it was not saved by this kind of iterator."
          " Resume with the one that saved it."
      )
    self._batches.check(saved)
    schedule = self._batches.schedule
    if schedule.start(saved.step) != saved.position and self._batches.rows is not None:
      schedule = schedule.anchored(saved.step, saved.position)
      # The batch sizes have changed, so the epoch with the old batch sizes ends here.
      saved = dataclasses.replace(saved, epoch_start=saved.step)
    with self._lock:
      self._use(schedule)
      length = self._epoch_length(saved.epoch_start)
      if length is not None and saved.step - saved.epoch_start > length:
        # When the state was saved, the length of the epoch was not known, so the run went past the
        # end of the epoch. The next epoch begins here.
        saved = dataclasses.replace(saved, epoch_start=saved.step)
        length = self._epoch_length(saved.step)
      self._move_to(saved)
      self.iterator_length = length

  def _close(self) -> None:
    self._close_loader()
    if self._batches.rows is not None:
      self._batches.rows.close()

  @property
  def _own_iterator(self) -> bool:
    return self._batches.rows is None and self._batches.info.shard == "slice"

  def _state(self) -> grain_state.GrainState:
    return dataclasses.replace(super()._state(), identity=dict(self._batches.info.identity))

  def _epoch_length(self, first: int) -> int | None:
    """Returns the number of steps of an epoch that begins with step `first`; None if unknown."""
    if not self._batches.settled:
      return None
    return self._batches.epoch_steps(self._schedule, first)

  def _count_ahead(self) -> None:
    if self._batches.rows is not None:
      self._batches.rows.count_ahead(self.position)

  def _use(self, schedule: schedule_lib.BatchSchedule) -> None:
    """Switches to the batches of the given schedule, if it is not in use already."""
    if schedule != self._schedule:
      self._close_loader()
      self._schedule = schedule
      self.dataloader = self._batches.loader(schedule)
      self.local_iterator = iter(self.dataloader)

  def _close_loader(self) -> None:
    super()._close()
    # Dropping the iterator ends Grain's threads now. At interpreter exit, the modules that they use
    # may be gone.
    self.local_iterator = _Closed()


class _Closed(Iterator[Any]):
  """Stands in for a data iterator that was closed."""

  def __next__(self) -> Any:
    raise ValueError("This iterator has been closed.")

  get_state = __next__
