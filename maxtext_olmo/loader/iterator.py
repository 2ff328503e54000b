"""The trainer's iterator, which yields the global batch of each step.

Its state is the number of steps done, the schedule that maps steps to positions, and the run's
history. After a restore, prefetched batches are made again from the position, so the state does not
depend on workers or threads.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grain
import jax
import numpy as np
from absl import logging

from maxtext_olmo import errors
from maxtext_olmo import grain_compat
from maxtext_olmo import metrics as metrics_lib
from maxtext_olmo.devices import expand
from maxtext_olmo.devices import layout as layout_lib
from maxtext_olmo.loader import delivery as delivery_lib
from maxtext_olmo.loader import restart as restart_lib
from maxtext_olmo.loader import state as state_lib
from maxtext_olmo.loader import storage_metrics
from maxtext_olmo.order import skips as skips_lib
from maxtext_olmo.order import staged_stream
from maxtext_olmo.order import status
from maxtext_olmo.order import timeline
from maxtext_olmo.rows import content as content_lib
from maxtext_olmo.rows import explain as explain_lib
from maxtext_olmo.rows import prefetch as prefetch_lib
from maxtext_olmo.rows import reader as reader_lib
from maxtext_olmo.rows import row_source
from maxtext_olmo.rows import steps


class BatchIterator(grain.DatasetIterator[dict[str, jax.Array]]):
  """Global batches of a stream of rows, as dicts of six (batch, length) int32 arrays on a mesh.

  Args:
    source: Maps row numbers to parts.
    reader: Reads the tokens of the parts.
    start: The starting point: the steps done, the schedule, the stream, and the run's history.
    layouts: For each batch size of the schedule, how the arrays are laid out on the mesh.
    content: How tokens are processed.
    prefetch: How many batches to make in advance.
    restart_on_iter: Whether `iter()` starts again from the beginning, unless a state was just set.
      Evaluation needs this; in training, `iter()` does not move the iterator.
    pad_after_end: Whether padding batches follow the end of a finite stream.
    restart: Decides where the run continues when a state is restored.
    labels: Label id of each file, for batches with the extra array `labels`.
    on_start: Called with the iterator when it is about to read batches.
    provenance: The names of labels and documents, for `explain`.
  """

  def __init__(
      self,
      source: row_source.RowSource,
      reader: reader_lib.Reader,
      start: state_lib.Start,
      layouts: Mapping[int, layout_lib.BatchLayout],
      *,
      content: content_lib.Content,
      prefetch: delivery_lib.Prefetch = delivery_lib.Prefetch(),
      restart_on_iter: bool = False,
      pad_after_end: bool = False,
      restart: restart_lib.RestartPolicy = restart_lib.RestartPolicy(),
      labels: np.ndarray | None = None,
      on_start: Callable[[BatchIterator], None] | None = None,
      provenance: explain_lib.Provenance | None = None,
  ):
    super().__init__()
    self._source = source
    self._reader = reader
    self._layouts = dict(layouts)
    self._content = content
    self._prefetch = prefetch
    self._restart_on_iter = restart_on_iter
    self._pad_after_end = pad_after_end
    self._restart = restart
    self._labels = labels
    self._on_start = on_start
    self._provenance = provenance
    self._record = content.record(source.segment_rule)
    self._beginning = start
    self._start = start
    self._history = state_lib.begin_history(start, self._record)
    self._step = start.step
    self._state_set = False  # Whether a state was set since the last `iter()`.
    self._expanders = {
        size: expand.Expander(layout, content.shift) for size, layout in self._layouts.items()
    }
    self._delivery: delivery_lib.Delivery | None = None
    self.failure: BaseException | None = None  # The error that the last `next()` raised, if any.
    self._metrics = metrics_lib.Metrics()
    self._storage = getattr(getattr(reader, "files", None), "storage", None)
    self._metrics.watch_store(functools.partial(storage_metrics.describe_store, self._storage))
    # Threads may share the iterator. Each batch goes to one thread, and a state is never taken in
    # the middle of a step.
    self._lock = threading.RLock()
    self._pid = os.getpid()

  def __iter__(self) -> BatchIterator:
    if self._restart_on_iter:
      # Unless a state was just set, begin a new pass; also if the state is at the end of the data.
      if not self._state_set or not self._start.stream.has(self.position):
        self.reset()
      self._state_set = False
    return self

  def __next__(self) -> dict[str, jax.Array]:
    if os.getpid() != self._pid:
      prefetch_lib.check_process(self._pid)
    with self._lock:
      grain_compat.assert_not_closed(self)
      asked_at = time.perf_counter()
      if self._delivery is None:
        self.start_prefetch()
      try:
        batch = self._delivery.take()  # type: ignore[union-attr]
      except StopIteration:
        if not self._pad_after_end:
          raise
        size = self._start.schedule.size(self._step)
        return delivery_lib.padding_batch(
            self._layouts[size], self._expanders[size], self._content.extras
        )
      except BaseException as error:
        # Prefetching is already past this step. Stopping it lets the next call try the step again.
        self._stop()
        self.failure = error
        raise
      self.failure = None
      self._metrics.served(step=self._step, asked_at=asked_at)
      self._step += 1
      return batch

  def metrics(self) -> dict[str, float]:
    """Returns what loading has cost so far: seconds per activity (wait, read, …), bytes, reads."""
    delivery = self._delivery
    found = self._metrics.snapshot() | storage_metrics.storage_metrics(self._storage)
    return found if delivery is None else found | delivery.metrics()

  def __len__(self) -> int:
    """Returns the number of steps from where this iterator began to the end of the stream.

    Raises:
      TypeError: The stream has no end, or its length is not known yet.
    """
    stream = self._start.stream
    if stream.endless:
      raise TypeError("This stream has no end (olmo_num_epochs=0), so it has no length.")
    if stream.num_positions is None:
      stream.look_ahead(self.position)
    if stream.num_positions is not None:
      return len(self._make_dataset(self._beginning))
    raise TypeError(
        "The length is not known yet, because the packing plan is still being counted. Try again"
        " later."
    )

  @property
  def step(self) -> int:
    """The number of steps done, which is also the index of the next step."""
    return self._step

  @property
  def position(self) -> int:
    """The number of samples consumed, over all hosts."""
    with self._lock:
      return state_lib.position_after(self._start.stream, self._start.schedule, self._step)

  @property
  def epoch(self) -> int | None:
    """The epoch of the next sample within its stage; None at the end of the stream."""
    position, stream = self.position, self._start.stream
    if not stream.has(position):
      return None
    return staged_stream.place_of(stream, position).epoch

  @property
  def place(self) -> dict[str, int]:
    """The position of the next sample, its stage if there are several, and its epoch in the stage.

    At the end of the stream, the dict has only the position.
    """
    found, epoch = {"position": self.position}, self.epoch
    if epoch is not None:
      stage, _, _ = staged_stream.stage_at(self.stream, self.position)
      found |= {} if stage is None else {"stage": stage}
      found["epoch"] = epoch
    return found

  @property
  def stream(self) -> Any:
    """The stream, which maps positions to rows."""
    return self._start.stream

  @property
  def history(self) -> timeline.Timeline:
    """The history: schedule, identity and content in force at each step of the run so far."""
    return self._history

  @property
  def files(self) -> Any:
    """The token files that rows are read from."""
    return getattr(self._reader, "files", None)

  @property
  def source(self) -> row_source.RowSource:
    """The row source, which maps row numbers to parts."""
    return self._rows_of(self._start.stream)

  @property
  def provenance(self) -> explain_lib.Provenance | None:
    """The names of labels and documents; None if rows have none."""
    return self._provenance

  @property
  def local_iterator(self) -> BatchIterator:
    """The object whose state is checkpointed: this iterator, as all hosts have the same state."""
    return self

  def host_batches(self, first_step: int | None = None) -> steps.StepDataset:
    """Returns this host's compact batches from `first_step` on; by default, from the next step."""
    step = self._step if first_step is None else first_step
    return self._make_dataset(self._start._replace(step=step))

  def row_numbers(self, step: int) -> np.ndarray:
    """Returns the row numbers in a global batch (-1 for padding), without reading tokens."""
    rows = {size: np.arange(layout.batch) for size, layout in self._layouts.items()}
    return self._make_dataset(self._start._replace(step=step), rows, 1).row_numbers(step)

  def explain(self, step: int, rows: Sequence[int] | None = None) -> explain_lib.StepExplanation:
    """Returns the contents of a past or future step: rows, files, bytes, documents, filter, loss.

    Nothing is replayed, and the iterator does not move. A past step is explained with the batch
    size, filter and segments in force then.

    Args:
      step: The step, counted from 0.
      rows: The rows of the global batch to read; by default, all.

    Raises:
      OrderError: The stream has no such step, or another stream was in force then.
    """
    entry, start = self._history.at(step), self._start
    state_lib.check_same_stream(entry, start.stream, step)
    source, content = content_lib.as_recorded(entry.content, self.source, self._content)
    return explain_lib.explain(
        source,
        self._reader,
        start.stream,
        entry.schedule,
        content,
        step,
        self._provenance,
        skips_lib.positions_of(entry.skips, "mask"),
        rows,
    )

  def describe(self) -> status.RunStatus:
    """Returns the run's step, position, tokens, epoch and stream; prints as a few lines of text."""
    with self._lock:
      position, start = self.position, self._start
      taken = start.schedule.skips.number(position)
      return status.RunStatus(
          step=self._step,
          position=position,
          tokens=taken * start.stream.sequence_length,
          epoch=self.epoch,
          identity=start.stream.identity(),
          skipped=position - taken,
      )

  def get_state(self) -> dict[str, Any]:
    """Returns the run's position and history as a small JSON dict, the same on all hosts."""
    with self._lock:
      start = self._start
      return state_lib.make_state(self._history, start.stream, start.schedule, self._step)

  def set_state(self, state: dict[str, Any]) -> None:
    """Resumes from a saved state.

    Raises:
      ResumeError: The state belongs to another stream; the iterator is unchanged.
    """
    first, restart = self._beginning, self._restart
    stream = restart.first_stream(first)
    self._move_to(restart.from_state(state, stream, first.schedule, self._record))
    self._state_set = True
    if restart.corpus is not None:
      try:
        restart.corpus.keep_copy(resumed=True)
      except errors.WriteError as error:  # The copy is only needed to name changed files later.
        logging.warning("%s", error)

  def go_to(self, step: int, position: int | None = None, *, keep_history: bool = True) -> None:
    """Continues at a step, for a trainer that restored a checkpoint without a data state.

    Args:
      step: The next step.
      position: The position of that step; by default, where the schedule puts it.
      keep_history: Whether to keep the history of earlier steps; otherwise it begins at `step`.
    """
    with self._lock:
      start, restart = self._start, self._restart
      if keep_history:
        history, first, record = self._history, self._beginning, self._record
        self._move_to(restart.at_step(start, history, first, record, step, position))
      else:
        self._move_to(restart.without_history(start, step, position))

  def reset(self) -> None:
    """Returns to the step at which this iterator began."""
    self._state_set = False
    self._move_to(self._beginning)

  def start_prefetch(self) -> None:
    """Starts preparing batches, so that the first one is ready when it is requested."""
    prefetch_lib.check_process(self._pid)
    with self._lock:
      if self._delivery is not None:
        return
      if self._on_start is not None:
        self._on_start(self)
      start = self._start._replace(step=self._step)
      dataset = self._make_dataset(start)
      if len(dataset):
        start.stream.prepare(start.schedule.start(start.step))
      self._delivery = delivery_lib.Delivery(
          dataset,
          start,
          self._expanders,
          self._prefetch,
          self._metrics,
          self._storage,
          fill_spool=not self._restart_on_iter,  # An evaluation may stop before its data ends.
      )

  def close(self) -> None:
    """Stops the workers and threads, and closes the files; idempotent.

    A thread that waits in `next()` gets its batch first. In a forked child, this does nothing.
    """
    if os.getpid() != self._pid:
      return
    with self._lock:
      self._stop()
      for start in (self._beginning, self._start):
        start.stream.close()
      self._reader.close()
      super().close()

  def _move_to(self, start: state_lib.Start) -> None:
    with self._lock:
      self._stop()
      self._start, self._step = start, start.step
      self._history = state_lib.begin_history(start, self._record)

  def __del__(self, getpid: Callable[[], int] = os.getpid) -> None:
    # Do not wait for threads: the garbage collector may run in any of them.
    if getpid() == getattr(self, "_pid", None):
      self._stop(wait=False)

  def _stop(self, wait: bool = True) -> None:
    if self._delivery is not None:
      self._delivery.close(wait=wait)
    self._delivery = None

  def _make_dataset(
      self,
      start: state_lib.Start,
      rows: Mapping[int, np.ndarray] | None = None,
      block_steps: int = 0,
  ) -> steps.StepDataset:
    if rows is None:
      rows = {size: layout.rows for size, layout in self._layouts.items()}
    return steps.StepDataset(
        self._rows_of(start.stream),
        self._reader,
        start.stream,
        start.schedule,
        rows,
        first_step=start.step,
        content=self._content,
        labels=self._labels,
        masked=skips_lib.positions_of(start.skips, "mask"),
        block_steps=block_steps,
    )

  def _rows_of(self, stream: Any) -> row_source.RowSource:
    """Returns the row source of a stream; it depends on the stages if they use several indexes."""
    for_stream = getattr(self._source, "for_stream", None)
    return self._source if for_stream is None else for_stream(stream)
