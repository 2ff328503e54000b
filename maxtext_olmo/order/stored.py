"""Orders of other systems, which exist only as whole arrays: OLMo-core's and MaxText's.

`olmo_core` is the order of `NumpyFSLDataLoader` of OLMo-core 3, bit for bit: seed and epoch are
added, chunks of `max_target_sequence_length` stay together, and no batch crosses the end of an
epoch. `maxtext` is the order of MaxText's `olmo_grain` documentation, which that loader serves on
one host only.

The arrays are mapped files (see `order_files`), so an order can be pickled to workers and takes no
memory in any of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from maxtext_olmo import errors
from maxtext_olmo.order import base
from maxtext_olmo.order import epochs as epochs_lib
from maxtext_olmo.order import order_files


class StoredOrder(base.Order):
  """A permutation per epoch, from a file that is built when it is first needed.

  Args:
    cache_dir: Directory of the files; the user's cache directory by default.
  """

  def __init__(
      self,
      *,
      num_instances: int,
      seed: int,
      chunk_size: int = 1,
      epochs: epochs_lib.Epochs | None = None,
      cache_dir: str | None = None,
  ):
    super().__init__(num_instances=num_instances, seed=seed, chunk_size=chunk_size, epochs=epochs)
    if seed < 0:
      raise errors.ConfigError(f"The {self.name} order needs a seed of 0 or more, got {seed}.")
    self._cache_dir = cache_dir or order_files.default_cache_dir()
    self._trusted: dict[int, order_files.FileId] = {}
    self._arrays: dict[int, np.ndarray] = {}

  def _chunks(self, epoch: int, places: np.ndarray) -> np.ndarray:
    array = self._arrays.get(epoch)
    if array is None:
      array = self._open(epoch)
    return array[places].astype(np.int64)

  def prepare(self, position: int) -> None:
    """Opens the array of a position's epoch, so that later workers trust it without a checksum."""
    epoch = self.epochs.epoch(position)
    if epoch not in self._arrays:
      self._open(epoch)

  def file(self, epoch: int) -> order_files.OrderFile:
    """Returns the file of an epoch."""
    return order_files.OrderFile(
        kind=self.name,
        n=self.epochs.length(epoch) // self.chunk_size,
        seed=self.seed,
        epoch=epoch,
        chunk=self.chunk_size,
        directory=self._cache_dir,
    )

  def _open(self, epoch: int) -> np.ndarray:
    array, trusted = self.file(epoch).open(self._trusted.get(epoch))
    # A batch and its prefetched successors touch at most two epochs. Rebinding the dict is safe
    # under threads.
    self._arrays = {**dict(list(self._arrays.items())[-1:]), epoch: array}
    self._trusted = {**self._trusted, epoch: trusted}
    return array

  def __getstate__(self) -> dict[str, Any]:
    return {**self.__dict__, "_arrays": {}}


class OlmoCoreOrder(StoredOrder):
  """The order of OLMo-core's fixed-length loader; its epoch 1 is epoch 0 here."""

  name = "olmo_core"
  drops_tails = True
  foreign = True


class MaxTextOrder(StoredOrder):
  """The order that MaxText documents for `olmo_grain`; `OlmoIndexSampler` cuts it into blocks."""

  name = "maxtext"
  foreign = True
