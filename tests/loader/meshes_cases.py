"""What the processes of the mesh tests do."""

from tests.loader import laws_cases


def serve_on_each(config, meshes, steps):
  """Takes the same batches on one mesh after the other; returns this process's parts of each."""
  return [laws_cases.serve({**config, "data_sharding": spec}, axes, steps) for axes, spec in meshes]
