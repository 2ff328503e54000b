"""Delivers batches to the devices: prefetches compact batches and sends them ahead of time.

step dataset ──▶ threads or workers make compact batches ──▶ a thread sends them ──▶ take()

A compact batch holds only what the devices need to compute the full arrays (see `devices.expand`).
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Mapping

import jax
import numpy as np

from maxtext_olmo import cores
from maxtext_olmo import metrics as metrics_lib
from maxtext_olmo.corpus import storage as storage_lib
from maxtext_olmo.devices import expand
from maxtext_olmo.devices import layout as layout_lib
from maxtext_olmo.loader import state as state_lib
from maxtext_olmo.loader import storage_metrics
from maxtext_olmo.rows import batch as batch_lib
from maxtext_olmo.rows import prefetch as prefetch_lib
from maxtext_olmo.rows import spool_filler
from maxtext_olmo.rows import steps

# Steps that a new worker process reads in addition to those whose batches it keeps ready.
_READ_AHEAD_BY_WORKER = 5


@dataclasses.dataclass(frozen=True)
class Prefetch:
  """The number of batches to make in advance.

  If `workers` is positive, each of that many worker processes keeps `per_worker` batches ready.
  Otherwise, threads keep `batches` batches ready. In addition, up to `on_device` batches are on the
  devices already or on their way there.
  """

  workers: int = 0
  per_worker: int = 1
  batches: int = 2
  on_device: int = 1

  @property
  def threads(self) -> int:
    """The number of threads that make batches; of two, one can read while the other checks."""
    return min(2, max(1, cores.available_cores() - 1))

  @property
  def batches_in_memory(self) -> int:
    """The largest number of this host's batches that are in its memory at once.

    Besides the batches that are ready or being made, one is being sent, and those on the devices
    may share memory with the host.
    """
    made = self.workers * (self.per_worker + 1) if self.workers else self.batches
    return made + 1 + self.on_device


class Delivery:
  """The batches of a dataset, from its first step on, prefetched and sent to the devices.

  It does not reference the iterator, so that its threads do not keep a dropped iterator alive.

  Args:
    dataset: This host's compact batches.
    start: The first step, its schedule and its stream.
    expanders: For each batch size, the expander that makes full arrays from compact batches.
    prefetch: How many batches to make in advance.
    metrics: Records the cost of each batch.
    storage: Storage whose counters include the requests of worker processes.
    fill_spool: Whether to fill the spool, if there is one, with the data of later steps.
  """

  def __init__(
      self,
      dataset: steps.StepDataset,
      start: state_lib.Start,
      expanders: Mapping[int, expand.Expander],
      prefetch: Prefetch,
      metrics: metrics_lib.Metrics,
      storage: storage_lib.Storage | None = None,
      fill_spool: bool = False,
  ):
    self._dataset = dataset
    self._step = start.step
    self._filler: spool_filler.SpoolFiller | None = None
    self._batches = prefetch_lib.PrefetchedIterator(
        dataset,
        prefetch.workers,
        prefetch.per_worker if prefetch.workers else prefetch.batches,
        prefetch.threads,
    )
    try:
      self._batches.start_prefetch()
      sender = _Sender(self._batches, start, expanders, metrics, storage)
      self._sent = prefetch_lib.Prefetcher(sender.send, prefetch.on_device)
      if fill_spool:
        self._filler = spool_filler.SpoolFiller.start(
            dataset, start.step, prefetch.workers * (prefetch.per_worker + _READ_AHEAD_BY_WORKER)
        )
    except BaseException:
      self._batches.close()
      dataset.close()
      raise

  @property
  def ready(self) -> int:
    """The number of batches that have been sent but not yet taken."""
    return self._sent.ready

  def take(self) -> dict[str, jax.Array]:
    """Returns the global batch of the next step; raises StopIteration at the end of the stream."""
    batch = self._sent.take()()
    self._step += 1
    if self._filler is not None:
      self._filler.advance(self._step)
    return batch

  def metrics(self) -> dict[str, float]:
    """Returns the number of batches that are ready, and how far ahead the spool is filled."""
    found: dict[str, float] = {"queue_depth": self.ready}
    if self._filler is not None:
      found["spool_depth_steps"] = self._filler.depth_steps
      found["spool_depth_seconds"] = self._filler.depth_seconds
    return found

  def close(self, wait: bool = True) -> None:
    """Stops the threads and workers."""
    if self._filler is not None:
      self._filler.close(wait=wait)
    # Stop the batches first: the sending thread may be waiting for the next one.
    self._batches.close(wait=wait)
    self._sent.close(wait=wait)
    self._dataset.close()


@dataclasses.dataclass
class _Sender:
  """Takes compact batches and sends them to the devices, step by step."""

  batches: prefetch_lib.PrefetchedIterator
  start: state_lib.Start
  expanders: Mapping[int, expand.Expander]
  metrics: metrics_lib.Metrics
  storage: storage_lib.Storage | None

  def __post_init__(self) -> None:
    self.look_ahead = getattr(self.start.stream, "look_ahead", None)
    self.only_expander = next(iter(self.expanders.values())) if len(self.expanders) == 1 else None

  def send(self, number: int) -> Callable[[], dict[str, jax.Array]]:
    """Sends the batch of step `start.step + number`; returns a function that returns its arrays."""
    local = next(self.batches)
    began = time.perf_counter()
    step, schedule = self.start.step + number, self.start.schedule
    expander = self.only_expander or self.expanders[schedule.size(step)]
    placed = expander.place(local)
    self.metrics.made(
        **dict(zip(batch_lib.COST, local["cost"].tolist())),
        bytes_to_device=placed.bytes_crossed,
        transfer_seconds=time.perf_counter() - began,
    )
    if "traffic" in local:
      storage_metrics.add_traffic(self.storage, local["traffic"])
    if self.look_ahead is not None:
      self.look_ahead(schedule.position(step + 1))
    return functools.partial(expander.finish, placed)


def padding_batch(
    layout: layout_lib.BatchLayout, expander: expand.Expander, extras: Iterable[str]
) -> dict[str, jax.Array]:
  """Returns a global batch of padding rows, with the given extra arrays."""
  rows = len(layout.rows)
  batch: dict[str, np.ndarray] = {
      "tokens": np.zeros((rows, layout.length), np.int32),
      "used": np.zeros(rows, np.int64),
      "trained": np.ones(rows, np.bool_),
      **{name: np.full(rows, -1, np.int32) for name in extras},
  }
  return expander.finish(expander.place(batch))
