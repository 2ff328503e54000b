"""Takes global batches apart on each process, and puts the parts together again."""

from collections.abc import Sequence

import jax
import numpy as np

# (first row, end row, first column, end column) → the values there.
Shards = dict[tuple[int, int, int, int], np.ndarray]
ShardedBatch = dict[str, tuple[tuple[int, int], Shards]]


def take_apart(batch: dict[str, jax.Array]) -> ShardedBatch:
  """Returns this process's parts of each array, and its shape."""
  found: ShardedBatch = {}
  for name, array in batch.items():
    shards = {}
    for shard in array.addressable_shards:
      rows, columns = (s.indices(n) for s, n in zip(shard.index, array.shape))
      shards[rows[0], rows[1], columns[0], columns[1]] = np.asarray(shard.data)
    found[name] = (array.shape, shards)
  return found


def assemble(parts: Sequence[Sequence[ShardedBatch]]) -> list[dict[str, np.ndarray]]:
  """Returns the global batches from the shards of all processes, which must agree."""
  steps = []
  for per_process in zip(*parts, strict=True):
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
