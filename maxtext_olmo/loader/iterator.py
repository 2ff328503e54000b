"""The iterator that a trainer holds: step after step, the global batch of that step.

Its whole state is the number of steps done and the schedule that turns it into a position. What was made ahead is made
anew from the position after a restore, so Grain's own iterator state, which depends on the number of workers, is never kept.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import grain
import jax
import numpy as np

from maxtext_olmo import metrics as metrics_lib
from maxtext_olmo.devices import expand
from maxtext_olmo.devices import layout as layout_lib
from maxtext_olmo.loader import corpus_change
from maxtext_olmo.loader import state as state_lib
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.order import stream as stream_lib
from maxtext_olmo.rows import ahead as ahead_lib
from maxtext_olmo.rows import crew
from maxtext_olmo.rows import inspection
from maxtext_olmo.rows import steps
from maxtext_olmo.rows import workers


@dataclasses.dataclass(frozen=True)
class Prefetch:
  """Who prepares batches ahead: `workers` processes with `per_worker` batches each, else threads with `batches`.

  Of these, up to `on_device` are on the devices, or on their way, while the trainer is at an earlier step. A batch is read by
  `read_threads`, for 0 by as many as there are cores to spare.
  """

  workers: int = 0
  per_worker: int = 1
  batches: int = 2
  on_device: int = 1
  read_threads: int = 0

  def threads(self) -> int:
    """How many threads read a batch together."""
    if self.read_threads or self.workers:
      return self.read_threads or 1  # Workers read beside each other.
    # One core is that of who sends to the devices, and the trainer's.
    return crew.threads_beside(1 if self.on_device else 0)


# A batch on its way to the devices: called, it gives the arrays.
Sent = Callable[[], dict[str, jax.Array]]


@dataclasses.dataclass
class _Sender:
  """Takes batches and sends them to the devices, one step after the other.

  It refers to what it needs and not to the iterator, so that the thread it runs in does not keep a dropped one alive.
  """

  batches: Iterator[dict[str, np.ndarray]]
  stream: stream_lib.Stream
  schedule: schedule_lib.BatchSchedule
  step: int
  expanders: Mapping[int, expand.Expander]
  metrics: metrics_lib.Metrics

  def send_next(self, _: int = 0) -> Sent:
    local = next(self.batches)
    began = time.perf_counter()
    expander = self.expanders[self.schedule.size(self.step)]
    placed = expander.place(local)
    self.step += 1
    self.metrics.made(
        **dict(zip(metrics_lib.STAGE_COSTS, local["cost"].tolist())),
        bytes_to_device=placed.bytes_crossed,
        transfer_seconds=time.perf_counter() - began,
    )
    self.stream.look_ahead(state_lib.position_after(self.stream, self.schedule, self.step))
    return functools.partial(expander.finish, placed)


class OlmoIterator(grain.DatasetIterator[dict[str, jax.Array]]):
  """Global batches of a stream, as dicts of six (batch, length) int32 arrays on a mesh.

  Args:
    source: Where windows are read from.
    stream: Which instance each position holds.
    schedule: Step ↔ position.
    layouts: For each batch size of the schedule, how the arrays lie on the mesh.
    content: What is done with the tokens.
    prefetch: Who prepares batches ahead.
    first_step: Steps done already.
    restart_on_iter: Whether `iter()` starts again, as evaluation does; a train iterator's never moves.
    pad_after_end: Whether padding batches follow a finite stream.
    corpus: What may have happened to the corpus since a state was saved; None where it must be the same.
    whole_batches: Whether a restored position goes back to a whole number of batches, as OLMo-core's does.
  """

  def __init__(
      self,
      source: inspection.WindowSource,
      stream: stream_lib.Stream,
      schedule: schedule_lib.BatchSchedule,
      layouts: Mapping[int, layout_lib.BatchLayout],
      *,
      content: steps.Content,
      prefetch: Prefetch = Prefetch(),
      first_step: int = 0,
      restart_on_iter: bool = False,
      pad_after_end: bool = False,
      corpus: corpus_change.CorpusPolicy | None = None,
      whole_batches: bool = False,
  ):
    super().__init__()
    self._source = source
    self._layouts = dict(layouts)
    self._content = content
    self._prefetch = prefetch
    self._restart_on_iter = restart_on_iter
    self._pad_after_end = pad_after_end
    self._corpus = corpus
    self._whole_batches = whole_batches
    self._beginning = state_lib.Start(first_step, schedule, stream)
    self._step, self._schedule, self._stream = self._beginning
    self._expanders = {
        size: expand.Expander(layout, content) for size, layout in self._layouts.items()
    }
    self._batches: _InThreads | grain.DatasetIterator | None = None
    self._dataset: steps.StepDataset | None = None
    self._ahead: ahead_lib.Ahead[Sent] | None = None
    self._take: Callable[[], Sent] = _nothing_open
    self._metrics = metrics_lib.Metrics()

  def __iter__(self) -> OlmoIterator:
    if self._restart_on_iter:
      self.reset()
    return self

  def __next__(self) -> dict[str, jax.Array]:
    self._assert_not_closed()
    asked_at = time.perf_counter()
    self.start_prefetch()
    try:
      batch = self._take()()
    except StopIteration:
      if not self._pad_after_end:
        raise
      layout = self._layouts[self._schedule.size(self._step)]
      return layout.place(_padding(layout))
    except BaseException:
      # What is ahead has moved past the step that failed; a caller that tries again gets this step, or the error again.
      self._stop()
      raise
    depth = self._ahead.ready if self._ahead else 0
    self._metrics.served(step=self._step, asked_at=asked_at, queue_depth=depth)
    self._step += 1
    return batch

  def metrics(self) -> dict[str, float]:
    """What loading has cost so far: seconds of waiting, order, reads, filter and transfer; bytes; reads; queue depth."""
    return self._metrics.snapshot()

  def __len__(self) -> int:
    """Steps from the beginning of this iterator to the end of the stream; TypeError where it has none."""
    if self._stream.num_positions is None:
      raise TypeError("This stream has no end (olmo_num_epochs=0), so it has no length.")
    return len(self._make_dataset(self._beginning))

  @property
  def step(self) -> int:
    """Steps done, which is the number of the step to come."""
    return self._step

  @property
  def position(self) -> int:
    """Places of the order consumed."""
    return state_lib.position_after(self._stream, self._schedule, self._step)

  @property
  def stream(self) -> stream_lib.Stream:
    """Which instance each position holds."""
    return self._stream

  @property
  def local_iterator(self) -> OlmoIterator:
    """What a trainer's checkpointing holds on to: this very object, since the state is the same on all hosts."""
    return self

  def instance_ids(self, step: int) -> np.ndarray:
    """The instances of all rows of the global batch of a step, without reading them; -1 for padding."""
    rows = {size: np.arange(layout.batch) for size, layout in self._layouts.items()}
    whole = steps.StepDataset(self._source, self._stream, self._schedule, rows, first_step=step)
    return whole.instance_ids(step)

  def get_state(self) -> dict[str, Any]:
    """The position and the identity of the stream, as a small JSON-able dict, the same on all hosts."""
    return state_lib.make_state(self._stream, self._schedule, self._content, self._step)

  def set_state(self, state: dict[str, Any]) -> None:
    """Goes on where the state was taken; ResumeError, and no change, where it is of another stream."""
    first = self._beginning
    self._move_to(
        state_lib.read_state(
            state,
            first.stream,
            first.schedule,
            self._content,
            corpus=self._corpus,
            whole_batches=self._whole_batches,
        )
    )

  def go_to(self, step: int, position: int | None = None) -> None:
    """Goes on with a step: where the schedule has it, or at `position`, from which later steps are counted then.

    A trainer that restored a model from a checkpoint without a data state knows the step, and nothing else.
    """
    schedule = self._schedule
    if position is not None:
      schedule = schedule.anchored(step, position)
    schedule.start(step)
    self._move_to(state_lib.Start(step, schedule, self._stream))

  def reset(self) -> None:
    """Back to where this iterator began."""
    self._move_to(self._beginning)

  def start_prefetch(self) -> None:
    """Begins to prepare batches, so that the first one is there when it is asked for."""
    if self._batches is not None:
      return
    self._dataset = self._make_dataset(state_lib.Start(self._step, self._schedule, self._stream))
    if len(self._dataset):
      self._stream.order.prepare(self._schedule.start(self._step))
    self._batches = self._open(self._dataset)
    sender = _Sender(
        self._batches, self._stream, self._schedule, self._step, self._expanders, self._metrics
    )
    self._take = sender.send_next
    if self._prefetch.on_device > 0:
      self._ahead = ahead_lib.Ahead(sender.send_next, self._prefetch.on_device)
      self._take = self._ahead.take

  def close(self) -> None:
    """Ends the workers and threads; idempotent."""
    self._stop()
    super().close()

  def _move_to(self, start: state_lib.Start) -> None:
    self._stop()
    self._step, self._schedule, self._stream = start

  def _stop(self) -> None:
    # Who sends may be waiting for the next one. Asked for by name, since at interpreter exit the names of this module are gone.
    end = getattr(self._batches, "end", None)
    if end is not None:
      end()
    if self._ahead is not None:
      self._ahead.stop()
      self._ahead = None
    if self._batches is not None:
      self._batches.close()
      self._batches = None
    if self._dataset is not None:
      self._dataset.close()
      self._dataset = None
    self._take = _nothing_open

  def _make_dataset(self, start: state_lib.Start) -> steps.StepDataset:
    rows = {size: layout.rows for size, layout in self._layouts.items()}
    return steps.StepDataset(
        self._source,
        start.stream,
        start.schedule,
        rows,
        first_step=start.step,
        content=self._content,
        read_threads=self._prefetch.threads(),
    )

  def _open(self, dataset: steps.StepDataset) -> _InThreads | grain.DatasetIterator:
    if self._prefetch.workers == 0:
      return _InThreads(dataset, self._prefetch.batches)
    batches = workers.in_workers(
        dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)),
        workers=self._prefetch.workers,
        ahead=self._prefetch.per_worker,
    )
    opened = iter(batches)
    opened.start_prefetch()
    return opened


