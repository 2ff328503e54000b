"""The layout of a batch on the mesh, which decides which rows each process needs.

The rows depend on the mesh and the partition, not on the process index. On a mesh of 2 × 2 devices
(data, tensor) with two devices per process, a batch of 8 rows over `data` is laid out like this:

    partition ("data",)                process 0     process 1
    data axis across the processes     rows 0..3     rows 4..7
    tensor axis across the processes   rows 0..7     rows 0..7     both need, and read, all rows
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from maxtext_olmo import errors


def partition_spec(mesh: jax.sharding.Mesh, data_sharding: Any) -> jax.sharding.PartitionSpec:
  """Returns the partition for a config value: None, a mesh axis, or the axes of each dimension.

  None splits the batch over all axes of the mesh. `[["data", "fsdp"]]` splits it over two axes.
  `[["data"], "sequence"]` splits the batch over `data`, and the tokens of each row over `sequence`.
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
  named = [name for part in spec for name in _names(part)]
  if len(set(named)) < len(named):
    raise errors.ConfigError(
        f"data_sharding={data_sharding!r} names a mesh axis twice; an axis can split only one"
        " dimension."
    )
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


def axis_names(data_sharding: Any) -> tuple[str, ...]:
  """Returns the mesh axes that a config value names, in order; none if it is empty."""
  parts = (data_sharding,) if isinstance(data_sharding, str) else tuple(data_sharding or ())
  return tuple(name for part in parts for name in _names(part))


def _names(part: Any) -> tuple[str, ...]:
  return (part,) if isinstance(part, str) else tuple(part or ())


def _ways(mesh: jax.sharding.Mesh, part: Any) -> int:
  """Returns the number of shards into which a dimension of a partition is split."""
  return math.prod(mesh.shape[name] for name in _names(part))


