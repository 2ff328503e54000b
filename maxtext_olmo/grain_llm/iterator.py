"""The iterator that the `make_grain_llm_*` functions return: global batches, epochs, and a state.

`Batches` defines this host's batches: mixing, the batch schedule, prefetching, and the end of the
data. If all members are random access, the rows of step k follow from k alone, and worker processes
make whole batches. Otherwise rows are taken one after the other, and worker processes read the
documents that they are made of.

The state is that of `devices.grain_state`, with the rows taken as `position`. Its identity names
the stream of the whole run, so it is the same on all hosts. If rows are random access, a run may
resume from the position with another batch size.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import grain
import jax
import numpy as np

from maxtext_olmo import grain_compat
from maxtext_olmo import metrics as metrics_lib
from maxtext_olmo.devices import grain_state
from maxtext_olmo.devices import layout as layout_lib
from maxtext_olmo.devices import multihost
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import OrderError
from maxtext_olmo.errors import ResumeError
from maxtext_olmo.grain_llm import records as records_lib
from maxtext_olmo.grain_llm import row_dataset
from maxtext_olmo.grain_llm import rows_by_position
from maxtext_olmo.grain_llm import streams
from maxtext_olmo.order import interleave
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.order import status
from maxtext_olmo.rows import prefetch

# A plan of up to this many documents is counted at construction, which takes seconds.
COUNTED_AT_ONCE = 1_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batches:
  """The batches that the arguments of `make_grain_multihost_iterator` define.

  Schedules here count the rows that this host's batches take: from the stream that all hosts share
  or, if each host has a share of the documents, from its own stream. `ahead` is 0 if nothing is
  prefetched.
  """

  datasets: list[grain.IterDataset]
  weights: list[float]
  lengths: list[int] | None
  mesh: jax.sharding.Mesh
  global_schedule: schedule_lib.BatchSchedule
  hosts: int
  workers: int
  ahead: int
  drop_remainder: bool
  batch_class: type
  repeat: bool
  spec: jax.sharding.PartitionSpec

  def __post_init__(self) -> None:
    if self.batch_class is not dict and not dataclasses.is_dataclass(self.batch_class):
      raise ConfigError(f"batch_class must be dict or a data class, got {self.batch_class!r}.")

  @functools.cached_property
  def _infos(self) -> list[row_dataset.RowInfo]:
    return [
        dataset.info if isinstance(dataset, row_dataset.RowDataset) else row_dataset.RowInfo()
        for dataset in self.datasets
    ]

  @functools.cached_property
  def info(self) -> row_dataset.RowInfo:
    """The properties of all members together."""
    each = self._infos
    for name in ("shard", "length"):
      values = {getattr(info, name) for info in each}
      if len(values) > 1:
        raise ConfigError(
            f"All datasets of a mix must have the same {name}, found {sorted(map(str, values))}."
        )
    if len(each) == 1:
      return each[0]
    counts = interleave.counts_of_weights(self.weights)
    hosts = max(len(info.version_1) for info in each)
    old = [[info.version_1[host % len(info.version_1)] for info in each] for host in range(hosts)]
    return row_dataset.RowInfo(
        length=each[0].length,
        shard=each[0].shard,
        packed=any(info.packed for info in each),
        split=any(info.split for info in each),
        endless=(any if self.repeat else all)(info.endless for info in each),
        identity={"mix": list(counts), "members": [dict(info.identity) for info in each]},
        version_1=tuple(f"mix by {counts} of: {'; '.join(members)}" for members in old),
        host=max(info.host for info in each),
    )

  @functools.cached_property
  def rows(self) -> rows_by_position.RowsByPosition | None:
    """The rows, mixed, if they are random access."""
    sources: list[Any] = [getattr(dataset, "rows", None) for dataset in self.datasets]
    if None in sources:
      return None
    if len(sources) == 1:
      return sources[0]
    return rows_by_position.MixedRecords(sources, self.weights, repeat=self.repeat)

  @property
  def _own_rows(self) -> bool:
    """True if there are several hosts and each has its own rows."""
    return self.info.shard == "slice" and self.hosts > 1

  @functools.cached_property
  def schedule(self) -> schedule_lib.BatchSchedule:
    """The schedule that a run begins with."""
    if self.info.shard == "batch":
      return self.global_schedule
    stages = []
    for step, size in self.global_schedule.stages:
      if size % self.hosts:
        raise ConfigError(
            f"A batch of {size} rows (from step {step} on) does not divide over {self.hosts} hosts."
        )
      stages.append((step, size // self.hosts))
    return schedule_lib.BatchSchedule(tuple(stages))

  @functools.cached_property
  def _mine(self) -> dict[int, np.ndarray]:
    """The rows of a batch that this host holds, for each size of the schedule."""
    rows_spec = jax.sharding.PartitionSpec(*self.spec[:1])
    sizes = self.global_schedule.sizes
    layouts = [layout_lib.BatchLayout(self.mesh, rows_spec, size, 1) for size in sizes]
    if self.info.shard == "batch":
      return {layout.batch: layout.rows for layout in layouts}
    return {size: np.arange(size) for size in self.schedule.sizes}

  def loader(self, schedule: schedule_lib.BatchSchedule) -> grain.IterDataset:
    """Returns this host's batches for a schedule, from step 0 on."""
    batching = rows_by_position.Batching(
        schedule, self._mine, self.info.length, self.drop_remainder
    )
    collated = functools.partial(records_lib.collate, batch_class=self.batch_class)
    if self.rows is not None:
      batches = rows_by_position.RowBatches(self.rows, batching, self.num_steps(schedule))
      made = prefetch.PrefetchedDataset(batches, workers=self.workers, ahead=self.ahead)
      return made.map(collated)
    members = [
        dataset.open(self.workers, self.ahead)
        if isinstance(dataset, row_dataset.RowDataset)
        else dataset
        for dataset in self.datasets
    ]
    if self.repeat:
      members = [grain_compat.RepeatIterDataset(stream) for stream in members]
    stream = members[0] if len(members) == 1 else grain.IterDataset.mix(members, self.weights)
    made = streams.StreamBatches(stream, batching).map(collated)
    if not self.ahead:
      return made
    return grain_compat.ThreadPrefetchIterDataset(made, prefetch_buffer_size=self.ahead)

  @property
  def tail(self) -> Callable[[], Any] | None:
    """Makes an empty batch, which is then padded; None if all hosts end at the same step."""
    if self.rows is not None or not self._own_rows or self.info.endless:
      return None
    return lambda: records_lib.collate(records_lib.stack([], 0, self.info.length), self.batch_class)

  @functools.cached_property
  def settled(self) -> bool:
    """True if the length of an epoch is known now, and hence on all hosts, or never will be.

    Only then do epochs end by it; otherwise only the data ends them.
    """
    if self.rows is None:
      return True
    # Hosts that pack their own documents have epochs of unequal length, so only the data ends them.
    return self.rows.settle(COUNTED_AT_ONCE) and not (self.info.packed and self._own_rows)

  def num_steps(self, schedule: schedule_lib.BatchSchedule) -> int | None:
    """Returns the number of steps until the end, which is the same on all hosts.

    None if there is no end, or if it is not known.
    """
    rows = self.rows
    if rows is None or rows.endless:
      return None
    counts = [rows.num_rows]
    if self._own_rows:
      counts = [self._rows_of_host(rows, host) for host in range(self.hosts)]
    if counts[0] is None:
      return None
    steps = [rows_by_position.steps_of(schedule, n or 0, self.drop_remainder) for n in counts]
    return min(steps) if self.drop_remainder else max(steps)

  def _rows_of_host(self, rows: rows_by_position.RowsByPosition, host: int) -> int | None:
    counts = [None if info.endless else info.host_rows[host] for info in self._infos]
    return rows.total(counts) if isinstance(rows, rows_by_position.MixedRecords) else counts[0]

  def epoch_steps(self, schedule: schedule_lib.BatchSchedule, first: int) -> int | None:
    """Returns the number of steps of an epoch that begins with step `first`, up to the data's end.

    For rows that are packed or filtered as they stream, it is the largest possible number. None if
    even that is not known.
    """
    count: int | None = None
    if self.lengths is None:
      return None
    if self.info.packed and self.rows is not None:
      count = self.rows.epoch_rows
    elif not self.info.split:
      total = sum(self.weights)
      count = max(int(n / (w / total)) for n, w in zip(self.lengths, self.weights))
    if count is None:
      return None
    # Counted in rows of all hosts, of which each host has a fixed share.
    scale = 1 if self.info.shard == "batch" else self.hosts
    end = schedule.start(first) * scale + count
    end = end // scale if self.drop_remainder else -(-end // scale)
    last = rows_by_position.steps_of(schedule, end, self.drop_remainder)
    steps = self.num_steps(schedule)
    return max(0, (last if steps is None else min(last, steps)) - first)

  def why_no_length(self) -> str:
    """Returns why the length of an epoch is not known."""
    if self.lengths is None:
      return "it was made without dataset_lengths."
    if self.rows is None:
      return (
          "how many rows documents make is known only once they are split. packing='planned' knows"
          " it; otherwise count steps yourself."
      )
    if self.info.endless:
      return "the data has no end, and is too large to count its epochs before the first batch."
    return "the packing plan is still being counted; ask again later."

  def check(self, saved: grain_state.GrainState) -> None:
    """Raises ResumeError if a state belongs to another stream."""
    info, was = self.info, saved.identity
    if isinstance(was, str):
      # The state of random-access rows is the same on all hosts, so any host's may be read.
      known = info.version_1 if self.rows is not None else (info.version_1[info.host],)
      if was in known:
        return
      lines = [f"  it was saved by {was}", f"  this is {' or '.join(sorted(set(known)))}"]
    else:
      now, was = dict(info.identity), dict(was or {})
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
  """Iterates over the global batches of a language-model pipeline, epoch after epoch.

  Args:
    batches: Batches of this host.
    **kwargs: As for `MultiHostDataLoadIterator`.
  """

  def __init__(self, batches: Batches, **kwargs: Any):
    self._batches = batches
    self._schedule = batches.schedule
    self._metrics = metrics_lib.Metrics()
    length = self._epoch_length(0)  # May count a plan, so that the loader knows its end.
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
    """Returns `batches` and `wait_seconds`; these pipelines do not measure the stages."""
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
      )
    self._batches.check(saved)
    schedule = self._batches.schedule
    if schedule.start(saved.step) != saved.position and self._batches.rows is not None:
      schedule = schedule.anchored(saved.step, saved.position)
      # The epoch with the old batch sizes ends here, at the end of one of its batches.
      saved = dataclasses.replace(saved, epoch_start=saved.step)
    with self._lock:
      self._use(schedule)
      length = self._epoch_length(saved.epoch_start)
      if length is not None and saved.step - saved.epoch_start > length:
        # It was saved in an epoch that had no length then, so the next one begins here.
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
    """Returns the number of steps after which an epoch that begins with step `first` ends."""
    if not self._batches.settled:
      return None
    return self._batches.epoch_steps(self._schedule, first)

  def _count_ahead(self) -> None:
    if self._batches.rows is not None:
      self._batches.rows.count_ahead(self.position)

  def _use(self, schedule: schedule_lib.BatchSchedule) -> None:
    """Loads batches by another schedule."""
    if schedule != self._schedule:
      self._close_loader()
      self._schedule = schedule
      self.dataloader = self._batches.loader(schedule)
      self.local_iterator = iter(self.dataloader)

  def _close_loader(self) -> None:
    super()._close()
    # Ends Grain's threads now, not at interpreter exit, when the modules they use may be gone.
    self.local_iterator = _Closed()


class _Closed(Iterator[Any]):
  """Stands in for a data iterator that was closed."""

  def __next__(self) -> Any:
    raise ValueError("This iterator has been closed.")

  get_state = __next__
