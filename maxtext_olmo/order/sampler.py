"""`OlmoIndexSampler`, which makes an order usable as a sampler of `grain.DataLoader`.

Grain asks a sampler for one record after another, by an index that counts this host's records. By
default, the sampler gives each host one contiguous block of the shuffled epoch. Given the loader's
batch size B and number of workers W, it serves global batches instead. Grain's worker w takes every
W-th index and batches its records, and the loader takes batches from the workers in turn. So index
i is

    worker w = i mod W, its record m = i div W → row m mod B of this host's batch (m div B) · W + w

A host's rows of a global batch follow those of the hosts before it. So each row of each global
batch is the same sample for any number of workers and any number of hosts.
"""

from __future__ import annotations

import sys
from typing import Any

import grain
import numpy as np

from maxtext_olmo import errors
from maxtext_olmo.order import base
from maxtext_olmo.order import permutations
from maxtext_olmo.order import schedule as schedule_lib

_BLOCK = 1024


class OlmoIndexSampler:
  """An endless sampler that maps a per-host record index to the instance to read.

  >>> sampler = OlmoIndexSampler(total_instances=6, seed=0, shuffle=False, shard_count=2)
  >>> [sampler[i].record_key for i in range(5)]  # Host 0 has the first half of each epoch.
  [0, 1, 2, 0, 1]

  Args:
    total_instances: Number of instances in the corpus.
    seed: Seed of the shuffle.
    shard_index: Index of this host among the hosts that load data.
    shard_count: Number of hosts that load data.
    shuffle: Whether to shuffle; otherwise instances are in corpus order.
    initial_step: Number of records that this host has taken already; the stream continues after
      them.
    order: One of `order_names()`. `olmo_core` needs `batch_size`, because none of its batches
      crosses the end of an epoch.
    batch_size: Number of rows of a batch on this host. If set, hosts share global batches;
      otherwise each host has a block of the epoch.
    worker_count: Number of workers of the `grain.DataLoader` that batches the records.
    chunk_size: Number of instances that the order keeps together (`OlmoNpyIndex.chunk_size`).
    cache_dir: Directory for the stored orders, `olmo_core` and `maxtext`; by default, one in the
      user's cache directory.
  """

  def __init__(
      self,
      *,
      total_instances: int,
      seed: int,
      shard_index: int = 0,
      shard_count: int = 1,
      shuffle: bool = True,
      initial_step: int = 0,
      order: str = "feistel",
      batch_size: int | None = None,
      worker_count: int = 0,
      chunk_size: int = 1,
      cache_dir: str | None = None,
  ):
    if shard_count <= 0 or not 0 <= shard_index < shard_count:
      raise errors.ConfigError(f"shard_index={shard_index} is not one of {shard_count} shards.")
    for name, value in (("total_instances", total_instances), ("batch_size", batch_size)):
      if value is not None and value <= 0:
        raise errors.ConfigError(f"{name} must be positive, got {value}.")
    for name, value in (("initial_step", initial_step), ("worker_count", worker_count)):
      if value < 0:
        raise errors.ConfigError(f"{name} must not be negative, got {value}.")
    if batch_size is None and total_instances < shard_count:
      raise errors.ConfigError(
          f"{total_instances} instances are too few for {shard_count} hosts: each needs at least"
          " one. Use fewer hosts, or set batch_size so that they share global batches."
      )
    self._total = int(total_instances)
    self._seed = int(seed)
    self._shard_index = int(shard_index)
    self._shard_count = int(shard_count)
    self._shuffle = bool(shuffle)
    self._initial_step = int(initial_step)
    self._batch_size = batch_size
    self._workers = max(1, int(worker_count))
    self._order_name = order if shuffle else permutations.SequentialOrder.name
    self._chunk_size = chunk_size
    self._cache_dir = cache_dir
    self._order = self._make_order(self._seed)
    if self._order.drops_tails and batch_size is None:
      raise errors.ConfigError(
          f"The {order} order needs batch_size, because none of its batches crosses the end of an"
          " epoch."
      )
    self._schedule = None
    if batch_size is not None:
      self._schedule = schedule_lib.BatchSchedule.constant(batch_size * self._shard_count)
      if self._order.drops_tails:
        self._schedule = self._schedule.within(self._order.epochs)
    self._block: tuple[tuple[int, int], np.ndarray] | None = None

  def _make_order(self, seed: int) -> base.Order:
    return permutations.make_order(
        self._order_name,
        num_instances=self._total,
        seed=seed,
        chunk_size=self._chunk_size,
        cache_dir=self._cache_dir,
    )

  @property
  def num_instances(self) -> int:
    """Number of instances in the corpus."""
    return self._total

  @property
  def num_local_instances_per_epoch(self) -> int:
    """Number of instances in this host's block of an epoch; hosts do not use the remainder."""
    return self._total // self._shard_count

  def shuffled_global_indices(self, *, seed: int, epoch: int) -> np.ndarray:
    """Returns the whole order of an epoch, as uint64: 8 bytes per instance."""
    return self._make_order(seed).ids(epoch, np.arange(self._total)).astype(np.uint64)

  def shard_indices(self, *, seed: int, epoch: int) -> np.ndarray:
    """Returns this host's block of the order of an epoch."""
    size = self.num_local_instances_per_epoch
    start = self._shard_index * size
    return self.shuffled_global_indices(seed=seed, epoch=epoch)[start : start + size]

  def _shard_indices_for_epoch(self, epoch: int) -> np.ndarray:
    """Returns this host's block of the order of an epoch, with this sampler's seed."""
    return self.shard_indices(seed=self._seed, epoch=epoch)

  def __len__(self) -> int:
    # The stream has no end. Without a length, Grain would search for one, up to sys.maxsize.
    return sys.maxsize

  def __getitem__(self, index: int) -> grain.RecordMetadata:
    if index < 0:
      raise errors.OrderError(f"A sampler's index must not be negative, got {index}.")
    epoch, place = self._locate(index)
    return grain.RecordMetadata(index=index, record_key=self._instance(epoch, place))

  def _locate(self, index: int) -> tuple[int, int]:
    """Returns the epoch and place of a record."""
    if self._schedule is None or self._batch_size is None:
      size = self.num_local_instances_per_epoch
      epoch, rest = divmod(index + self._initial_step, size)
      return epoch, self._shard_index * size + rest
    record, worker = divmod(index, self._workers)
    round_, row = divmod(record, self._batch_size)
    taken = (round_ * self._workers + worker) * self._batch_size + row + self._initial_step
    batch, row = divmod(taken, self._batch_size)
    position = self._schedule.start(batch) + self._shard_index * self._batch_size + row
    return divmod(position, self._total)

  def _instance(self, epoch: int, place: int) -> int:
    block_number, offset = divmod(place, _BLOCK)
    block = self._block
    if block is None or block[0] != (epoch, block_number):
      start = block_number * _BLOCK
      places = np.arange(start, min(start + _BLOCK, self._total))
      block = (epoch, block_number), self._order.ids(epoch, places)
      self._block = block
    return int(block[1][offset])

  def __getstate__(self) -> dict[str, Any]:
    return {**self.__dict__, "_block": None}

  def __repr__(self) -> str:
    # Grain compares this text on restore. It omits initial_step, which changes only where the
    # stream starts.
    return (
        f"OlmoIndexSampler(total_instances={self._total}, seed={self._seed},"
        f" shard_index={self._shard_index}, shard_count={self._shard_count},"
        f" shuffle={self._shuffle}, order={self._order_name!r}, batch_size={self._batch_size})"
    )
