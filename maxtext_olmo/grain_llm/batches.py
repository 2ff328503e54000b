"""Rows → this host's batches: mixing, the batch schedule, who prepares them, and how they end.

Where all members are random access, the rows of step k are known from k alone, and worker processes make whole batches.
Else rows are taken one after the other, and worker processes read the documents that they are made of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import grain
import jax
import numpy as np

from maxtext_olmo.devices import layout as sharding_lib
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.grain_llm import iterator as iterator_lib
from maxtext_olmo.grain_llm import row_dataset
from maxtext_olmo.order import interleave
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.rows import prefetch
from maxtext_olmo.rows import records as tokens_lib
from maxtext_olmo.rows import row_steps
from maxtext_olmo.rows import rows as rows_lib

# Packing the lengths of so many documents takes a few seconds; of more, it is left to the background.
COUNTED_AT_ONCE = 1_000_000


def rampup_schedule(
    batch_size: int, factors: Mapping[int, float] | None
) -> schedule_lib.BatchSchedule:
  """The batch size, times the factor of the last boundary that a step has reached."""
  stages = {0: batch_size}
  for step, factor in sorted((factors or {}).items()):
    size = int(batch_size * factor)
    if step < 0 or size < 1:
      raise ConfigError(
          f"batch_rampup_factors={dict(factors or {})}: from step {step} on, a batch would have {size} rows."
      )
    stages[step] = size
  return schedule_lib.BatchSchedule(tuple(sorted(stages.items())))


class Collate(grain.transforms.Map):
  """A dict of arrays → a batch of some class, which takes the fields it has; `dict` takes all."""

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
  """The choices of `make_grain_multihost_iterator`, and how they become batches."""

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
    facts = self._facts()
    spec = sharding_lib.partition_spec(self.mesh, self.data_sharding)
    rows = self._random_access_rows()
    local = self.schedule if facts.shard == "batch" else self._local_schedule()
    mine = self._mine(facts, local, spec)
    if rows is not None:
      source = rows  # bound once, for the closure

      def make_loader(schedule: schedule_lib.BatchSchedule) -> Iterable[Any]:
        batches = row_steps.RowStepDataset(
            source,
            schedule,
            mine,
            length=facts.length,
            num_steps=self._agreed_steps(facts, source, schedule),
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
            length=facts.length,
            drop_remainder=self.drop_remainder,
        ).map(Collate(self.batch_class))
        if self.threads or self.workers:
          made = grain.experimental.ThreadPrefetchIterDataset(
              made, prefetch_buffer_size=max(1, self.ahead)
          )
        return made

    uneven = rows is None and facts.shard == "slice" and self.hosts > 1 and not facts.endless
    # Hosts that pack documents of their own have epochs of their own, which no batch of all hosts could end with.
    own_epochs = facts.packed and facts.shard == "slice" and self.hosts > 1
    settled = rows is None or (rows.settle(COUNTED_AT_ONCE) and not own_epochs)
    return iterator_lib.LLMIterator(
        make_loader,
        local,
        self.mesh,
        lengths=iterator_lib.Lengths(
            lambda schedule, first: self._epoch_length(facts, rows, schedule, first),
            lambda schedule, first: self._rest(facts, rows, schedule, first),
            settled,
            lambda: self._why_unknown(facts, rows),
        ),
        identity=facts.identity,
        rows=rows,
        dataset_size=None if self.lengths is None else sum(self.lengths),
        reset_after_epoch=reset_after_epoch,
        pad_shapes=pad_shapes or (facts.length is None and self.hosts > 1),
        data_sharding=spec,
        tail=(lambda: self._no_rows(facts)) if uneven else None,
    )

  @property
  def _ahead(self) -> int:
    return max(1, self.ahead) if self.threads or self.workers else 0

  def _facts(self) -> row_dataset.Facts:
    """What holds for all members together."""
    each = [
        dataset.facts
        if isinstance(dataset, row_dataset.RowDataset)
        else row_dataset.Facts(length=None, shard="slice", packed=False, endless=False)
        for dataset in self.datasets
    ]
    for name in ("shard", "length"):
      values = {getattr(facts, name) for facts in each}
      if len(values) > 1:
        raise ConfigError(
            f"All datasets of a mix must have one {name}, found {sorted(map(str, values))}."
        )
    mixed = "" if len(each) == 1 else f"mix by {interleave.counts_of_weights(self.weights)} of: "
    ends = [facts.endless for facts in each]
    return row_dataset.Facts(
        length=each[0].length,
        shard=each[0].shard,
        packed=any(facts.packed for facts in each),
        endless=any(ends) if self.repeat else all(ends),
        identity=mixed + "; ".join(facts.identity for facts in each),
    )

  def _random_access_rows(self) -> rows_lib.RowSource | None:
    sources = [getattr(dataset, "rows", None) for dataset in self.datasets]
    if any(source is None for source in sources):
      return None
    if len(sources) == 1:
      return sources[0]
    return rows_lib.MixedRows(sources, self.weights, repeat=self.repeat)  # type: ignore[arg-type]

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
      facts: row_dataset.Facts,
      local: schedule_lib.BatchSchedule,
      spec: jax.sharding.PartitionSpec,
  ) -> dict[int, np.ndarray]:
    """For each size of the local schedule, the rows of a batch that this host holds."""
    rows_spec = jax.sharding.PartitionSpec(*spec[:1])
    layouts = {
        size: sharding_lib.BatchLayout(self.mesh, rows_spec, size, 1)
        for size in self.schedule.sizes
    }
    if facts.shard == "batch":
      return {size: layout.rows for size, layout in layouts.items()}
    return {size: np.arange(size) for size in local.sizes}

  def _agreed_steps(
      self, facts: row_dataset.Facts, rows: rows_lib.RowSource, local: schedule_lib.BatchSchedule
  ) -> int | None:
    """Steps until the end, the same on all hosts: found from all hosts' rows, which all of them know."""
    if rows.endless:
      return None
    if facts.shard == "batch" or self.hosts == 1:
      count = rows.num_rows
      return None if count is None else row_steps.steps_of(local, count, self.drop_remainder)
    counts = [self._host_total(rows, host) for host in range(self.hosts)]
    steps = [row_steps.steps_of(local, count, self.drop_remainder) for count in counts]
    return min(steps) if self.drop_remainder else max(steps)

  def _host_total(self, rows: rows_lib.RowSource, host: int) -> int:
    counts: list[int | None] = []
    for dataset in self.datasets:
      facts = dataset.facts  # type: ignore[attr-defined]
      counts.append(None if facts.endless else facts.host_rows[host])
    if isinstance(rows, rows_lib.MixedRows):
      return rows.total(counts) or 0
    return counts[0] or 0

  def _epoch_length(
      self,
      facts: row_dataset.Facts,
      rows: rows_lib.RowSource | None,
      local: schedule_lib.BatchSchedule,
      first: int,
  ) -> int | None:
    """The steps of an epoch that begins with a step; no more than there is data for."""
    count = self._epoch_rows(facts, rows)
    if count is None:
      return None
    # In rows of all hosts: a host's own are a fixed part of them, whatever its schedule was anchored to.
    scale = 1 if facts.shard == "batch" else self.hosts
    begin = local.start(first) * scale
    end = -(-(begin + count) // scale) if not self.drop_remainder else (begin + count) // scale
    last = row_steps.steps_of(local, end, self.drop_remainder)
    total = None if rows is None else self._agreed_steps(facts, rows, local)
    if total is not None:
      last = min(last, total)
    return max(0, last - first)

  def _rest(
      self,
      facts: row_dataset.Facts,
      rows: rows_lib.RowSource | None,
      local: schedule_lib.BatchSchedule,
      first: int,
  ) -> int | None:
    steps = None if rows is None else self._agreed_steps(facts, rows, local)
    return None if steps is None else max(0, steps - first)

  def _epoch_rows(self, facts: row_dataset.Facts, rows: rows_lib.RowSource | None) -> int | None:
    if facts.packed:
      return None if rows is None else rows.epoch_rows
    if self.lengths is None:
      return None
    total = sum(self.weights)
    return max(int(n / (w / total)) for n, w in zip(self.lengths, self.weights))

  def _why_unknown(self, facts: row_dataset.Facts, rows: rows_lib.RowSource | None) -> str:
    if facts.packed and rows is None:
      return (
          "how many rows documents make is known only once they are packed, split or filtered. packing='planned' knows"
          " it; else count steps yourself."
      )
    if facts.packed and facts.endless:
      return "the data goes on without end, and is too large to count its epochs before the first batch."
    if facts.packed:
      return "the packing plan is still being counted; ask again later."
    return "it was made without dataset_lengths."

  def _no_rows(self, facts: row_dataset.Facts) -> Any:
    """A batch without rows; it grows, in padding, to the shape of the others."""
    return Collate(self.batch_class).map(tokens_lib.stack([], 0, facts.length))
