"""Orders: which instance comes at which place of which epoch.

An order is a function: `order.ids(epoch, places)` gives the instance ids at those places, for whole arrays at once, and
`order.locate(positions)` says which epoch and place a position of the run is. With `chunk_size` c, the permutation is
over chunks of c consecutive instances, which stay together and in order:

    chunk_size 2, 6 instances, chunks permuted to (2, 0, 1):   places 0 1 2 3 4 5  →  ids 4 5 0 1 2 3

so that a run that halves its sequence length (and so doubles its instances and its chunk size) reads the same tokens.
"""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Callable

import numpy as np

from maxtext_olmo import errors
from maxtext_olmo.order import feistel


class Order(abc.ABC):
  """A permutation of `num_instances` instances for each epoch; epochs count from 0."""

  name: str

  def __init__(self, *, num_instances: int, seed: int, chunk_size: int = 1):
    if num_instances < 1:
      raise errors.OrderError(f"An order needs at least one instance, got {num_instances}.")
    if chunk_size < 1 or num_instances % chunk_size:
      raise errors.OrderError(
          f"{num_instances} instances do not divide into chunks of {chunk_size}; build the index"
          " with max_target_sequence_length, which keeps whole chunks only."
      )
    self.num_instances = num_instances
    self.seed = seed
    self.chunk_size = chunk_size

  @abc.abstractmethod
  def _chunks(self, epoch: int, places: np.ndarray) -> np.ndarray:
    """The chunk numbers at some places of the chunk order of an epoch."""

  def ids(self, epoch: int, places: np.ndarray) -> np.ndarray:
    """The instance ids (int64) at some places of an epoch, in the order of the places."""
    places = np.asarray(places, np.int64)
    if epoch < 0:
      raise errors.OrderError(f"Epochs count from 0, got {epoch}.")
    if places.size and not (0 <= places.min() and places.max() < self.num_instances):
      raise errors.OrderError(
          f"Places of an epoch lie in [0, {self.num_instances}), got {places.min()} to"
          f" {places.max()}."
      )
    if self.chunk_size == 1:
      return self._chunks(epoch, places)
    chunk, rest = np.divmod(places, self.chunk_size)
    return self._chunks(epoch, chunk) * self.chunk_size + rest

  def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The epoch and the place within it of positions that count over the whole run."""
    epochs, places = np.divmod(np.asarray(positions, np.int64), self.num_instances)
    return epochs, places

  def at(self, positions: np.ndarray) -> np.ndarray:
    """The instance ids at some positions of the run; they may span epochs."""
    epochs, places = self.locate(positions)
    if epochs.size == 0:
      return places
    first, last = int(epochs.min()), int(epochs.max())
    if first == last:
      return self.ids(first, places)
    ids = np.empty_like(places)
    for epoch in range(first, last + 1):
      here = epochs == epoch
      ids[here] = self.ids(epoch, places[here])
    return ids

  def __repr__(self) -> str:
    return (
        f"{type(self).__name__}(num_instances={self.num_instances}, seed={self.seed},"
        f" chunk_size={self.chunk_size})"
    )


class FeistelOrder(Order):
  """A shuffle that is computed on demand: no memory, instant start, any place at once."""

  name = "feistel"

  def __init__(self, *, num_instances: int, seed: int, chunk_size: int = 1):
    super().__init__(num_instances=num_instances, seed=seed, chunk_size=chunk_size)
    self._bijections: dict[int, feistel.Bijection] = {}

  def _chunks(self, epoch: int, places: np.ndarray) -> np.ndarray:
    bijection = self._bijections.get(epoch)
    if bijection is None:
      size = self.num_instances // self.chunk_size
      bijection = feistel.Bijection(size, "order", self.seed, epoch)
      # Two epochs are all that a batch and its prefetched successors touch; a plain rebinding is safe under threads.
      self._bijections = {**dict(list(self._bijections.items())[-1:]), epoch: bijection}
    return bijection(places)


class SequentialOrder(Order):
  """Instances in the order of the corpus, the same in every epoch; the seed plays no part."""

  name = "sequential"

  def _chunks(self, epoch: int, places: np.ndarray) -> np.ndarray:
    del epoch
    return places


def maxtext_permutation(n: int, seed: int, epoch: int) -> np.ndarray:
  """The permutation that MaxText's `olmo_grain` documents, as uint64: 8 bytes of memory per instance."""
  digest = hashlib.sha256(f"olmo-shuffle:{int(seed)}:{int(epoch)}".encode()).digest()
  rng = np.random.default_rng(int.from_bytes(digest[:8], "little"))
  return rng.permutation(n).astype(np.uint64, copy=False)


_ORDERS: dict[str, Callable[..., Order]] = {
    cls.name: cls for cls in (FeistelOrder, SequentialOrder)
}


def order_names() -> tuple[str, ...]:
  """The names that `make_order` knows."""
  return tuple(_ORDERS)


def make_order(
    name: str,
    *,
    num_instances: int,
    seed: int,
    chunk_size: int = 1,
) -> Order:
  """Makes the order of that name over `num_instances` instances."""
  if name not in _ORDERS:
    raise errors.ConfigError(
        f"olmo_order={name!r} is not a known order; known are {', '.join(_ORDERS)}."
    )
  return _ORDERS[name](num_instances=num_instances, seed=seed, chunk_size=chunk_size)
