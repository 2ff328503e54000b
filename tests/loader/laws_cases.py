"""What the processes of the multi-process law tests do, and how their parts become whole again."""

import importlib.util
from unittest import mock

import jax
import ml_collections
import numpy as np

import maxtext_olmo
from maxtext_olmo.rows import crew
from maxtext_olmo.rows import inspection


def shards(array: jax.Array) -> dict[tuple[int, int, int, int], np.ndarray]:
  """This process's parts of a global array, by (first row, end row, first column, end column)."""
  found = {}
  for shard in array.addressable_shards:
    rows, columns = (s.indices(n) for s, n in zip(shard.index, array.shape))
    found[rows[0], rows[1], columns[0], columns[1]] = np.asarray(shard.data)
  return found


def assemble(parts):
  """The global arrays of each step from all processes' shards; each element must be there and agree."""
  steps = []
  for per_process in zip(*parts):
    arrays = {}
    for name, (shape, _) in per_process[0].items():
      whole = np.full(shape, -1, np.int64)
      for batch in per_process:
        for (top, bottom, left, right), data in batch[name][1].items():
          before = whole[top:bottom, left:right]
          assert ((before == -1) | (before == data)).all(), "processes disagree"
          whole[top:bottom, left:right] = data
      assert (whole >= 0).all(), "an element is on no process"
      arrays[name] = whole
    steps.append(arrays)
  return steps


def serve(config, axes, steps, state=None, order=None):
  """Takes batches on a mesh over all processes; returns this process's parts, and the state after them."""
  devices = np.array(jax.devices())
  if order is not None:
    devices = devices[list(order)]
  mesh = jax.sharding.Mesh(devices.reshape(tuple(axes.values())), tuple(axes))
  iterator, _ = maxtext_olmo.create_data_iterator(ml_collections.ConfigDict(config), mesh)
  if state is not None:
    iterator.set_state(state)
  batches = []
  for _ in range(steps):
    batch = next(iterator)
    batches.append({name: (array.shape, shards(array)) for name, array in batch.items()})
  found = iterator.get_state()
  iterator.close()
  return batches, found


def serve_fast(config, *args):
  """The same by the compiled way, where threads share even the smallest batch; without numba, as ever."""
  if importlib.util.find_spec("numba"):
    assert inspection.compile_reads(np.uint16)
  with mock.patch.object(crew, "_FEWEST_BYTES", 0):
    return serve(config, *args)


def evaluate(config, axes):
  """Runs evaluation twice; returns this process's parts of the inputs and segmentations."""
  mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(tuple(axes.values())), tuple(axes))
  train, evaluation = maxtext_olmo.create_data_iterator(ml_collections.ConfigDict(config), mesh)
  passes = []
  for _ in range(2):
    passes.append(
        [
            {name: (array.shape, shards(array)) for name, array in batch.items()}
            for batch in evaluation
        ]
    )
  train.close()
  evaluation.close()
  return passes


def differing_index(configs, axes):
  """Each process has a config of its own."""
  return serve(configs[jax.process_index()], axes, 1)
