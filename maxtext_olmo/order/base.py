"""Orders, which assign an instance to each place of each epoch.

An order is a function over arrays: `order.ids(epoch, places)` returns the instance ids at the given
places, and `order.places(epoch, ids)` is its inverse. `order.locate(positions)` returns the epoch
and place of each position of the run. With `chunk_size` c, the permutation is over chunks of c
consecutive instances, which stay together and in order:

    chunk_size 2, 6 instances, chunks permuted to (2, 0, 1):  places 0 1 2 3 4 5 → ids 4 5 0 1 2 3

A run that halves its sequence length doubles both the number of instances and the chunk size, so it
still reads the same tokens in the same order.
"""

from __future__ import annotations

import abc
import copy
from typing import Self

import numpy as np

from maxtext_olmo import errors
from maxtext_olmo.order import epochs as epochs_lib

_SCAN = 1 << 22
_LOW_BITS = 1 << 16


class Order(abc.ABC):
  """A permutation of `num_instances` instances for each epoch; epochs count from 0.

  Args:
    num_instances: Number of instances per epoch.
    seed: Seed of the permutations.
    chunk_size: Number of consecutive instances that stay together.
    epochs: Lengths of the epochs, if not all have `num_instances` instances.
  """

  name: str
  # True if a batch that would cross the end of an epoch starts at the next epoch instead.
  drops_tails = False
  # True if another system defines the order; no instance may then be held out.
  foreign = False

  def __init__(
      self,
      *,
      num_instances: int,
      seed: int,
      chunk_size: int = 1,
      epochs: epochs_lib.Epochs | None = None,
  ):
    if num_instances < 1:
      raise errors.OrderError(f"An order needs at least one instance, got {num_instances}.")
    self.epochs = epochs or epochs_lib.Epochs.constant(num_instances)
    if chunk_size < 1 or any(n % chunk_size for _, n in self.epochs.lengths):
      raise errors.OrderError(
          f"{num_instances} instances do not divide into chunks of {chunk_size}; build the index"
          " with max_target_sequence_length, which keeps whole chunks only."
      )
    self.num_instances = num_instances
    self.seed = seed
    self.chunk_size = chunk_size

  @abc.abstractmethod
  def _chunks(self, epoch: int, places: np.ndarray) -> np.ndarray:
    """Returns the chunk index (int64) at each of the given places of an epoch's chunk order."""

  def _chunk_places(self, epoch: int, chunks: np.ndarray) -> np.ndarray:
    """Returns the place (int64) of each chunk in an epoch's chunk order; -1 if it is not there.

    This implementation scans the epoch once. Orders that can compute the inverse override it.
    """
    wanted, which = np.unique(chunks, return_inverse=True)
    found = np.full(len(wanted), -1, np.int64)
    # Most scanned chunks are not wanted, and a small table rules them out faster than a search.
    maybe = np.zeros(_LOW_BITS, np.bool_)
    maybe[wanted & (_LOW_BITS - 1)] = True
    count = self.epochs.length(epoch) // self.chunk_size if len(wanted) else 0
    for first in range(0, count, _SCAN):
      scanned = self._chunks(epoch, np.arange(first, min(first + _SCAN, count)))
      here = np.flatnonzero(maybe[scanned & (_LOW_BITS - 1)])
      numbers = np.minimum(np.searchsorted(wanted, scanned[here]), len(wanted) - 1)
      hits = wanted[numbers] == scanned[here]
      found[numbers[hits]] = first + here[hits]
    return found[which]

  def _within(self, epoch: int, chunks: np.ndarray) -> np.ndarray:
    """Returns whether each chunk index is valid, in an epoch that permutes chunks 0 to n - 1."""
    return (chunks >= 0) & (chunks < self.epochs.length(epoch) // self.chunk_size)

  def ids(self, epoch: int, places: np.ndarray) -> np.ndarray:
    """Returns the instance id (int64) at each of the given places of an epoch."""
    places = np.asarray(places, np.int64)
    length = self.epochs.length(epoch)
    if places.size and not (0 <= places.min() and places.max() < length):
      raise errors.OrderError(
          f"Places of an epoch are in [0, {length}), got {places.min()} to {places.max()}."
      )
    if self.chunk_size == 1:
      return self._chunks(epoch, places)
    chunk, rest = np.divmod(places, self.chunk_size)
    return self._chunks(epoch, chunk) * self.chunk_size + rest

  def places(self, epoch: int, ids: np.ndarray) -> np.ndarray:
    """Returns the place of each instance in an epoch (int64); -1 if the epoch does not have it.

    The inverse of `ids`. If an epoch has an instance more than once (a mixture), this is the first
    place; `visits` returns all.

    Example:
      >>> from maxtext_olmo import make_order
      >>> order = make_order("feistel", num_instances=10, seed=0)
      >>> order.places(3, order.ids(3, np.array([7, 2]))).tolist()
      [7, 2]
    """
    chunks, rest = np.divmod(np.asarray(ids, np.int64), self.chunk_size)
    found = self._chunk_places(epoch, chunks)
    return np.where(found < 0, -1, found * self.chunk_size + rest)

  def visits(self, epoch: int, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns all places of the given instances in an epoch.

    Returns:
      Two arrays with one element per visit: the index into `ids` of the visited instance, and the
      place of the visit.
    """
    places = self.places(epoch, ids)
    which = np.flatnonzero(places >= 0)
    return which, places[which]

  def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the epoch and the place within it of each position of the run."""
    return self.epochs.locate(positions)

  def at(self, positions: np.ndarray) -> np.ndarray:
    """Returns the instance ids at the given positions of the run, which may span epochs."""
    return self.in_epochs(*self.locate(positions))

  def in_epochs(self, epochs: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Returns the instance id for each pair of an epoch and a place."""
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

  def with_epochs(self, epochs: epochs_lib.Epochs) -> Self:
    """Returns this order with different epoch lengths."""
    other = copy.copy(self)
    other.epochs = epochs
    other.num_instances = epochs.lengths[-1][1]
    return other

  def prepare(self, position: int) -> None:  # noqa: B027
    """Prepares the order before workers start at a position; does nothing for a computed order."""

  def close(self) -> None:  # noqa: B027
    """Closes open files, which are reopened when needed; does nothing for a computed order."""

  def __repr__(self) -> str:
    return (
        f"{type(self).__name__}(num_instances={self.num_instances}, seed={self.seed},"
        f" chunk_size={self.chunk_size})"
    )
