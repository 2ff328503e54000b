"""Functions that the multi-process tests of the LLM iterators run in each process."""

import jax
import numpy as np

from maxtext_olmo.grain_llm import pipeline as pipeline_lib
from tests import shards as shards_lib


def serve(documents, options, axes, steps=None, state=None):
  """Takes batches until the end of an epoch, or a number of them; returns this process's parts, the
  length, and the state."""
  mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(tuple(axes.values())), tuple(axes))
  iterator = pipeline_lib.make_grain_llm_iterator(
      jax.process_index(),
      jax.process_count(),
      mesh,
      documents,
      **{
          "global_batch_size": 8,
          "max_target_length": 16,
          "shuffle": True,
          "data_shuffle_seed": 3,
          "eod_token_id": 99,
          "worker_count": 0,
          "batch_class": dict,
          **options,
      },
  )
  if state is not None:
    iterator.set_state(state)
  batches = []
  while steps is None or len(batches) < steps:
    try:
      batch = next(iterator)
    except StopIteration:
      break
    batches.append(shards_lib.take_apart(batch))
  length = iterator.iterator_length
  found = iterator.get_state()
  iterator.close()
  return batches, length, found


def mix(options, axes):
  """Takes batches from a mix of two datasets of which the hosts have unequal shares."""
  mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(tuple(axes.values())), tuple(axes))
  members = [[{"inputs": [i + 1] * 3} for i in range(count)] for count in (5, 9)]
  rows = [
      pipeline_lib.make_grain_llm_dataset(
          jax.process_index(), jax.process_count(), documents, 4, 4, False, 0, num_epochs=1
      )
      for documents in members
  ]
  iterator = pipeline_lib.make_grain_multihost_iterator(
      rows, [5, 9], mesh, 4, jax.process_count(), worker_count=0, batch_class=dict, **options
  )
  batches = [shards_lib.take_apart(batch) for batch in iterator]
  iterator.close()
  return batches


def serve_all(cases):
  """Runs several cases one after the other, so that processes start once."""
  return [globals()[name](*args) for name, *args in cases]
