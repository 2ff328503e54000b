"""Takes global arrays apart on each process, and puts the parts together again."""

import jax
import numpy as np


def shards(array: jax.Array) -> dict[tuple[int, int, int, int], np.ndarray]:
  """Returns this process's parts, by (first row, end row, first column, end column)."""
  found = {}
  for shard in array.addressable_shards:
    rows, columns = (s.indices(n) for s, n in zip(shard.index, array.shape))
    found[rows[0], rows[1], columns[0], columns[1]] = np.asarray(shard.data)
  return found


def assemble(parts):
  """Returns the global arrays of each step; every element must be on a process, and they must
  agree."""
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
