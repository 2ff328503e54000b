"""Simulated fleets over corpora that do not exist, for tests."""

import types

from maxtext_olmo import config as config_lib
from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.devices import simulated
from maxtext_olmo.inspection import fleet as fleet_lib
from maxtext_olmo.inspection import run_plan

LENGTH = 8


def make_options(path: str, **keys):
  """Returns the options of a run over an index."""
  keys = {"olmo_index_path": path, "max_target_length": LENGTH, "olmo_num_epochs": 0, **keys}
  return config_lib.Options.read(types.SimpleNamespace(**config_lib.defaults() | keys))


def make_fleet(options, axes, hosts):
  """Returns the fleet that trains with these options."""
  mesh = simulated.make_mesh(axes, hosts)
  return fleet_lib.SimulatedFleet.of_run(options, mesh, run_plan.open_run(options))


def write_index(
    path: str, *, files: int, instances: int, base: str, chunk: int = 1, etag: str | None = None
) -> str:
  """Writes an index of files that do not exist; returns its path."""
  tokens = instances // files * LENGTH
  entries = [
      index_lib.OlmoNpyFileEntry(
          f"part-{i:05d}.npy", "web", tokens, 0, 0, size_bytes=2 * tokens, etag=etag
      )
      for i in range(files)
  ]
  longest = chunk * LENGTH if chunk > 1 else None
  index = index_lib.make_index(
      entries,
      LENGTH,
      dtype="uint16",
      tokenizer="none",
      base=base,
      max_target_sequence_length=longest,
  )
  index.save(path)
  return path
