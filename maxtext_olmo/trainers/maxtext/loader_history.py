"""Reconstructs the data that MaxText's own `olmo_grain` loader has read, including its defects.

The loader's sampler gives each host a block of the shuffled epoch. Grain shards by host once more,
so each host reads only every H-th record of its block. With H hosts, b rows per host and W workers,
row r of host h in the j-th batch since the loader started is record

    h + H · (w + W · (q · b + r))        with q, w = divmod(j, W)

of the host's block, plus an offset: after a restart from checkpoint N, the loader starts at N · b,
one batch too early. A record beyond the block belongs to the loader's next epoch, which therefore
begins H times too soon.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from maxtext_olmo import errors
from maxtext_olmo import progress as progress_lib
from maxtext_olmo.order import stored

_PIECE = 1 << 20
_STARTED = re.compile(
    r"OLMo grain loader: .*shard=\d+/(?P<hosts>\d+) per_host_batch=(?P<rows>\d+) "
    r".*resumed_step=(?P<resumed>\d+)"
)
_RESTORED = re.compile(r"restoring from this run's directory step (?P<label>\d+)")


@dataclasses.dataclass(frozen=True)
class Start:
  """One start of the trainer.

  Attributes:
    label: The checkpoint that the model was restored from; -1 for a new model.
    data_label: The step at which the loader resumed.
    hosts: The number of hosts that load data.
    rows_per_host: Rows that each host loads for a step.
    workers: Grain's worker processes per host.
  """

  label: int
  data_label: int
  hosts: int
  rows_per_host: int
  workers: int


@dataclasses.dataclass(frozen=True)
class Segment:
  """The steps of one start that no later restart discarded; both ends are inclusive."""

  start: Start
  first_step: int
  last_step: int

  @property
  def num_batches(self) -> int:
    """The number of batches that the loader produced."""
    return self.last_step - self.first_step + 1


@dataclasses.dataclass(frozen=True)
class History:
  """The number of times each instance was trained on.

  Attributes:
    counts: The count of each instance.
    num_rows: The number of rows that were trained on.
  """

  counts: np.ndarray
  num_rows: int

  @property
  def num_epochs(self) -> int:
    """The number of whole epochs in `num_rows` rows."""
    return self.num_rows // len(self.counts)

  @property
  def consumed(self) -> np.ndarray:
    """Whether each instance was consumed in this epoch: its count exceeds `num_epochs`."""
    return self.counts > self.num_epochs

  @property
  def num_distinct(self) -> int:
    """The number of instances that were trained on at least once."""
    return int(np.count_nonzero(self.counts))

  @property
  def num_repeated(self) -> int:
    """The number of rows that repeat an instance too early; 0 for an exact loader."""
    return int(np.maximum(self.counts.astype(np.int64) - self.num_epochs - 1, 0).sum())

  @property
  def num_missing(self) -> int:
    """The number of instances that should have been trained on by now, but were not."""
    return min(self.num_rows, len(self.counts)) - self.num_distinct


def segments(starts: Sequence[Start], last_label: int) -> list[Segment]:
  """Returns the steps of each start that remain in a model whose last checkpoint is `last_label`.

  A restart from checkpoint N discards the steps after N.
  """
  found = []
  end = last_label
  for start in reversed(starts):
    if start.label < end:
      found.append(Segment(start, start.label + 1, end))
      end = start.label
    if end < 0:
      break
  if end >= 0:
    raise errors.ConfigError(
        f"It is unknown how steps 0 to {end} were trained: the first start of the run is missing."
        " Add the log or the arguments of that start."
    )
  return found[::-1]


def read_starts(lines: Iterable[str], *, workers: int) -> list[Start]:
  """Reads the starts of a run from its log; MaxText's loader logs a line at each start.

  Args:
    lines: Log lines of one host or of all hosts; a start logged by several hosts counts once.
    workers: The number of worker processes per host, which the log does not contain.
  """
  starts: list[Start] = []
  pending: dict[str, int] | None = None
  for line in lines:
    if match := _STARTED.search(line):
      values = {name: int(value) for name, value in match.groupdict().items()}
      if values == pending:
        continue
      if pending is not None:
        starts.append(_start(pending, -1, workers))
      pending = values
    elif (match := _RESTORED.search(line)) and pending is not None:
      starts.append(_start(pending, int(match["label"]), workers))
      pending = None
  if pending is not None:
    starts.append(_start(pending, -1, workers))
  return [start for i, start in enumerate(starts) if i == 0 or start != starts[i - 1]]


def _start(values: dict[str, int], label: int, workers: int) -> Start:
  return Start(label, values["resumed"], values["hosts"], values["rows"], workers)


def count(
    num_instances: int,
    seed: int,
    parts: Sequence[Segment],
    *,
    trained_rows: int | None = None,
    progress: bool = False,
) -> History:
  """Counts how often each instance was trained on; needs 6 bytes of memory per instance.

  Args:
    num_instances: Number of instances in the corpus.
    seed: `data_shuffle_seed` of the run.
    parts: Segments of the run.
    trained_rows: The number of leading rows of a batch that the trainer used; None for all rows.
    progress: Whether to show progress on stderr.
  """
  counts = np.zeros(num_instances, np.uint16)
  last_epochs = [_last_epoch(num_instances, part) for part in parts]
  num_rows = 0
  total = sum(part.num_batches * part.start.hosts * part.start.rows_per_host for part in parts)
  with progress_lib.progress_bar(
      "Counting what was trained on", total, enabled=progress, unit="rows"
  ) as advance:
    for epoch in range(max(last_epochs, default=-1) + 1):
      order = _permutation(num_instances, seed, epoch)
      for part, last_epoch in zip(parts, last_epochs):
        if epoch > last_epoch:
          continue
        block = num_instances // part.start.hosts
        for host in range(part.start.hosts):
          for records in _records(part, host, block, epoch, trained_rows):
            # No instance occurs twice in a piece, so `+=` counts each one.
            counts[order[host * block + records]] += 1
            num_rows += len(records)
            advance(len(records))
  return History(counts, num_rows)


def _permutation(num_instances: int, seed: int, epoch: int) -> np.ndarray:
  file = stored.OrderFile(
      kind="maxtext", n=num_instances, seed=seed, epoch=epoch, chunk=1, directory=""
  )
  return stored.shuffled(num_instances, file.shuffle_seed)


def _last_epoch(num_instances: int, part: Segment) -> int:
  start = part.start
  block = num_instances // start.hosts
  if block == 0:
    raise errors.ConfigError(f"{num_instances} instances are fewer than the {start.hosts} hosts.")
  # Workers take turns, so the last record read need not have the highest index. Use an upper bound.
  rounds = -(-part.num_batches // max(1, start.workers))
  largest = start.hosts * max(1, start.workers) * rounds * start.rows_per_host
  return (start.data_label * start.rows_per_host + largest) // block


def _records(
    part: Segment, host: int, block: int, epoch: int, trained_rows: int | None
) -> Iterator[np.ndarray]:
  """Yields the records that a segment read from a host's block of an epoch, in pieces."""
  start = part.start
  hosts, rows, workers = start.hosts, start.rows_per_host, max(1, start.workers)
  used = rows
  if trained_rows is not None:
    used = min(rows, max(0, trained_rows - host * rows))
  if used == 0:
    return
  per_piece = max(1, _PIECE // rows)
  for first in range(0, part.num_batches, per_piece):
    batches = np.arange(first, min(first + per_piece, part.num_batches))[:, None]
    turn, worker = np.divmod(batches, workers)
    record = host + hosts * (worker + workers * (turn * rows + np.arange(used)))
    at = start.data_label * rows + record.reshape(-1)
    here = at[(at >= epoch * block) & (at < (epoch + 1) * block)]
    if here.size:
      yield here - epoch * block
