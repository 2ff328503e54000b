"""This host's batches of a Grain LLM pipeline: mixing, schedule, prefetching, and the data's end.

If all datasets of the mix are random access, the rows of step k depend only on k, and worker
processes make whole batches. Otherwise, rows are taken one after another, and worker processes only
read the documents.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import grain
import jax
import numpy as np

from maxtext_olmo import grain_compat
from maxtext_olmo.devices import grain_state
from maxtext_olmo.devices import layout as layout_lib
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import ResumeError
from maxtext_olmo.grain_llm import records as records_lib
from maxtext_olmo.grain_llm import row_batches
from maxtext_olmo.grain_llm import row_dataset
from maxtext_olmo.grain_llm import rows_by_position
from maxtext_olmo.grain_llm import streams
from maxtext_olmo.order import interleave
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.rows import prefetch

# The rows of a plan of up to this many documents are counted at construction, which takes a few
# seconds.
COUNTED_AT_ONCE = 1_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batches:
  """The batches that the arguments of `make_grain_multihost_iterator` define.

  Except for `global_schedule`, schedules count rows of the stream that this host reads. That is the
  stream that all hosts share (`shard="batch"`), or the host's own stream (`shard="slice"`). `ahead`
  is the size of the prefetch buffer; 0 disables prefetching.
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
    """The properties of the mix as a whole."""
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
    """The rows of the mix; None if they are not random access."""
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
            f" Choose a multiple of {self.hosts}."
        )
      stages.append((step, size // self.hosts))
    return schedule_lib.BatchSchedule(tuple(stages))

  @functools.cached_property
  def _mine(self) -> dict[int, np.ndarray]:
    """The rows of a batch that this host holds, for each batch size of the schedule."""
    rows_spec = jax.sharding.PartitionSpec(*self.spec[:1])
    sizes = self.global_schedule.sizes
    layouts = [layout_lib.BatchLayout(self.mesh, rows_spec, size, 1) for size in sizes]
    if self.info.shard == "batch":
      return {layout.batch: layout.rows for layout in layouts}
    return {size: np.arange(size) for size in self.schedule.sizes}

  def loader(self, schedule: schedule_lib.BatchSchedule) -> grain.IterDataset:
    """Returns this host's batches for a schedule, from step 0 on."""
    batching = row_batches.Batching(schedule, self._mine, self.info.length, self.drop_remainder)
    collated = functools.partial(records_lib.collate, batch_class=self.batch_class)
    if self.rows is not None:
      batches = row_batches.RowBatches(self.rows, batching, self.num_steps(schedule))
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
    """A function that makes a batch without rows, to be padded; None if no host ends early."""
    if self.rows is not None or not self._own_rows or self.info.endless:
      return None
    return lambda: records_lib.collate(records_lib.stack([], 0, self.info.length), self.batch_class)

  @functools.cached_property
  def settled(self) -> bool:
    """True if the length of an epoch is already known on all hosts, or never will be.

    Otherwise, some hosts may learn the length before others, so epochs end only with the data.
    """
    if self.rows is None:
      return True
    # If each host packs its own documents, their epochs differ in length and end with the data.
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
    steps = [row_batches.steps_of(schedule, n or 0, self.drop_remainder) for n in counts]
    return min(steps) if self.drop_remainder else max(steps)

  def _rows_of_host(self, rows: rows_by_position.RowsByPosition, host: int) -> int | None:
    counts = [None if info.endless else info.host_rows[host] for info in self._infos]
    return rows.total(counts) if isinstance(rows, rows_by_position.MixedRecords) else counts[0]

  def epoch_steps(self, schedule: schedule_lib.BatchSchedule, first: int) -> int | None:
    """Returns the number of steps of an epoch that begins with step `first`, up to the data's end.

    For rows that are packed or filtered as they stream, this is an upper bound. Returns None if not
    even a bound is known.
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
    # `count` is the number of rows of all hosts. A schedule of one host counts only its share.
    scale = 1 if self.info.shard == "batch" else self.hosts
    end = schedule.start(first) * scale + count
    end = end // scale if self.drop_remainder else -(-end // scale)
    last = row_batches.steps_of(schedule, end, self.drop_remainder)
    steps = self.num_steps(schedule)
    return max(0, (last if steps is None else min(last, steps)) - first)

  def why_no_length(self) -> str:
    """Returns why the length of an epoch is not known."""
    if self.lengths is None:
      return "it was made without dataset_lengths."
    if self.rows is None:
      return (
          "the number of rows that the documents make is known only once they are split."
          " packing='planned' counts the rows in advance; otherwise count steps yourself."
      )
    if self.info.endless:
      return "the data has no end and has too many documents to count an epoch's rows in advance."
    return "the rows of the packing plan are still being counted; ask again later."

  def check(self, saved: grain_state.GrainState) -> None:
    """Raises ResumeError if a state belongs to another stream."""
    info, was = self.info, saved.identity
    if isinstance(was, str):
      # The state of random-access rows is the same on all hosts, so any host's state is valid.
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
