"""All orders by name, and the two computed orders: `feistel` (the default) and `sequential`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from maxtext_olmo import errors
from maxtext_olmo.order import base
from maxtext_olmo.order import feistel
from maxtext_olmo.order import stored

Order = base.Order


class FeistelOrder(base.Order):
  """A shuffle that is computed on demand: no memory, instant start, random access."""

  name = "feistel"

  # The bijections of two epochs, by epoch: a batch and its prefetched successors span at most two.
  # The dict is replaced and never modified, so threads need no lock.
  _bijections: Mapping[int, feistel.Bijection] = {}

  def _chunks(self, epoch: int, places: np.ndarray) -> np.ndarray:
    return self._bijection(epoch)(places)

  def _chunk_places(self, epoch: int, chunks: np.ndarray) -> np.ndarray:
    places = np.full(chunks.shape, -1, np.int64)
    within = self._within(epoch, chunks)
    places[within] = self._bijection(epoch).inverse(chunks[within])
    return places

  def _bijection(self, epoch: int) -> feistel.Bijection:
    bijection = self._bijections.get(epoch)
    if bijection is None:
      size = self.epochs.length(epoch) // self.chunk_size
      bijection = feistel.Bijection(size, "order", self.seed, epoch)
      self._bijections = {**dict(list(self._bijections.items())[-1:]), epoch: bijection}
    return bijection

  def __getstate__(self) -> dict[str, Any]:
    return {**self.__dict__, "_bijections": {}}


class SequentialOrder(base.Order):
  """Instances in corpus order, the same in every epoch; the seed has no effect."""

  name = "sequential"

  def _chunks(self, epoch: int, places: np.ndarray) -> np.ndarray:
    del epoch
    return places

  def _chunk_places(self, epoch: int, chunks: np.ndarray) -> np.ndarray:
    return np.where(self._within(epoch, chunks), chunks, -1)


_ORDERS: dict[str, type[base.Order]] = {
    cls.name: cls
    for cls in (FeistelOrder, SequentialOrder, stored.OlmoCoreOrder, stored.MaxTextOrder)
}


def order_names() -> tuple[str, ...]:
  """Returns the names that `make_order` accepts."""
  return tuple(_ORDERS)


def order_class(name: str) -> type[base.Order]:
  """Returns the class of the order with the given name."""
  if name not in _ORDERS:
    raise errors.ConfigError(
        f"olmo_order={name!r} is not a known order; choose from {', '.join(order_names())}."
    )
  return _ORDERS[name]


def make_order(
    name: str,
    *,
    num_instances: int,
    seed: int,
    chunk_size: int = 1,
    cache_dir: str | None = None,
) -> base.Order:
  """Makes an order by name.

  >>> order = make_order("feistel", num_instances=5, seed=7)
  >>> sorted(order.ids(0, np.arange(5)).tolist())  # Each epoch is a permutation.
  [0, 1, 2, 3, 4]

  Args:
    name: Name of the order, one of `order_names()`.
    num_instances: Number of instances per epoch.
    seed: Seed of the shuffle.
    chunk_size: Number of consecutive instances that stay together.
    cache_dir: Directory for the stored orders, `olmo_core` and `maxtext`; by default, one in the
      user's cache directory.
  """
  order = order_class(name)(num_instances=num_instances, seed=seed, chunk_size=chunk_size)
  if isinstance(order, stored.StoredOrder) and cache_dir:
    order.cache_dir = cache_dir
  return order
