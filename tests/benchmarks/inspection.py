"""Measures the speed of inspection: a step of a huge index, a search, a report, inverse orders.

Steps are asked for in fresh processes, over sparse files that have the sizes of the mix, take no
space on the disk and read as zeros; the clock starts after the imports. Searches read files in the
page cache, alternately with a plain read of the same bytes. Rates and ratios are of CPU time, so
that other load on the machine matters less; it still lengthens the time of a step and a report.
"""

import argparse
import fractions
import importlib.util
import json
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.benchmarks import corpus
from tests.benchmarks import figures
from tests.benchmarks import startup

_LENGTH, _BATCH, _LABELS = 8192, 512, 20
_ORDERS = ("feistel", "mixture", "olmo_core")
_IDS = 1 << 18
_CONFIG = """\
from maxtext_olmo.trainers.tiny import config as config_lib


def get_config():
  config = config_lib.get_config()
  config.dataset_type = "olmo_grain"
  with config.unlocked():
    config.update({values!r})
  return config
"""


def write_run(directory: pathlib.Path, order: str, files: int, instances: int) -> dict[str, Any]:
  """Writes an index over sparse files, unless it is there, and returns the config of a run."""
  import maxtext_olmo

  if not directory.exists():
    startup.make_sparse_mix(directory, files, instances)
    paths = sorted(map(str, directory.glob("*.npy")))
    labelled = [(path, f"label-{i % _LABELS:02d}") for i, path in enumerate(paths)]
    index = maxtext_olmo.build_index(
        labelled, _LENGTH, tokenizer="dolma2", dtype="uint32", base=str(directory)
    )
    index.save(str(directory / "index.json"))
  values = {
      "olmo_index_path": str(directory / "index.json"),
      "olmo_order": "feistel" if order == "mixture" else order,
      "olmo_order_cache_dir": str(directory / "orders"),
      "max_target_length": _LENGTH,
      "global_batch_size_to_load": _BATCH,
      "vocab_size": 100_278,
  }
  mixture = {f"label-{i:02d}": 1.0 + i % 3 for i in range(_LABELS)}
  return {**values, "olmo_mixture": mixture} if order == "mixture" else values


def measure_step(config: str, step: int) -> dict[str, float]:
  """Measures `inspect --step` in this process, after its imports."""
  from maxtext_olmo.cli import main as main_lib
  from maxtext_olmo.inspection import run  # noqa: F401
  from maxtext_olmo.inspection import summary  # noqa: F401
  from maxtext_olmo.inspection import text  # noqa: F401
  from maxtext_olmo.loader import olmo_grain  # noqa: F401
  from maxtext_olmo.trainers.tiny import config as trainer_config  # noqa: F401

  began, cpu = time.perf_counter(), time.process_time()
  code = main_lib.main(["inspect", config, "--step", str(step)])
  used, seconds = time.process_time() - cpu, time.perf_counter() - began
  if code:
    raise RuntimeError(f"inspect ended with {code}.")
  return {"seconds": seconds, "cpu": used}


class _Numbers:
  """A tokenizer whose tokens are words that are numbers."""

  def encode(self, texts: list[str]) -> list[np.ndarray]:
    return [np.array([int(word) for word in text.split()]) for text in texts]

  def decode(self, ids: np.ndarray) -> str:
    return " ".join(map(str, ids.tolist()))


def measure_search(directory: pathlib.Path, rounds: int) -> dict[str, list[figures.Run]]:
  """Measures a search for a text and a plain read of the same files, in turn."""
  import maxtext_olmo
  from maxtext_olmo.corpus import token_files
  from maxtext_olmo.inspection import search

  index = maxtext_olmo.load_index(str(directory / "index.json"))
  files = token_files.TokenFiles.of_index(index)
  size = sum(file.n_tokens for file in index.files) * index.token_dtype.itemsize
  corpus.warm(directory)
  middle = np.fromfile(files.paths[-1], index.token_dtype, 8, offset=4 * 1000)
  text = " ".join(map(str, middle.tolist()))

  def read() -> None:
    buffer = bytearray(4 << 20)
    for path in files.paths:
      with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
          pass

  def find() -> None:
    hits = search.find_text(text, _Numbers(), index, files)
    if search.TokenRange(len(files.paths) - 1, 1000, 8) not in hits:
      raise figures.ImpossibleFigureError(f"The text was not found where it is: {hits}.")

  def run(name: str) -> figures.Run:
    began, cpu = time.perf_counter(), time.process_time()
    {"read": read, "find": find}[name]()
    used = time.process_time() - cpu
    return {"bytes": size, "cpu": used, "seconds": time.perf_counter() - began}

  return figures.alternate(["read", "find"], rounds, run)


