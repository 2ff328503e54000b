"""The iterator over rows of documents: step after step, the global batch of that step, and a state of one position."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import grain
import jax

from maxtext_olmo import metrics as metrics_lib
from maxtext_olmo.devices import layout as layout_lib
from maxtext_olmo.loader import iterator as iterator_lib
from maxtext_olmo.loader import state as state_lib
from maxtext_olmo.order import base
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.rows import prefetch
from maxtext_olmo.rows import records as tokens_lib
from maxtext_olmo.rows import row_steps
from maxtext_olmo.rows import rows as rows_lib
from maxtext_olmo.rows import steps


@dataclasses.dataclass(frozen=True)
class RowStream:
  """Rows by position, as the state and the resume see them.

  Attributes:
    source: The rows.
    sequence_length: Tokens of a row.
    fingerprint: Of the corpus.
    order: Of the documents.
    how: What else decides which row comes at which position.
    seed: Of the run.
  """

  source: rows_lib.RowSource
  sequence_length: int
  fingerprint: str
  order: base.Order
  how: str
  seed: int
  history: tuple[()] = ()  # a corpus of documents does not change under a run

  @property
  def num_positions(self) -> int | None:
    """Rows until the end; None where there is none, or where it has not been counted yet."""
    return self.source.num_rows

  def identity(self) -> dict[str, Any]:
    """What decides which row comes at which position."""
    return {"fingerprint": self.fingerprint, "order": self.how, "seed": self.seed}


class DocumentIterator(grain.DatasetIterator[dict[str, jax.Array]]):
  """Global batches of rows of documents; like `OlmoIterator`, its whole state is a position.

  Args:
    start: Where it begins: the steps done, the schedule, and the stream.
    layouts: For each batch size of the schedule, how the arrays lie on the mesh.
    content: What the state records of the tokens.
    prefetching: Who prepares batches ahead.
    restart_on_iter: Whether `iter()` starts again, as evaluation does.
    pad_after_end: Whether padding batches follow a finite stream.
  """

  def __init__(
      self,
      start: Any,
      layouts: Mapping[int, layout_lib.BatchLayout],
      *,
      content: steps.Content,
      prefetching: iterator_lib.Prefetch,
      restart_on_iter: bool = False,
      pad_after_end: bool = False,
  ):
    super().__init__()
    self._beginning = start
    self._step, self._schedule, self._stream = start
    self._layouts = dict(layouts)
    self._content = content
    self._prefetching = prefetching
    self._restart_on_iter = restart_on_iter
    self._pad_after_end = pad_after_end
    self._batches: grain.DatasetIterator | None = None
    self._metrics = metrics_lib.Metrics()

  def __iter__(self) -> DocumentIterator:
    if self._restart_on_iter:
      self.reset()
    return self

  def __next__(self) -> dict[str, jax.Array]:
    self._assert_not_closed()
    asked_at = time.perf_counter()
    self._stream.source.count_ahead(self._schedule.start(self._step))
    layout = self._layouts[self._schedule.size(self._step)]
    self.start_prefetch()
    try:
      local = next(self._batches)  # type: ignore[arg-type]
    except StopIteration:
      if not self._pad_after_end:
        raise
      return layout.place(tokens_lib.stack([], len(layout.rows), layout.length))
    cost = local.pop("cost")
    began = time.perf_counter()
    batch = layout.place(local)
    crossed = sum(values.nbytes for values in local.values())
    self._metrics.made(
        **dict(zip(metrics_lib.STAGE_COSTS, cost.tolist())),
        bytes_to_device=crossed,
        transfer_seconds=time.perf_counter() - began,
    )
    self._metrics.served(step=self._step, asked_at=asked_at)
    self._step += 1
    return batch

  def metrics(self) -> dict[str, float]:
    """What loading has cost so far, as `OlmoIterator` has it; packing is part of the order, and nothing is queued on devices."""
    return self._metrics.snapshot()

  def __len__(self) -> int:
    """Steps to the end of the data; TypeError where there is none, or it has not been counted yet."""
    source = self._stream.source
    if source.endless:
      raise TypeError("This stream has no end (olmo_num_epochs=0), so it has no length.")
    source.count_ahead(self._schedule.start(self._step))
    if source.num_rows is None:
      raise TypeError(
          "The packing plan is still being counted, so the length is not known yet; ask again later."
      )
    return len(self._dataset(*self._beginning[:2]))

  @property
  def step(self) -> int:
    """Steps done, which is the number of the step to come."""
    return self._step

  @property
  def position(self) -> int:
    """Rows consumed."""
    return state_lib.position_after(self._stream, self._schedule, self._step)

  @property
  def stream(self) -> RowStream:
    """Which row each position holds."""
    return self._stream

  @property
  def local_iterator(self) -> DocumentIterator:
    """What a trainer's checkpointing holds on to: this very object, since the state is the same on all hosts."""
    return self

  def get_state(self) -> dict[str, Any]:
    """The position and the identity of the stream, as a small JSON-able dict, the same on all hosts."""
    return state_lib.make_state(self._stream, self._schedule, self._content, self._step)

  def set_state(self, state: dict[str, Any]) -> None:
    """Goes on where the state was taken; ResumeError, and no change, where it is of another stream."""
    _, schedule, stream = self._beginning
    self._move_to(state_lib.read_state(state, stream, schedule, self._content))

  def reset(self) -> None:
    """Back to where this iterator began."""
    self._move_to(self._beginning)

  def start_prefetch(self) -> None:
    """Begins to prepare batches, so that the first one is there when it is asked for."""
    if self._batches is not None:
      return
    workers = max(0, self._prefetching.workers)
    ahead = self._prefetching.per_worker if workers else self._prefetching.batches
    dataset = self._dataset(self._step, self._schedule)
    self._batches = iter(prefetch.PrefetchedDataset(dataset, workers=workers, ahead=ahead))

  def close(self) -> None:
    """Ends the workers and threads; idempotent."""
    self._stop()
    self._stream.source.close()
    super().close()

  def _move_to(self, start: Any) -> None:
    self._stop()
    self._step, self._schedule, self._stream = start

  def _stop(self) -> None:
    if self._batches is not None:
      self._batches.close()
      self._batches = None

  def _dataset(self, step: int, schedule: schedule_lib.BatchSchedule) -> row_steps.RowStepDataset:
    rows = {size: layout.rows for size, layout in self._layouts.items()}
    return row_steps.RowStepDataset(
        self._stream.source,
        schedule,
        rows,
        length=self._stream.sequence_length,
        first_step=step,
        with_cost=True,
    )
