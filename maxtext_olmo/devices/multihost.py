"""Each host loads its own rows; together they are one global batch.

    host 0:  inputs (2, L) ─┐
                            ├─►  inputs (4, L), one jax.Array over both hosts' devices
    host 1:  inputs (2, L) ─┘

Any iterable of pytrees of arrays will do: `MultiHostDataLoadIterator` turns what it yields on each
host into global arrays, breaks an endless stream into epochs, and saves and restores where it was.

With `iterator_length` or `pad_shapes`, the hosts compare notes before each step (`agreement`, at
the price of a small all-gather), so that a host which runs out of data, fails, or delivers another
shape stops all of them. Without either there is no such exchange: a host that ends early leaves the
others waiting, so its stream must be endless or exactly as long as theirs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from maxtext_olmo import errors
from maxtext_olmo.devices import batch_agreement
from maxtext_olmo.devices import layout as sharding_lib

PyTree = Any
KeyPath = tuple[Any, ...]


class MultiHostDataLoadIterator:
  """Iterates over the hosts' data as global batches.

  `iter()` starts a new epoch, unless a state was just set. Where `reset_after_epoch` is off, a new
  epoch goes on in the data where the last one stopped, as an endless, shuffled stream wants it.

  Args:
    dataloader: this host's batches, as pytrees of arrays with the batch on axis 0.
    global_mesh: the mesh to shard over.
    iterator_length: steps per epoch; without it an epoch lasts as long as the data.
    dataset_size: what `get_dataset_size` answers; for callers who need to know it.
    reset_after_epoch: begin again at the start of `dataloader` with each epoch.
    pad_shapes: pad each array at its end to the largest shape that any host has for it.
    pad_value: what to pad with.
    data_sharding: how a batch lies on the mesh; by default axis 0 is split over all mesh axes.
      Hosts that hold the same rows must deliver the same rows.
    tail: makes what a host delivers after its own end, while another still has data; without it,
      an end that not all come to together is an error.
  """

  def __init__(
      self,
      dataloader: Iterable[PyTree],
      global_mesh: Mesh,
      iterator_length: int | None = None,
      dataset_size: int | None = None,
      reset_after_epoch: bool = False,
      pad_shapes: bool = False,
      pad_value: int | float = 0,
      *,
      data_sharding: PartitionSpec | None = None,
      tail: Callable[[], PyTree] | None = None,
  ):
    if not isinstance(dataloader, Iterable):
      raise errors.ConfigError(
          f"A dataloader must be iterable, but {type(dataloader).__name__} is not; pass a dataset,"
          " a list of batches or an iterator."
      )
    if iterator_length is not None and iterator_length < 0:
      raise errors.ConfigError(
          f"iterator_length={iterator_length} is negative; leave it None for an endless stream"
      )
    self.global_mesh = global_mesh
    self.dataloader = dataloader
    self.iterator_length = iterator_length
    self.dataset_size = dataset_size
    self.reset_after_epoch = reset_after_epoch
    self.pad_shapes = pad_shapes
    self.pad_value = pad_value
    self.data_sharding = data_sharding
    self.tail = tail
    # An impossible layout shows now, not at the first batch.
    _row_shards(global_mesh, data_sharding)
    self.state_set = False
    self.step_counter = 0
    self._epochs_started = 0
    self.local_iterator: Iterator[PyTree] = iter(dataloader)
    if reset_after_epoch and self.local_iterator is dataloader and not hasattr(dataloader, "reset"):
      raise errors.ConfigError(
          "reset_after_epoch needs a dataloader that can be iterated again, but"
          f" {type(dataloader).__name__} is an iterator that ends once; pass the dataset it came"
          " from."
      )

  def __iter__(self) -> MultiHostDataLoadIterator:
    if not self.state_set or self.step_counter == self.iterator_length:
      self.reset()
    self.state_set = False
    self._epochs_started += 1
    return self

  def __next__(self) -> PyTree:
    if self.iterator_length is not None and self.step_counter >= self.iterator_length:
      raise StopIteration
    length = "" if self.iterator_length is None else f" of {self.iterator_length}"
    try:
      batch = _next_global_batch(
          self.local_iterator,
          self.global_mesh,
          data_sharding=self.data_sharding,
          compare=self.iterator_length is not None or self.pad_shapes or self.tail is not None,
          pad=self.pad_shapes,
          pad_value=self.pad_value,
          when=f"step {self.step_counter}{length}",
          tail=self.tail,
      )
    except StopIteration:
      if self.step_counter == 0 and self._epochs_started > 1:
        logging.warning(
            "Epoch %d has no batches: the data ended in an earlier one. Set reset_after_epoch, or"
            " repeat the data.",
            self._epochs_started,
        )
      raise
    self.step_counter += 1
    return batch

  def __len__(self) -> int:
    if self.iterator_length is None:
      raise TypeError(
          "This iterator has no length: it was made without iterator_length, and goes on for as"
          " long as its data does."
      )
    return self.iterator_length

  def get_dataset_size(self) -> int | None:
    """The size of the dataset, as given at construction."""
    return self.dataset_size

  def reset(self) -> None:
    """Sets the step to 0 and, with `reset_after_epoch`, starts again at the first batch."""
    self.step_counter = 0
    if not self.reset_after_epoch:
      return
    if self.local_iterator is self.dataloader:
      self.dataloader.reset()  # type: ignore[attr-defined]
    else:
      self.local_iterator = iter(self.dataloader)

  def get_state(self) -> dict[str, Any]:
    """This host's state: the step within the epoch and, where it has one, its iterator's state."""
    state: dict[str, Any] = {"step": self.step_counter, "iterator_length": self.iterator_length}
    if hasattr(self.local_iterator, "get_state"):
      state["iterator"] = self.local_iterator.get_state()
    return state

  def set_state(self, state: dict[str, Any]) -> None:
    """Goes to where `get_state` was called; an iterator without a state cannot, and warns."""
    _check_state(state, self.iterator_length)
    restorable = hasattr(self.local_iterator, "set_state")
    if restorable != ("iterator" in state):
      raise errors.ResumeError(
          f"The state {'has' if 'iterator' in state else 'lacks'} the state of a data iterator, but"
          f" {type(self.local_iterator).__name__} {'needs one' if restorable else 'takes none'}: it"
          " was saved by another kind of dataloader. Resume with the one that saved it."
      )
    if not restorable:
      logging.warning(
          "%s has no set_state: its data goes on from where it is, not from step %d of the state.",
          type(self.local_iterator).__name__,
          state["step"],
      )
      self.state_set = False
      return
    self.local_iterator.set_state(state["iterator"])  # type: ignore[attr-defined]
    self.step_counter = state["step"]
    self.state_set = True

  def close(self) -> None:
    """Ends what the data iterator keeps running, such as worker processes."""
    if hasattr(self.local_iterator, "close"):
      self.local_iterator.close()


def get_next_batch_sharded(
    local_iterator: Iterator[PyTree],
    global_mesh: Mesh,
    pad: bool = False,
    pad_value: int | float = 0,
    *,
    data_sharding: PartitionSpec | None = None,
) -> PyTree:
  """The next batch of every host as one global batch; `pad` first makes their shapes equal.

  Only with `pad` do the hosts compare notes, so that one that has run out stops the others too.
  """
  return _next_global_batch(
      local_iterator,
      global_mesh,
      data_sharding=data_sharding,
      compare=pad,
      pad=pad,
      pad_value=pad_value,
      when="this step",
  )


def _next_global_batch(
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
  if not compare or jax.process_count() == 1:
    paths, arrays, structure = _load(local_iterator)
  else:
    try:
      paths, arrays, structure = _load(local_iterator)
      local = batch_agreement.LocalBatch(tuple(map(_name, paths)), tuple(arrays), structure)
    except Exception as error:
      local = batch_agreement.LocalBatch(trouble=error)
    if tail is not None and batch_agreement.anyone_has_data(local):
      if isinstance(local.trouble, StopIteration):
        paths, arrays, structure = _load(iter([tail()]))
        local = batch_agreement.LocalBatch(tuple(map(_name, paths)), tuple(arrays), structure)
      pad = True
    shapes = batch_agreement.common_shapes(local, pad=pad, when=when)
    arrays = [_pad_array_to_shape(pair, pad_value) for pair in zip(arrays, shapes)]
  placed = [
      _form_global_array(path, array, global_mesh, data_sharding)
      for path, array in zip(paths, arrays)
  ]
  return jax.tree_util.tree_unflatten(structure, placed)


def _load(local_iterator: Iterator[PyTree]) -> tuple[list[KeyPath], list[np.ndarray], Any]:
  leaves, structure = jax.tree_util.tree_flatten_with_path(next(local_iterator))
  paths = [path for path, _ in leaves]
  return paths, [_host_array(path, leaf) for path, leaf in leaves], structure


def _pad_array_to_shape(
    array_and_shape: tuple[np.ndarray, tuple[int, ...]], pad_value: int | float = 0
) -> np.ndarray:
  """Pads an array at the end of each axis; it and the shape come as one tuple, as zip() gives them.

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
  """The shape of all hosts' rows together and how they lie on the mesh."""
  total, mine = _row_shards(global_mesh, data_sharding)
  spec = sharding_lib.partition_spec(global_mesh, data_sharding)
  sharding = NamedSharding(global_mesh, PartitionSpec(*spec[: len(local_shape)]))
  return (local_shape[0] * total // len(mine), *local_shape[1:]), sharding


def _form_global_array(
    path: KeyPath, array: np.ndarray, global_mesh: Mesh, data_sharding: PartitionSpec | None = None
) -> jax.Array:
  """Puts this host's rows onto its devices, as its part of the global array."""
  if array.ndim == 0:
    raise errors.ConfigError(
        f"{_name(path)} is a scalar: it has no batch axis to split over devices"
    )
  _, mine = _row_shards(global_mesh, data_sharding)
  spec = sharding_lib.partition_spec(global_mesh, data_sharding)
  splits = [len(mine), *(_ways(global_mesh, axes) for axes in spec[1:])]
  for axis, (size, ways) in enumerate(zip(array.shape, splits)):
    if size % ways:
      raise errors.ConfigError(
          f"{_name(path)} of shape {array.shape} does not divide over the devices: axis {axis} has"
          f" {size} entries on process {jax.process_index()}, for {ways} shards on its"
          f" {len(global_mesh.local_devices)} local devices ({global_mesh.size} in all). Make it a"
          f" multiple of {ways}."
      )
  global_shape, sharding = _build_global_shape_and_sharding(array.shape, global_mesh, data_sharding)
  rows = array.shape[0] // len(mine)
  local_start = {shard * rows: place * rows for place, shard in enumerate(mine)}
  shards, devices = [], []
  indices: Any = sharding.addressable_devices_indices_map(global_shape)
  for device, (place, *columns) in indices.items():
    start = local_start[(place.start or 0) if rows else 0]
    shards.append(array[(slice(start, start + rows), *columns)])
    devices.append(device)
  buffers = jax.device_put(shards, devices)
  return jax.make_array_from_single_device_arrays(global_shape, sharding, buffers)


@functools.lru_cache(maxsize=64)
def _row_shards(mesh: Mesh, data_sharding: PartitionSpec | None) -> tuple[int, tuple[int, ...]]:
  """Into how many shards axis 0 is split, and which of them this process holds."""
  spec = sharding_lib.partition_spec(mesh, data_sharding)
  rows = spec[0] if len(spec) else None
  total = _ways(mesh, rows)
  held: dict[int, set[int]] = {}
  indices: Any = NamedSharding(mesh, PartitionSpec(rows)).devices_indices_map((total,))
  for device, index in indices.items():
    held.setdefault(device.process_index, set()).add(index[0].start or 0)
  if len({len(shards) for shards in held.values()}) > 1 or jax.process_index() not in held:
    counts = {process: len(shards) for process, shards in sorted(held.items())}
    raise errors.ConfigError(
        "Every process must hold equally many shards of the batch, but with data_sharding"
        f" {data_sharding} on the mesh {dict(mesh.shape)} they hold {counts} (process: shards)."
    )
  return total, tuple(sorted(held[jax.process_index()]))


def _ways(mesh: Mesh, axes: Any) -> int:
  names = () if axes is None else (axes,) if isinstance(axes, str) else axes
  return math.prod(mesh.shape[name] for name in names)


def _host_array(path: KeyPath, leaf: Any) -> np.ndarray:
  array = np.asarray(leaf)
  if array.dtype.kind not in "biufc" and not jax.numpy.issubdtype(array.dtype, jax.numpy.number):
    raise errors.CorpusError(
        f"{_name(path)} has dtype {array.dtype}, which no device can hold; drop it or encode it"
    )
  there = jax.dtypes.canonicalize_dtype(array.dtype)
  if array.dtype.kind in "iu" and there != array.dtype and array.size:
    # JAX narrows 64-bit integers without a word, and a token id that wraps around is another token.
    low, high = int(array.min()), int(array.max())
    if low < np.iinfo(there).min or high > np.iinfo(there).max:
      raise errors.CorpusError(
          f"{_name(path)} holds {low} to {high} as {array.dtype}, but devices take {there}: the"
          " values do not fit. A token file was probably read with the wrong dtype."
      )
  return array


def _check_state(state: dict[str, Any], iterator_length: int | None) -> None:
  missing = {"step", "iterator_length"} - set(state)
  if missing:
    raise errors.ResumeError(
        f"The state has no {' and no '.join(sorted(missing))}, only {sorted(state)}: it was not"
        " saved by this kind of iterator."
    )
  if state["iterator_length"] != iterator_length:
    raise errors.ResumeError(
        f"The state was saved with iterator_length={state['iterator_length']}, but this iterator"
        f" has iterator_length={iterator_length}. Use the saved one; to carry on in the same data"
        " with epochs of another length, replace 'iterator_length' and 'step' in the state."
    )
  step = state["step"]
  last = math.inf if iterator_length is None else iterator_length
  if not isinstance(step, int) or not 0 <= step <= last:
    raise errors.ResumeError(
        f"The state is at step {step!r}, outside an epoch of {iterator_length} steps"
    )


def _name(path: KeyPath) -> str:
  return "batch" + jax.tree_util.keystr(path)
