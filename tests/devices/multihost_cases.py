"""Functions that the multi-host tests run in each process."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from maxtext_olmo import errors
from maxtext_olmo.devices import global_batch
from maxtext_olmo.devices import layout as layout_lib
from maxtext_olmo.devices import multihost


def mesh(shape: Sequence[int] | None = None, axes: Sequence[str] = ("data",)) -> jax.sharding.Mesh:
  """Returns a mesh over all devices, in their order."""
  devices = np.array(jax.devices())
  return jax.sharding.Mesh(devices.reshape(shape or (len(devices),)), tuple(axes))


def rows(batch: Any) -> Any:
  """Returns the complete global arrays of a batch as lists."""
  return jax.tree.map(
      lambda x: np.asarray(
          jax.experimental.multihost_utils.process_allgather(x, tiled=True)
      ).tolist(),
      batch,
  )


def numbered(steps: int, local_rows: int, columns: int = 3) -> list[dict[str, np.ndarray]]:
  """Returns batches whose entries are 100 * step + global row."""
  first = jax.process_index() * local_rows
  column = np.arange(first, first + local_rows, dtype=np.int32)[:, None]
  return [
      {"inputs": np.broadcast_to(100 * step + column, (local_rows, columns)), "ids": column[:, 0]}
      for step in range(steps)
  ]


def global_batches(local_rows: int, steps: int) -> list[Any]:
  """Returns complete global batches of an iterator that shards over every mesh axis."""
  it = multihost.MultiHostDataLoadIterator(numbered(steps, local_rows), mesh(), steps)
  return [rows(batch) for batch in it]


def place_on_layouts(layouts: Sequence[tuple[Sequence[int], Sequence[Any]]]) -> list[Any]:
  """Returns the global shapes of a batch on each layout; checks the content of each shard."""
  shapes = []
  for shape, axes in layouts:
    the_mesh, spec = mesh(shape, ("data", "model")), jax.sharding.PartitionSpec(*axes)
    total, mine = layout_lib.row_shards(the_mesh, spec)
    every = np.arange(2 * total * 4, dtype=np.int32).reshape(2 * total, 4)
    local = np.concatenate([every[2 * shard : 2 * shard + 2] for shard in mine])
    batch = global_batch.get_next_batch_sharded(iter([{"x": local}]), the_mesh, data_sharding=spec)
    for shard in batch["x"].addressable_shards:
      np.testing.assert_array_equal(shard.data, every[shard.index])
    shapes.append(batch["x"].shape)
  return shapes


def outcome(
    batches: Sequence[Sequence[Any]],
    iterator_length: int | None = None,
    pad_shapes: bool = False,
    pad_value: int = 0,
) -> tuple[list[Any], str]:
  """Returns the global batches of per-process lists, and how the iteration ended."""
  seen: list[Any] = []
  it = multihost.MultiHostDataLoadIterator(
      _Stream(batches[jax.process_index()]),
      mesh(),
      iterator_length=iterator_length,
      pad_shapes=pad_shapes,
      pad_value=pad_value,
  )
  try:
    for batch in it:
      seen.append(rows(batch))
  except (errors.MaxtextOlmoError, RuntimeError) as error:
    return seen, f"{type(error).__name__}: {error}"
  return seen, f"end after step_counter={it.step_counter}"


class _Stream:
  """Yields its items once, and raises those that are exceptions."""

  def __init__(self, items: Sequence[Any]):
    self._items = list(items)

  def __iter__(self):
    for item in self._items:
      if isinstance(item, Exception):
        raise item
      yield item


def resume_after(steps_before: int) -> tuple[list[Any], list[Any]]:
  """Returns the batches after some steps: without a break, and from a state in a new iterator."""
  import grain  # slow to import, and only this case needs it

  def make() -> multihost.MultiHostDataLoadIterator:
    part = grain.MapDataset.range(1000)[jax.process_index() :: jax.process_count()]
    dataset = part.shuffle(seed=3).map(lambda n: {"x": np.array([n, n], np.int32)})
    loader = dataset.to_iter_dataset().batch(2)
    return multihost.MultiHostDataLoadIterator(loader, mesh(), iterator_length=10)

  it = iter(make())
  for _ in range(steps_before):
    next(it)
  state = it.get_state()
  straight = [rows(next(it)) for _ in range(3)]
  other = make()
  other.set_state(state)
  it = iter(other)
  return straight, [rows(next(it)) for _ in range(3)]


def llm_batch_round_trip() -> list[str]:
  """Returns the shapes of a registered dataclass's leaves after placing it."""
  from maxtext_olmo.rows import batch as batch_lib  # the other cases need no batch classes

  sample = batch_lib.LLMIndexedBatch.get_sample(2 * jax.local_device_count(), 5)
  batch = next(multihost.MultiHostDataLoadIterator([sample], mesh(), 1))
  assert isinstance(batch, batch_lib.LLMIndexedBatch), type(batch)
  return [str(leaf.shape) for leaf in jax.tree.leaves(batch)]


def rows_of_layouts(
    layouts: Sequence[tuple[dict[str, int], Sequence[Any]]],
) -> list[tuple[list[int], list[int]]]:
  """Returns this process's rows on each layout: by its own devices, and by its number."""
  found = []
  for axes, parts in layouts:
    the_mesh = mesh(tuple(axes.values()), tuple(axes))
    spec = jax.sharding.PartitionSpec(*parts)
    own = layout_lib.BatchLayout(the_mesh, spec, 8, 4).rows
    numbered_rows = layout_lib.BatchLayout(the_mesh, spec, 8, 4, jax.process_index()).rows
    found.append((own.tolist(), numbered_rows.tolist()))
  return found
