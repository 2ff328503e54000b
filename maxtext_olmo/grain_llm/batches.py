"""Rows → this host's batches: mixing, the batch schedule, prefetching, and the end of the data.

If all members are random access, the rows of step k follow from k alone, and worker processes make
whole batches. Otherwise rows are taken one after the other, and worker processes read the documents
that they are made of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import grain
import jax
import numpy as np

from maxtext_olmo.devices import layout as layout_lib
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.grain_llm import iterator as iterator_lib
from maxtext_olmo.grain_llm import mixed_rows
from maxtext_olmo.grain_llm import records as records_lib
from maxtext_olmo.grain_llm import row_dataset
from maxtext_olmo.grain_llm import row_source
from maxtext_olmo.grain_llm import steps as steps_lib
from maxtext_olmo.order import mixture
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.rows import prefetch

# A plan of up to this many documents is counted at construction, which takes seconds.
COUNTED_AT_ONCE = 1_000_000


def rampup_schedule(
    batch_size: int, factors: Mapping[int, float] | None
) -> schedule_lib.BatchSchedule:
  """Returns the schedule of a batch size times the factor of the last boundary that was reached."""
  stages = {0: batch_size}
  for step, factor in sorted((factors or {}).items()):
    size = int(batch_size * factor)
    if step < 0 or size < 1:
      raise ConfigError(
          f"batch_rampup_factors={dict(factors or {})}: from step {step} on, a batch would have"
          f" {size} rows."
      )
    stages[step] = size
  return schedule_lib.BatchSchedule(tuple(sorted(stages.items())))


class Collate(grain.transforms.Map):
  """Turns a dict of arrays into a batch class, which takes the fields it has; `dict` takes all."""

  def __init__(self, batch_class: type):
    self._class = batch_class
    self._fields: set[str] | None = None
    if batch_class is not dict:
      if not dataclasses.is_dataclass(batch_class):
        raise ConfigError(f"batch_class must be dict or a data class, got {batch_class!r}.")
      self._fields = {field.name for field in dataclasses.fields(batch_class)}

  def map(self, element: dict[str, np.ndarray]) -> Any:
    if self._fields is None:
      return element
    return self._class(**{name: v for name, v in element.items() if name in self._fields})


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchMaker:
  """Makes the iterator that the arguments of `make_grain_multihost_iterator` ask for."""

  datasets: list[grain.IterDataset]
  weights: list[float]
  lengths: list[int] | None
  mesh: jax.sharding.Mesh
  schedule: schedule_lib.BatchSchedule
  hosts: int
  workers: int
  ahead: int
  threads: bool
  drop_remainder: bool
  batch_class: type
  repeat: bool
  data_sharding: Any

  def make(self, *, reset_after_epoch: bool, pad_shapes: bool) -> iterator_lib.LLMIterator:
    info = self._info()
    spec = layout_lib.partition_spec(self.mesh, self.data_sharding)
    rows = self._random_access_rows()
    local = self.schedule if info.shard == "batch" else self._local_schedule()
    mine = self._mine(info, local, spec)
    if rows is not None:
      source = rows  # bound once, for the closure

      def make_loader(schedule: schedule_lib.BatchSchedule) -> Iterable[Any]:
        batches = steps_lib.RowStepDataset(
            source,
            schedule,
            mine,
            length=info.length,
            num_steps=self._agreed_steps(info, source, schedule),
            drop_remainder=self.drop_remainder,
        )
        made = prefetch.PrefetchedDataset(batches, workers=self.workers, ahead=self._ahead)
        return made.map(Collate(self.batch_class))

    else:

      def make_loader(schedule: schedule_lib.BatchSchedule) -> Iterable[Any]:
        made = row_dataset.StreamBatches(
            self._mixed_stream(),
            schedule,
            mine,
            length=info.length,
            drop_remainder=self.drop_remainder,
        ).map(Collate(self.batch_class))
        if self.threads or self.workers:
          made = grain.experimental.ThreadPrefetchIterDataset(
              made, prefetch_buffer_size=max(1, self.ahead)
          )
        return made

    uneven = rows is None and info.shard == "slice" and self.hosts > 1 and not info.endless
    # Hosts that pack documents of their own have epochs of unequal length, so none ends a batch.
    own_epochs = info.packed and info.shard == "slice" and self.hosts > 1
    settled = rows is None or (rows.settle(COUNTED_AT_ONCE) and not own_epochs)
    return iterator_lib.LLMIterator(
        make_loader,
        local,
        self.mesh,
        lengths=iterator_lib.Lengths(
            lambda schedule, first: self._epoch_length(info, rows, schedule, first),
            lambda schedule, first: self._rest(info, rows, schedule, first),
            settled,
            lambda: self._why_unknown(info, rows),
        ),
        stream=iterator_lib.Stream(
            identity=info.identity,
            # The state of random-access rows is the same on all hosts, so any host's may be read.
            version_1=frozenset(
                info.version_1 if rows is not None else [info.version_1[info.host]]
            ),
            per_process=rows is None and info.shard == "slice",
        ),
        rows=rows,
        dataset_size=None if self.lengths is None else sum(self.lengths),
        reset_after_epoch=reset_after_epoch,
        pad_shapes=pad_shapes or (info.length is None and self.hosts > 1),
        data_sharding=spec,
        tail=(lambda: self._no_rows(info)) if uneven else None,
    )

  @property
  def _ahead(self) -> int:
    return max(1, self.ahead) if self.threads or self.workers else 0

  def _info(self) -> row_dataset.RowInfo:
    """Returns what holds for all members together."""
    each = [
        dataset.info
        if isinstance(dataset, row_dataset.RowDataset)
        else row_dataset.RowInfo(length=None, shard="slice", packed=False, endless=False)
        for dataset in self.datasets
    ]
    for name in ("shard", "length"):
      values = {getattr(info, name) for info in each}
      if len(values) > 1:
        raise ConfigError(
            f"All datasets of a mix must have one {name}, found {sorted(map(str, values))}."
        )
    if len(each) == 1:
      return each[0]
    ends = [info.endless for info in each]
    counts = mixture.counts_of_weights(self.weights)
    hosts = max(len(info.version_1) for info in each)
    old = [[info.version_1[host % len(info.version_1)] for info in each] for host in range(hosts)]
    return row_dataset.RowInfo(
        length=each[0].length,
        shard=each[0].shard,
        packed=any(info.packed for info in each),
        endless=any(ends) if self.repeat else all(ends),
        identity={
            "mix": list(counts),
            "members": [dict(info.identity) for info in each],
        },
        version_1=tuple(f"mix by {counts} of: {'; '.join(members)}" for members in old),
        host=max(info.host for info in each),
    )

  def _random_access_rows(self) -> row_source.RowSource | None:
    sources = [getattr(dataset, "rows", None) for dataset in self.datasets]
    if any(source is None for source in sources):
      return None
    if len(sources) == 1:
      return sources[0]
    return mixed_rows.MixedRows(sources, self.weights, repeat=self.repeat)  # type: ignore[arg-type]

  def _mixed_stream(self) -> grain.IterDataset:
    streams = [
        dataset.open(self.workers, self._ahead)
        if isinstance(dataset, row_dataset.RowDataset)
        else dataset
        for dataset in self.datasets
    ]
    if self.repeat:
      streams = [grain.experimental.RepeatIterDataset(stream) for stream in streams]
    return streams[0] if len(streams) == 1 else grain.IterDataset.mix(streams, self.weights)

  def _local_schedule(self) -> schedule_lib.BatchSchedule:
    stages = []
    for step, size in self.schedule.stages:
      if size % self.hosts:
        raise ConfigError(
            f"A batch of {size} rows (from step {step} on) does not divide over {self.hosts} hosts."
        )
      stages.append((step, size // self.hosts))
    return schedule_lib.BatchSchedule(tuple(stages))

  def _mine(
      self,
      info: row_dataset.RowInfo,
      local: schedule_lib.BatchSchedule,
      spec: jax.sharding.PartitionSpec,
  ) -> dict[int, np.ndarray]:
    """Returns the rows of a batch that this host holds, for each size of the local schedule."""
    rows_spec = jax.sharding.PartitionSpec(*spec[:1])
    layouts = {
        size: layout_lib.BatchLayout(self.mesh, rows_spec, size, 1) for size in self.schedule.sizes
    }
    if info.shard == "batch":
      return {size: layout.rows for size, layout in layouts.items()}
    return {size: np.arange(size) for size in local.sizes}

  def _agreed_steps(
      self, info: row_dataset.RowInfo, rows: row_source.RowSource, local: schedule_lib.BatchSchedule
  ) -> int | None:
    """Returns the steps until the end, which all hosts find alike from the rows of all hosts."""
    if rows.endless:
      return None
    if info.shard == "batch" or self.hosts == 1:
      count = rows.num_rows
      return None if count is None else steps_lib.steps_of(local, count, self.drop_remainder)
    counts = [self._host_total(rows, host) for host in range(self.hosts)]
    steps = [steps_lib.steps_of(local, count, self.drop_remainder) for count in counts]
    return min(steps) if self.drop_remainder else max(steps)

  def _host_total(self, rows: row_source.RowSource, host: int) -> int:
    counts: list[int | None] = []
    for dataset in self.datasets:
      info = dataset.info  # type: ignore[attr-defined]
      counts.append(None if info.endless else info.host_rows[host])
    if isinstance(rows, mixed_rows.MixedRows):
      return rows.total(counts) or 0
    return counts[0] or 0

  def _epoch_length(
      self,
      info: row_dataset.RowInfo,
      rows: row_source.RowSource | None,
      local: schedule_lib.BatchSchedule,
      first: int,
  ) -> int | None:
    """Returns the steps of an epoch that begins with a step; no more than there is data for."""
    count = self._epoch_rows(info, rows)
    if count is None:
      return None
    # Counted in rows of all hosts, of which a host's own are a fixed part.
    scale = 1 if info.shard == "batch" else self.hosts
    begin = local.start(first) * scale
    end = -(-(begin + count) // scale) if not self.drop_remainder else (begin + count) // scale
    last = steps_lib.steps_of(local, end, self.drop_remainder)
    total = None if rows is None else self._agreed_steps(info, rows, local)
    if total is not None:
      last = min(last, total)
    return max(0, last - first)

  def _rest(
      self,
      info: row_dataset.RowInfo,
      rows: row_source.RowSource | None,
      local: schedule_lib.BatchSchedule,
      first: int,
  ) -> int | None:
    steps = None if rows is None else self._agreed_steps(info, rows, local)
    return None if steps is None else max(0, steps - first)

  def _epoch_rows(self, info: row_dataset.RowInfo, rows: row_source.RowSource | None) -> int | None:
    if info.packed:
      return None if rows is None else rows.epoch_rows
    if self.lengths is None:
      return None
    total = sum(self.weights)
    return max(int(n / (w / total)) for n, w in zip(self.lengths, self.weights))

  def _why_unknown(self, info: row_dataset.RowInfo, rows: row_source.RowSource | None) -> str:
    if info.packed and rows is None:
      return (
          "how many rows documents make is known only once they are packed, split or filtered."
          " packing='planned' knows it; otherwise count steps yourself."
      )
    if info.packed and info.endless:
      return "the data has no end, and is too large to count its epochs before the first batch."
    if info.packed:
      return "the packing plan is still being counted; ask again later."
    return "it was made without dataset_lengths."

  def _no_rows(self, info: row_dataset.RowInfo) -> Any:
    """Returns a batch without rows, which padding brings to the shape of the others."""
    return Collate(self.batch_class).map(records_lib.stack([], 0, info.length))
