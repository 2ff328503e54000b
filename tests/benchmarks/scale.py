"""Cost of a host in fleets of 1 to 4,096 hosts, and with a million to a trillion instances.

Devices are simulated, everything else is real: 12,000 sparse token files, their index, the layout
of the batch on the mesh, the order, and the reads of the last host. Each host has 4 devices and
4 rows per step, so that a larger fleet has larger batches. Each measurement is a fresh process, and
the cases take turns. Times are CPU times, which other load on the machine hardly affects. A ratio
of 1 means that a host does not notice how large the fleet, or the corpus, is. At some steps, the
rows of all hosts together are compared with the global batch.
"""

import argparse
import dataclasses
import gc
import json
import pathlib
import statistics
import tempfile
import time
import types

import numpy as np

import maxtext_olmo
from maxtext_olmo import config as config_lib
from maxtext_olmo.corpus import storage as storage_lib
from maxtext_olmo.corpus import token_files
from maxtext_olmo.corpus import verify
from maxtext_olmo.devices import simulated
from maxtext_olmo.inspection import fleet as fleet_lib
from maxtext_olmo.inspection import run_plan
from maxtext_olmo.rows import reader as reader_lib
from maxtext_olmo.rows import steps as steps_lib
from tests.benchmarks import figures

_LENGTH, _ROWS, _DEVICES = 64, 4, 4
_HOSTS = (1, 16, 256, 1024, 4096)
_INSTANCES = (10**6, 10**9, 10**12)
_MIDDLE = 10**9
_STORED = ("olmo_core", "maxtext")  # Orders that keep an array of all instances.
_MOST_STORED = 10**7
_STEPS = 2000
_UNION_STEPS = (0, 1, 777)


