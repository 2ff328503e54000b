"""Global batches, formed from the rows that each host loads.

host 0:  inputs (2, L) ─┐
                        ├─►  inputs (4, L), one jax.Array over the devices of both hosts
host 1:  inputs (2, L) ─┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from maxtext_olmo import errors
from maxtext_olmo.devices import collectives
from maxtext_olmo.devices import layout as layout_lib

PyTree = Any
KeyPath = tuple[Any, ...]


def get_next_batch_sharded(
    local_iterator: Iterator[PyTree],
    global_mesh: Mesh,
    pad: bool = False,
    pad_value: int | float = 0,
    *,
    data_sharding: PartitionSpec | None = None,
) -> PyTree:
  """Returns the next batch of every host as one global batch.

  >>> mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
  >>> batches = iter([{"inputs": np.ones((2, 4), np.int32)}])
  >>> get_next_batch_sharded(batches, mesh)["inputs"].shape
  (2, 4)

  Args:
    local_iterator: This host's batches, as pytrees of arrays with the batch on axis 0.
    global_mesh: Mesh to shard over.
    pad: Whether to pad arrays to the largest shape on any host. If set, the hosts first compare
      their status, and all stop when one runs out of data.
    pad_value: Value to pad with.
    data_sharding: Layout of the batch on the mesh; by default axis 0 is split over all mesh axes.
  """
  return next_global_batch(
      local_iterator,
      global_mesh,
      data_sharding=data_sharding,
      compare=pad,
      pad=pad,
      pad_value=pad_value,
      when="this step",
  )


def next_global_batch(
    local_iterator: Iterator[PyTree],
    global_mesh: Mesh,
    *,
    data_sharding: PartitionSpec | None,
    compare: bool,
    pad: bool,
    pad_value: int | float,
    when: str,
    tail: Callable[[], PyTree] | None = None,
) -> PyTree:
  """Returns the next batch of every host as one global batch.

  Args:
    local_iterator: This host's batches, as pytrees of arrays with the batch on axis 0.
    global_mesh: Mesh to shard over.
    data_sharding: Layout of the batch on the mesh; None splits axis 0 over all mesh axes.
    compare: Whether the hosts compare their status and shapes first.
    pad: Whether arrays are padded to the largest shape on any host.
    pad_value: Value to pad with.
    when: Name of the step, for errors.
    tail: Function that makes a batch for a host whose data has ended while another host still has
      data.
  """
  if not compare or jax.process_count() == 1:
    paths, local = _load(local_iterator)
    arrays: Sequence[np.ndarray] = local.arrays
  else:
    try:
      paths, local = _load(local_iterator)
    except Exception as error:
      local = collectives.LocalBatch(trouble=error)
    if tail is not None and collectives.anyone_has_data(local):
      if isinstance(local.trouble, StopIteration):
        paths, local = _load(iter([tail()]))
      pad = True
    shapes = collectives.common_shapes(local, pad=pad, when=when)
    arrays = [_pad_array_to_shape(pair, pad_value) for pair in zip(local.arrays, shapes)]
  placed = [
      _form_global_array(path, array, global_mesh, data_sharding)
      for path, array in zip(paths, arrays)
  ]
  return jax.tree_util.tree_unflatten(local.structure, placed)


def _load(local_iterator: Iterator[PyTree]) -> tuple[list[KeyPath], collectives.LocalBatch]:
  leaves, structure = jax.tree_util.tree_flatten_with_path(next(local_iterator))
  paths = [path for path, _ in leaves]
  arrays = tuple(_host_array(path, leaf) for path, leaf in leaves)
  return paths, collectives.LocalBatch(tuple(map(_name, paths)), arrays, structure)


def _pad_array_to_shape(
    array_and_shape: tuple[np.ndarray, tuple[int, ...]], pad_value: int | float = 0
) -> np.ndarray:
  """Pads an array at the end of each axis. Array and shape are one tuple, as `zip` yields them.

  >>> _pad_array_to_shape((np.array([[1], [2]]), (3, 2))).tolist()
  [[1, 0], [2, 0], [0, 0]]
  """
  array, shape = array_and_shape
  if array.ndim != len(shape) or any(have > want for have, want in zip(array.shape, shape)):
    raise errors.ConfigError(f"an array of shape {array.shape} cannot be padded to {tuple(shape)}")
  if array.shape == tuple(shape):
    return array
  widths = [(0, want - have) for have, want in zip(array.shape, shape)]
  return np.pad(array, widths, constant_values=pad_value)


def _build_global_shape_and_sharding(
    local_shape: tuple[int, ...], global_mesh: Mesh, data_sharding: PartitionSpec | None = None
) -> tuple[tuple[int, ...], NamedSharding]:
  """Returns the shape of the global array that the hosts' rows form, and its sharding."""
  layout = layout_lib.layout_of_local(global_mesh, data_sharding, tuple(local_shape))
  return (layout.batch, *local_shape[1:]), layout.sharding


def _form_global_array(
    path: KeyPath, array: np.ndarray, global_mesh: Mesh, data_sharding: PartitionSpec | None = None
) -> jax.Array:
  """Puts this host's rows onto its devices, as its part of the global array."""
  if array.ndim == 0:
    raise errors.ConfigError(
        f"{_name(path)} is a scalar: it has no batch axis to split over devices"
    )
  shards = layout_lib.local_shards(global_mesh, data_sharding)
  for axis, (size, ways) in enumerate(zip(array.shape, shards)):
    if size % ways:
      raise errors.ConfigError(
          f"{_name(path)} of shape {array.shape} does not divide over the devices: axis {axis} has"
          f" {size} entries on process {jax.process_index()}, for {ways} shards on its"
          f" {len(global_mesh.local_devices)} local devices ({global_mesh.size} in all). Choose a"
          f" multiple of {ways}."
      )
  return layout_lib.layout_of_local(global_mesh, data_sharding, array.shape).send(array)


def _host_array(path: KeyPath, leaf: Any) -> np.ndarray:
  array = np.asarray(leaf)
  if array.dtype.kind not in "biufc" and not jax.numpy.issubdtype(array.dtype, jax.numpy.number):
    raise errors.CorpusError(
        f"{_name(path)} has dtype {array.dtype}, which no device can hold; drop this array, or"
        " encode it as numbers"
    )
  there = jax.dtypes.canonicalize_dtype(array.dtype)
  if array.dtype.kind in "iu" and there != array.dtype and array.size:
    # JAX silently narrows 64-bit integers, and a token id that overflows becomes a different token.
    low, high = int(array.min()), int(array.max())
    if low < np.iinfo(there).min or high > np.iinfo(there).max:
      raise errors.CorpusError(
          f"{_name(path)} holds {low} to {high} as {array.dtype}, but devices take {there}: the"
          " values do not fit. A token file was probably read with the wrong dtype."
      )
  return array


def _name(path: KeyPath) -> str:
  return "batch" + jax.tree_util.keystr(path)