def measure_report(config: str, losses: str, steps: int, output: str) -> dict[str, float]:
  """Measures `report` with a log of losses in this process, after its imports."""
  import bokeh.plotting  # noqa: F401

  from maxtext_olmo.cli import main as main_lib
  from maxtext_olmo.inspection import report  # noqa: F401
  from maxtext_olmo.inspection import run_plan  # noqa: F401

  began, cpu = time.perf_counter(), time.process_time()
  code = main_lib.main(
      ["report", config, "--steps", str(steps), "--losses", losses, "--output", output]
  )
  used, seconds = time.process_time() - cpu, time.perf_counter() - began
  if code:
    raise RuntimeError(f"report ended with {code}.")
  return {"seconds": seconds, "cpu": used, "bytes": pathlib.Path(output).stat().st_size}


def write_losses(path: pathlib.Path, steps: int) -> None:
  """Writes a log with a loss for each step and a few spikes."""
  rng = np.random.default_rng(0)
  loss = 2.5 + 0.05 * rng.standard_normal(steps)
  loss[rng.integers(steps // 10, steps, 30)] += 3
  lines = (f'{{"step": {step}, "loss": {value:.4f}}}\n' for step, value in enumerate(loss))
  path.write_text("".join(lines))


def measure_inverses(ids: int = _IDS) -> dict[str, tuple[float, float]]:
  """Returns nanoseconds of CPU time per id, forwards and backwards, for each order."""
  from maxtext_olmo.order import interleave
  from maxtext_olmo.order import mixture
  from maxtext_olmo.order import permutations
  from maxtext_olmo.order import stream

  rng = np.random.default_rng(0)
  found = {}
  for bits in (20, 30, 40):
    order = permutations.make_order("feistel", num_instances=1 << bits, seed=0)
    drawn = rng.integers(0, 1 << bits, ids)
    found[f"feistel, 2^{bits} instances"] = _per_id(
        ids, lambda o=order, d=drawn: o.ids(0, d), lambda o=order, d=drawn: o.places(0, d)
    )
  for name, scale in (("", 1000), (", period above 2^31", 1 << 33)):
    shares = interleave.Interleave([(i % 7 + 1) * scale for i in range(130)])
    drawn = rng.integers(0, 10 * shares.counts[0], ids)
    found[f"interleave, 130 members{name}"] = _per_id(
        ids,
        lambda s=shares, d=drawn: s.locate(d),
        lambda s=shares, d=drawn: s.positions_of(0, d),
    )
  size = 5_500_000
  members = [
      mixture.Member(
          str(i), mixture.Ranges([(i * size, (i + 1) * size)]), fractions.Fraction(1 + i % 3)
      )
      for i in range(130)
  ]
  mixed = mixture.MixtureOrder(
      members, "epochs", order="feistel", seed=0, chunk_size=1, sequence_length=_LENGTH
  )
  places = rng.integers(0, mixed.num_instances, ids)
  drawn = rng.integers(0, 130 * size, ids)
  found["mixture, 130 labels, 715M instances"] = _per_id(
      ids, lambda: mixed.ids(0, places), lambda: mixed.places(0, drawn)
  )
  held = 100_000
  split = stream.Split(724_000_000, 1, held, key="k", keyed_windows=724_000_000)
  ranks = rng.integers(0, split.num_train, ids)
  found["split, 100,000 of 724M held out"] = _per_id(
      ids, lambda: split.train_ids(ranks), lambda: split.train_ranks(ranks)
  )
  return found


def _per_id(ids: int, *calls: Callable[[], Any]) -> tuple[float, ...]:
  """Returns the nanoseconds per id of some calls, in turn; the first round makes tables."""
  times: list[list[float]] = [[] for _ in calls]
  for _ in range(4):
    for call, taken in zip(calls, times):
      began = time.process_time()
      call()
      taken.append(1e9 * (time.process_time() - began) / ids)
  return tuple(statistics.median(taken[1:]) for taken in times)


def main() -> None:
  """Measures everything and prints tables and the goals."""
  parser = argparse.ArgumentParser(description=__doc__)
  add = parser.add_argument
  add("--files", type=int, default=950, help="files of the large mix (default: %(default)s)")
  add("--instances", type=int, default=724_000_000, help="of the large mix (default: %(default)s)")
  add(
      "--stored",
      type=int,
      default=100_000_000,
      help="instances of the stored order, whose file has 4 bytes for each (default: %(default)s)",
  )
  add("--megabytes", type=int, default=1000, help="of the searched corpus (default: %(default)s)")
  add("--steps", type=int, default=1_400_000, help="of the report's run (default: %(default)s)")
  add("--rounds", type=int, default=5, help="of each search (default: %(default)s)")
  add("--here", nargs=2, help=argparse.SUPPRESS)
  add("--report", nargs=4, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.here or args.report:
    if args.here:
      found = measure_step(args.here[0], int(args.here[1]))
    else:
      config, losses, steps, output = args.report
      found = measure_report(config, losses, int(steps), output)
    print(json.dumps(found))
    return
  goals = []
  load = f"load average {os.getloadavg()[0]:.1f}"
  print(f"{figures.machine()}, NumPy {np.__version__}, {load}.\n", flush=True)
  with tempfile.TemporaryDirectory(prefix="maxtext_olmo_bench_") as temporary:
    directory = pathlib.Path(temporary)
    print(_steps_table(directory, args, goals), flush=True)
    print(_search_table(directory, args, goals), flush=True)
    print(_report_table(directory, args, goals), flush=True)
  inverses = measure_inverses()
  cells = [
      (name, f"{forth:.0f} ns", f"{back:.0f} ns", f"{back / forth:.2f}")
      for name, (forth, back) in inverses.items()
  ]
  print(figures.table(("", "position → id", "id → position", "ratio"), cells))
  slowest = max(back for _, back in inverses.values())
  goals.append(figures.goal("slowest inverse, per id", slowest / 1000, "≤", 1, "µs"))
  print(figures.table(figures.GOALS_HEAD, goals))


def _steps_table(directory: pathlib.Path, args: argparse.Namespace, goals: list[Any]) -> str:
  cells, slowest = [], 0.0
  for order in _ORDERS:  # A stored order has a smaller file, which is built in seconds.
    stored = order == "olmo_core"
    instances = {"large": args.stored if stored else args.instances, "small": 1_000_000}
    configs = {}
    for size, count in instances.items():
      where = directory / f"{size}-{count}"
      config = write_run(where, order, args.files if size == "large" else _LABELS, count)
      configs[size] = where / f"{order}.json"
      configs[size].write_text(json.dumps(config))
      if stored:  # The file of the order is built once, on first use.
        figures.fresh_process(__file__, "--here", configs[size], 0)
    for name, share in (("a", 0.618), ("the last", 1.0)):

      def run(size: str, config=configs, counts=instances, share=share) -> figures.Run:
        step = int(share * (counts[size] // _BATCH - 1))
        return figures.fresh_process(__file__, "--here", config[size], step)

      runs = figures.alternate(["large", "small"], 2, run)
      large, cpu = (min(r[n] for r in runs["large"]) for n in ("seconds", "cpu"))
      small = min(r["cpu"] for r in runs["small"])
      slowest = max(slowest, large)
      times = (f"{large:.2f} s", f"{cpu:.2f} s", f"{small:.2f} s", f"{cpu / small:.2f}")
      what = f"{order}, {instances['large'] / 1e6:,.0f}M instances"
      cells.append((f"{what}, {name} step", *times))
  goals.append(figures.goal("inspect --step, after imports", slowest, "≤", 1, "s"))
  head = ("inspect --step", "time", "CPU time", "with 1M instances", "ratio")
  return figures.table(head, cells)


def _search_table(directory: pathlib.Path, args: argparse.Namespace, goals: list[Any]) -> str:
  where = directory / "searched"
  corpus.make(where, args.megabytes)
  runs = measure_search(where, args.rounds)
  rates = {name: figures.median(found, "bytes", "cpu") / 1e9 for name, found in runs.items()}
  walls = {name: figures.median(found, "bytes", "seconds") / 1e9 for name, found in runs.items()}
  goals.append(figures.goal("--find, per core", rates["find"], "≥", 1, "GB/s"))
  labels = (("read", "plain read"), ("find", "--find"))
  cells = [
      (label, f"{rates[n]:.2f} GB/s", f"{walls[n]:.2f} GB/s", f"{rates[n] / rates['read']:.2f}")
      for n, label in labels
  ]
  return figures.table((f"{args.megabytes:,} MB cached", "per core", "in all", "ratio"), cells)


def _report_table(directory: pathlib.Path, args: argparse.Namespace, goals: list[Any]) -> str:
  cells, slowest, largest = [], None, None
  if importlib.util.find_spec("bokeh") is not None:
    losses = directory / "losses.jsonl"
    write_losses(losses, args.steps)
    for order in ("mixture", "feistel"):
      where = directory / f"large-{args.instances}"
      values = write_run(where, order, args.files, args.instances)
      # The filter would reject rows of zeros, and rows without loss are not measured.
      values["olmo_apply_ngram_filter"] = False
      config = directory / f"{order}.py"
      config.write_text(_CONFIG.format(values=values))
      output = directory / f"{order}.html"
      here = (__file__, "--report", config, losses, args.steps, output)
      found = figures.fresh_process(*here)
      seconds, megabytes = found["seconds"], found["bytes"] / 1e6
      times = (f"{seconds:.1f} s", f"{found['cpu']:.1f} s")
      cells.append((order, *times, f"{megabytes:.2f} MB"))
      slowest, largest = max(slowest or 0, seconds), max(largest or 0, megabytes)
  name = f"report over {args.steps:,} steps"
  goals.append(figures.goal(name, slowest, "≤", 20, "s"))
  goals.append(figures.goal(name, largest, "≤", 6, "MB"))
  return figures.table((name, "time", "CPU time", "size"), cells)


if __name__ == "__main__":
  main()