def make_files(directory: pathlib.Path, count: int, instances: int) -> None:
  """Writes sparse token files with `instances` windows in all; keeps those that are there."""
  for i in range(count):
    size = (instances // count + (i < instances % count)) * _LENGTH * 4
    with open(directory / f"part-{i:05d}.npy", "ab") as file:
      file.truncate(size)


def make_index(directory: pathlib.Path, count: int) -> None:
  """Writes the index of the files."""
  paths = [(f"part-{i:05d}.npy", f"label-{i % 24}") for i in range(count)]
  index = maxtext_olmo.build_index(
      paths, _LENGTH, tokenizer="none", dtype="uint32", base=str(directory)
  )
  index.save(str(directory / "index.json"))


def open_fleet(directory: pathlib.Path, hosts: int, order: str):
  """Returns the simulated fleet, before any file is opened."""
  keys = {
      "olmo_index_path": str(directory / "index.json"),
      "max_target_length": _LENGTH,
      "global_batch_size_to_load": _ROWS * hosts,
      "olmo_num_epochs": 0,
      "olmo_order": order,
      "olmo_order_cache_dir": str(directory),
  }
  options = config_lib.Options.read(types.SimpleNamespace(**config_lib.defaults() | keys))
  mesh = simulated.make_mesh({"data": _DEVICES * hosts}, hosts)
  began = time.process_time()
  fleet = fleet_lib.SimulatedFleet.of_run(options, mesh, run_plan.open_run(options))
  return fleet, time.process_time() - began


def measure_here(directory: pathlib.Path, hosts: int, order: str) -> dict[str, float]:
  """Measures the last host of a fleet in this process, up to some thousand steps."""
  gc.collect()
  gc.freeze()  # So that no search for garbage among all that was imported is measured.
  before = figures.memory("RssAnon")
  fleet, opening = open_fleet(directory, hosts, order)
  began = time.process_time()
  storage = storage_lib.open_storage()
  index = fleet.run.files
  verify.check_sizes(index, storage=storage)
  files = token_files.TokenFiles.of_index(index, storage=storage)
  fleet = dataclasses.replace(fleet, reader=reader_lib.FileReader(files))
  opened = time.process_time()
  dataset = fleet.steps_of(hosts - 1)
  laid_out = time.process_time()
  fleet.run.start.stream.prepare(0)
  first = dataset[0]["tokens"]
  ended = time.process_time()
  if first.shape != (_ROWS, _LENGTH):
    raise RuntimeError(f"The first batch of host {hosts - 1} has the shape {first.shape}.")
  for step in range(200):  # Warms caches up.
    dataset[step]
  found = []
  for number in range(5):
    cpu = time.process_time()
    for step in range(number * _STEPS, (number + 1) * _STEPS):
      dataset[step]
    found.append((time.process_time() - cpu) / _STEPS)
  return {
      "start": opening + ended - began,
      "layout": laid_out - opened,
      "step": statistics.median(found),
      "memory": figures.memory("RssAnon") - before,
  }


def check_union(directory: pathlib.Path, hosts: int, order: str) -> dict[str, float]:
  """Compares the rows of all hosts with the global batch; raises if they differ."""
  fleet, _ = open_fleet(directory, hosts, order)
  start, size = fleet.run.start, _ROWS * hosts
  whole = steps_lib.StepDataset(
      fleet.rows, fleet.reader, start.stream, start.schedule, {size: np.arange(size)}, block_steps=1
  )
  batches = {step: whole.row_numbers(step) for step in _UNION_STEPS}
  seen = {step: np.full(size, -1) for step in _UNION_STEPS}
  for process in range(hosts):
    rows, dataset = fleet.rows_of(process)[size], fleet.steps_of(process, block_steps=1)
    for step in _UNION_STEPS:
      if (seen[step][rows] >= 0).any():
        raise RuntimeError(f"Step {step}: a row of host {process} of {hosts} is another's too.")
      seen[step][rows] = dataset.row_numbers(step)
  for step in _UNION_STEPS:
    if not (seen[step] == batches[step]).all() or len(np.unique(seen[step])) < size:
      raise RuntimeError(f"Step {step}: the rows of {hosts} hosts are not the global batch.")
  return {"rows": float(size * len(_UNION_STEPS))}


def _cases(args: argparse.Namespace) -> dict[str, tuple[int, int, str]]:
  """Returns the cases by name: hosts, instances and order. The first of each group is smallest."""
  found = {f"{hosts:,} hosts": (hosts, _MIDDLE, "feistel") for hosts in args.hosts}
  most = args.hosts[-2] if len(args.hosts) > 1 else args.hosts[-1]
  for order in ("feistel", "sequential", *_STORED):
    for instances in args.instances:
      if order not in _STORED or instances <= _MOST_STORED:
        found[f"{order}, {instances:,} instances"] = (most, instances, order)
  return found


def main() -> None:
  """Measures all cases, and prints tables of ratios and the goals."""
  parser = argparse.ArgumentParser(description=__doc__)
  add = parser.add_argument
  add("--files", type=int, default=12_000, help="token files (default: %(default)s)")
  add("--hosts", type=int, nargs="+", default=_HOSTS, metavar="N", help="(default: %(default)s)")
  add("--instances", type=int, nargs="+", default=_INSTANCES, help="(default: %(default)s)")
  add("--repeats", type=int, default=3, help="processes of each case (default: %(default)s)")
  add("--here", nargs=4, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.here:
    what, directory, hosts, order = args.here
    act = measure_here if what == "measure" else check_union
    print(json.dumps(act(pathlib.Path(directory), int(hosts), order)))
    return
  cases = _cases(args)
  with tempfile.TemporaryDirectory(prefix="maxtext_olmo_bench_") as temporary:
    directories = {}
    for instances in sorted({case[1] for case in cases.values()}):
      directories[instances] = pathlib.Path(temporary, str(instances))
      directories[instances].mkdir()
      make_files(directories[instances], args.files, instances)
      make_index(directories[instances], args.files)

    def run(name: str, what: str = "measure") -> dict[str, float]:
      hosts, instances, order = cases[name]
      return figures.fresh_process(__file__, "--here", what, directories[instances], hosts, order)

    names = list(cases)
    for name in names:  # Builds the stored orders, which are not measured.
      rows = run(name, "union")["rows"]
      print(f"{name}: the rows of all hosts are the global batch ({rows:,.0f} rows)", flush=True)
    runs = figures.alternate(names, args.repeats, run)
  print(f"\n{args.files:,} files, medians of {args.repeats} processes; {figures.machine()}.\n")
  _print(cases, runs)


def _print(cases: dict[str, tuple[int, int, str]], runs: dict[str, list[figures.Run]]) -> None:
  def median(name: str, what: str) -> float:
    return statistics.median(run[what] for run in runs[name])

  groups: dict[str, list[str]] = {}
  for name, (_, _, order) in cases.items():
    groups.setdefault("hosts" if name.endswith("hosts") else order, []).append(name)
  goals = []
  for group, names in groups.items():
    cells = []
    for name in names:
      row = [name]
      for what, scale, unit in (
          ("step", 1e6, "µs"),
          ("start", 1, "s"),
          ("layout", 1e3, "ms"),
          ("memory", 1e-6, "MB"),
      ):
        value, smallest = median(name, what), median(names[0], what)
        row.append(f"{scale * value:.3g} {unit} ({value / smallest:.2f})")
      cells.append(row)
    head = ("CPU per step", "CPU to start", "of it: layout", "private memory")
    print(figures.table((f"{group} (ratio to the first)", *head), cells))
    for what in ("step", "start", "memory"):
      worst = max(median(name, what) / median(names[0], what) for name in names)
      goals.append(figures.goal(f"{group}: {what}, largest / smallest case", worst, "≤", 1.5, "×"))
  print(figures.table(figures.GOALS_HEAD, goals))


if __name__ == "__main__":
  main()
