"""Runs over a bucket in one of several JAX processes."""

from typing import Any

import jax
import numpy as np

import maxtext_olmo
from tests.loader import cases as loader_cases
from tests.loader import row_sources


def take_rows(
    source: str, index_path: str, order_cache: str, count: int
) -> list[list[tuple[int, np.ndarray]]]:
  """Returns the first row and the values of each of this process's pieces of the first batches."""
  devices = np.array(jax.devices())
  mesh = jax.sharding.Mesh(devices, ("data",))
  values: dict[str, Any] = row_sources.config_values(source, index_path, order_cache)
  config = loader_cases.data_config(**values, data_sharding=(("data",),))
  iterator, _ = maxtext_olmo.create_data_iterator(config, mesh)
  try:
    return [
        [
            (shard.index[0].start or 0, np.asarray(shard.data))
            for shard in next(iterator)["inputs"].addressable_shards
        ]
        for _ in range(count)
    ]
  finally:
    iterator.close()
