"""Which rows of a global batch this process needs, and how its rows become global arrays.

The mesh and the partition decide, not the process number. On a mesh of 2 × 2 devices (data, tensor) with two devices per
process, a batch of 8 rows over `data` lies so:

    partition ("data",)                process 0     process 1
    data axis across the processes     rows 0..3     rows 4..7
    tensor axis across them            rows 0..7     rows 0..7      both need all rows, and each reads them itself
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from maxtext_olmo import errors


def partition_spec(mesh: jax.sharding.Mesh, data_sharding: Any) -> jax.sharding.PartitionSpec:
  """A partition from a config value: None, an axis name, or a list with a name or names per dimension.

  None puts the batch over all axes of the mesh. `[["data", "fsdp"]]` puts it over two, and `[["data"], "sequence"]`
  puts the tokens of a row over a third.
  """
  if isinstance(data_sharding, jax.sharding.PartitionSpec):
    spec = data_sharding
  elif not data_sharding:
    spec = jax.sharding.PartitionSpec(tuple(mesh.axis_names))
  elif isinstance(data_sharding, str):
    spec = jax.sharding.PartitionSpec(data_sharding)
  else:
    spec = jax.sharding.PartitionSpec(
        *(
            tuple(part) if isinstance(part, Sequence) and not isinstance(part, str) else part
            for part in data_sharding
        )
    )
  named = [name for part in spec if part is not None for name in _names(part)]
  unknown = sorted(set(named) - set(mesh.axis_names))
  if unknown:
    raise errors.ConfigError(
        f"data_sharding={data_sharding!r} names the mesh axes {unknown}, but the mesh has"
        f" {list(mesh.axis_names)}."
    )
  if len(spec) > 2:
    raise errors.ConfigError(
        f"data_sharding={data_sharding!r} has {len(spec)} dimensions; a batch has two, rows and"
        " tokens."
    )
  return spec


def _names(part: Any) -> tuple[str, ...]:
  return (part,) if isinstance(part, str) else tuple(part)


@dataclasses.dataclass(frozen=True)
class BatchLayout:
  """How a (batch, length) array lies on a mesh, seen from this process."""

  mesh: jax.sharding.Mesh
  spec: jax.sharding.PartitionSpec
  batch: int
  length: int

  def __post_init__(self):
    for size, part, what in zip((self.batch, self.length), self.spec, ("rows", "tokens")):
      names = () if part is None else _names(part)
      shards = int(np.prod([self.mesh.shape[name] for name in names], dtype=np.int64))
      if size % shards:
        raise errors.ConfigError(
            f"A global batch of {self.batch} × {self.length} does not divide over the mesh: {size}"
            f" {what} over {shards} shards (axes {list(names)} of {dict(self.mesh.shape)})."
            f" Choose a size that is a multiple of {shards}."
        )

  @functools.cached_property
  def sharding(self) -> jax.sharding.NamedSharding:
    """The sharding of each array of a batch."""
    return jax.sharding.NamedSharding(self.mesh, self.spec)

  @functools.cached_property
  def _slices(self) -> dict[jax.Device, tuple[slice, slice]]:
    indices = self.sharding.addressable_devices_indices_map((self.batch, self.length))
    found = {}
    for device, index in indices.items():
      rows, columns = index if index is not None else (slice(None), slice(None))
      found[device] = (
          slice(*rows.indices(self.batch)[:2]),
          slice(*columns.indices(self.length)[:2]),
      )
    return found

  @functools.cached_property
  def rows(self) -> np.ndarray:
    """The rows of the global batch that this process's devices hold, ascending, each once."""
    ranges = [np.arange(rows.start, rows.stop) for rows, _ in self._slices.values()]
    return np.unique(np.concatenate(ranges)) if ranges else np.zeros(0, np.int64)

  @functools.cached_property
  def _local_rows(self) -> dict[int, slice]:
    """The first row of each device's part → where that part is among the rows of this process."""
    found = {}
    for rows, _ in self._slices.values():
      start = int(np.searchsorted(self.rows, rows.start))
      found[rows.start] = slice(start, start + rows.stop - rows.start)
    return found

  @functools.cached_property
  def _sharding_of_rows(self) -> jax.sharding.NamedSharding:
    """The sharding of what there is one of per row."""
    return jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec(*self.spec[:1]))

  @functools.cached_property
  def splits_rows(self) -> bool:
    """Whether the tokens of a row lie on several devices."""
    columns = next(iter(self._slices.values()))[1] if self._slices else slice(0, self.length)
    return columns.stop - columns.start < self.length

  def send(self, local: np.ndarray) -> jax.Array:
    """Returns the global array of which this process has these rows; transfers continue after the call.

    An array with other columns than the batch's tokens, or with none, is split by rows alone.
    """
    shape = (self.batch, *local.shape[1:])

    def part(index: Any) -> np.ndarray:
      rows, *columns = index
      return local[(self._local_rows[rows.start or 0], *columns)]

    # One call for all devices, with far less Python in it than putting each part and joining them.
    is_of_tokens = local.ndim == 2 and local.shape[1] == self.length
    sharding = self.sharding if is_of_tokens else self._sharding_of_rows
    return jax.make_array_from_callback(shape, sharding, part)

  def shards(self, array: jax.Array) -> list[jax.Array]:
    """Each device's part of an array that was sent."""
    if array.is_fully_replicated:
      return list(map(operator.attrgetter("data"), array.addressable_shards))
    return list(map(array.addressable_data, range(len(self._slices))))

  def join(self, parts: Sequence[Mapping[str, jax.Array]]) -> dict[str, jax.Array]:
    """Global arrays from each device's part of them, in the order of `shards`."""
    shape = (self.batch, self.length)
    joined: dict[str, jax.Array] = {}
    for name in parts[0]:
      arrays = list(map(operator.itemgetter(name), parts))
      joined[name] = jax.make_array_from_single_device_arrays(shape, self.sharding, arrays)
    return joined

  def place(self, local: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Global arrays from this process's rows of them."""
    return {name: self.send(array) for name, array in local.items()}