class _InThreads:
  """The batches of a dataset, made ahead by threads of this process; Grain's would take the interpreter for longer.

  Args:
    dataset: What is made.
    ahead: How many batches are ready or being made; 0 makes each when it is asked for.
  """

  def __init__(self, dataset: steps.StepDataset, ahead: int):
    make = functools.partial(_element, dataset, len(dataset))
    self._ahead: ahead_lib.Ahead[dict[str, np.ndarray]] | None = None
    if ahead:
      threads = workers.making_threads(ahead)
      self._ahead = ahead_lib.Ahead(make, ahead - threads, threads)
      self._take = self._ahead.take
    else:
      numbers = itertools.count()
      self._take = lambda: make(next(numbers))

  def __iter__(self) -> _InThreads:
    return self

  def __next__(self) -> dict[str, np.ndarray]:
    return self._take()

  def end(self) -> None:
    """Says that no more batches will be taken, without waiting for those who make them."""
    if self._ahead is not None:
      self._ahead.end()

  def close(self) -> None:
    """Ends the threads."""
    if self._ahead is not None:
      self._ahead.stop()


def _element(dataset: steps.StepDataset, length: int, index: int) -> dict[str, np.ndarray]:
  if index >= length:
    raise StopIteration
  return dataset[index]


def _nothing_open() -> Sent:
  """What `take` is before anything is open and after it was closed."""
  raise StopIteration


def _padding(layout: layout_lib.BatchLayout) -> dict[str, np.ndarray]:
  zeros = np.zeros((len(layout.rows), layout.length), np.int32)
  names = ("inputs", "targets")
  return {
      f"{name}{suffix}": zeros for name in names for suffix in ("", "_position", "_segmentation")
  }