@dataclasses.dataclass(frozen=True)
class BatchLayout:
  """The layout of the arrays of a batch on a mesh, as seen from one process.

  Axis 0 of every array is the batch. Axis 1, if present, is the length. Further axes are not split.

  Attributes:
    mesh: The mesh.
    spec: The partition of the arrays.
    batch: The number of rows of the global batch.
    length: The number of tokens per row.
    process: The process whose rows these are; None for this one. The layout of another process can
      be asked for its rows, but sends nothing.
  """

  mesh: jax.sharding.Mesh
  spec: jax.sharding.PartitionSpec
  batch: int
  length: int
  process: int | None = None

  def __post_init__(self) -> None:
    for size, part, what in zip((self.batch, self.length), self.spec, ("rows", "tokens")):
      shards = _ways(self.mesh, part)
      if size % shards:
        raise errors.ConfigError(
            f"A global batch of {self.batch} × {self.length} does not divide over the mesh: {size}"
            f" {what} over {shards} shards (axes {list(_names(part))} of {dict(self.mesh.shape)})."
            f" Choose a size that is a multiple of {shards}."
        )

  @functools.cached_property
  def sharding(self) -> jax.sharding.NamedSharding:
    """The sharding of arrays with a batch and a length axis."""
    return jax.sharding.NamedSharding(self.mesh, self.spec)

  @functools.cached_property
  def _slices(self) -> dict[jax.Device, tuple[slice, slice]]:
    shape = (self.batch, self.length)
    indices: Mapping[Any, Any]
    if self.process is None:
      indices = self.sharding.addressable_devices_indices_map(shape)
    else:
      every = self.sharding.devices_indices_map(shape)
      devices = _devices_by_process(self.mesh).get(self.process, ())
      indices = {device: every[device] for device in devices}
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
    """Maps the first row on each device to the device's slice of this process's rows."""
    found = {}
    for rows, _ in self._slices.values():
      start = int(np.searchsorted(self.rows, rows.start))
      found[rows.start] = slice(start, start + rows.stop - rows.start)
    return found

  @functools.cached_property
  def _sharding_of_rows(self) -> jax.sharding.NamedSharding:
    """The sharding of arrays with one value per row."""
    return jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec(*self.spec[:1]))

  @functools.cached_property
  def splits_rows(self) -> bool:
    """True if the tokens of a row are split over several devices."""
    columns = next(iter(self._slices.values()))[1] if self._slices else slice(0, self.length)
    return columns.stop - columns.start < self.length

  def send(self, local: np.ndarray) -> jax.Array:
    """Forms a global array from this process's rows, without waiting for the transfers.

    A vector, or a matrix whose number of columns is not the batch's length, is split by rows only.
    """
    shape = (self.batch, *local.shape[1:])

    def part(index: Any) -> np.ndarray:
      rows, *columns = index
      return local[(self._local_rows[rows.start or 0], *columns)]

    # One call for all devices spends far less time in Python than one call per device.
    by_rows = local.ndim == 1 or (local.ndim == 2 and local.shape[1] != self.length)
    sharding = self._sharding_of_rows if by_rows else self.sharding
    return jax.make_array_from_callback(shape, sharding, part)

  def shards(self, array: jax.Array) -> list[jax.Array]:
    """Returns this process's shards of a global array, one for each local device."""
    if array.is_fully_replicated:
      return list(map(operator.attrgetter("data"), array.addressable_shards))
    return list(map(array.addressable_data, range(len(self._slices))))

  def join(self, parts: Sequence[Mapping[str, jax.Array]]) -> dict[str, jax.Array]:
    """Forms global arrays from one dict of shards per local device, in the order of `shards`."""
    shape = (self.batch, self.length)
    joined: dict[str, jax.Array] = {}
    for name in parts[0]:
      arrays = list(map(operator.itemgetter(name), parts))
      joined[name] = jax.make_array_from_single_device_arrays(shape, self.sharding, arrays)
    return joined

  def place(self, local: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Forms global arrays from this process's rows."""
    return {name: self.send(array) for name, array in local.items()}


@functools.lru_cache(maxsize=8)
def _devices_by_process(mesh: jax.sharding.Mesh) -> dict[int, list[jax.Device]]:
  found: dict[int, list[jax.Device]] = {}
  for device in mesh.devices.flat:
    found.setdefault(device.process_index, []).append(device)
  return found


@functools.lru_cache(maxsize=64)
def row_shards(mesh: jax.sharding.Mesh, data_sharding: Any) -> tuple[int, tuple[int, ...]]:
  """Returns the number of shards of axis 0, and which of them this process holds."""
  rows = jax.sharding.PartitionSpec(*partition_spec(mesh, data_sharding)[:1])
  total = math.prod(_ways(mesh, part) for part in rows)
  held: dict[int, set[int]] = {}
  indices: Any = jax.sharding.NamedSharding(mesh, rows).devices_indices_map((total,))
  for device, index in indices.items():
    held.setdefault(device.process_index, set()).add(index[0].start or 0)
  if len({len(shards) for shards in held.values()}) > 1 or jax.process_index() not in held:
    counts = {process: len(shards) for process, shards in sorted(held.items())}
    raise errors.ConfigError(
        "Every process must hold the same number of shards of the batch, but with data_sharding"
        f" {data_sharding} on the mesh {dict(mesh.shape)} they hold {counts} (process: shards)."
        " Choose axes that split the batch evenly over the processes."
    )
  return total, tuple(sorted(held[jax.process_index()]))


def local_shards(mesh: jax.sharding.Mesh, data_sharding: Any) -> list[int]:
  """Returns the number of shards into which each axis of this process's rows is split."""
  _, mine = row_shards(mesh, data_sharding)
  return [len(mine), *(_ways(mesh, part) for part in partition_spec(mesh, data_sharding)[1:])]


@functools.lru_cache(maxsize=256)
def layout_of_local(
    mesh: jax.sharding.Mesh, data_sharding: Any, local_shape: tuple[int, ...]
) -> BatchLayout:
  """Returns the layout of a global array to which each process adds a local array of this shape."""
  total, mine = row_shards(mesh, data_sharding)
  return BatchLayout(
      mesh,
      jax.sharding.PartitionSpec(*partition_spec(mesh, data_sharding)[: len(local_shape)]),
      batch=local_shape[0] * total // len(mine),
      length=local_shape[1] if len(local_shape) > 1 else 1,
  )
