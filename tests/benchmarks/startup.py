"""Time and memory from nothing to the first batch, at the size of the real mix and of a small one.

Sparse files have the sizes of the mix, take no space on the disk, and read as zeros. Each
measurement is a fresh process, as a trainer is; the two sizes take turns.
"""

import argparse
import json
import pathlib
import statistics
import tempfile
import time

from tests.benchmarks import figures

_LENGTH, _BATCH = 8192, 64
_PARTS = ("imports", "index build and save", "create_data_iterator", "first batch")


def make_sparse_mix(directory: pathlib.Path, files: int, instances: int) -> None:
  """Writes a manifest and sparse token files with `instances` windows in all."""
  directory.mkdir()
  paths = [directory / f"part-{i:05d}.npy" for i in range(files)]
  for i, path in enumerate(paths):
    with open(path, "wb") as file:
      file.truncate((instances // files + (i < instances % files)) * _LENGTH * 4)
  (directory / "mix.txt").write_text("".join(f"web,{path.name}\n" for path in paths))


def measure_here(directory: pathlib.Path) -> dict[str, float]:
  """Measures the start of this process."""
  times = [time.perf_counter()]
  import jax
  import numpy as np

  import maxtext_olmo
  from maxtext_olmo.corpus import manifest
  from maxtext_olmo.loader import olmo_grain  # noqa: F401

  times.append(time.perf_counter())
  entries = manifest.read_mix(str(directory / "mix.txt"))
  paths = [(str(directory / entry.path), entry.label) for entry in entries]
  index = maxtext_olmo.build_index(
      paths, _LENGTH, tokenizer="dolma2", dtype="uint32", base=str(directory)
  )
  index.save(str(directory / "index.json"))
  times.append(time.perf_counter())
  config = maxtext_olmo.get_config()
  sizes = {"max_target_length": _LENGTH, "global_batch_size_to_load": _BATCH}
  config.update(olmo_index_path=str(directory / "index.json"), vocab_size=100_278, **sizes)
  mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
  train, _ = maxtext_olmo.create_data_iterator(config, mesh)
  times.append(time.perf_counter())
  jax.block_until_ready(next(train))
  times.append(time.perf_counter())
  train.close()
  found = {name: after - before for name, before, after in zip(_PARTS, times, times[1:])}
  return {**found, "total after imports": times[-1] - times[1], "bytes": figures.memory("VmHWM")}


def main() -> None:
  """Measures both sizes and prints a table and the goals."""
  parser = argparse.ArgumentParser(description=__doc__)
  add = parser.add_argument
  add("--files", type=int, default=950, help="files of the large mix (default: %(default)s)")
  add("--instances", type=int, default=724_000_000, help="of the large mix (default: %(default)s)")
  add("--repeats", type=int, default=3, help="processes of each size (default: %(default)s)")
  add("--here", metavar="DIR", type=pathlib.Path, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.here:
    print(json.dumps(measure_here(args.here)))
    return
  with tempfile.TemporaryDirectory(prefix="maxtext_olmo_bench_") as temporary:
    mixes = {n: pathlib.Path(temporary, n) for n in ("large", "small")}
    make_sparse_mix(mixes["large"], args.files, args.instances)
    make_sparse_mix(mixes["small"], 10, 1_000_000)
    run = lambda name: figures.fresh_process(__file__, "--here", mixes[name])  # noqa: E731
    runs = figures.alternate(list(mixes), args.repeats, run)

  def medians(name: str) -> list[float]:
    return [statistics.median(run[name] for run in runs[size]) for size in mixes]

  rows = [(name, *medians(name)) for name in (*_PARTS, "total after imports")]
  cells = [(label, f"{a:.2f} s", f"{b:.2f} s", f"{a / b:.2f}") for label, a, b in rows]
  large, small = (size / 1e6 for size in medians("bytes"))
  cells.append(("peak memory", f"{large:.0f} MB", f"{small:.0f} MB", f"{large / small:.2f}"))
  print(f"{args.files} files, medians of {args.repeats} fresh processes; {figures.machine()}.\n")
  print(figures.table(("", f"{args.instances:,} instances", "1,000,000", "ratio"), cells))
  seconds = figures.goal("first batch, after imports", rows[-1][1], "≤", 1, "s")
  memory = figures.goal("peak memory", large, "≤", 450, "MB")
  print(figures.table(figures.GOALS_HEAD, [seconds, memory]))


if __name__ == "__main__":
  main()
