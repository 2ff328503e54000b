"""Time and memory from nothing to the first batch, at the size of the real mix and of a small one.

Sparse files have the sizes of the mix, take no space on the disk, and read as zeros. Each
measurement is a fresh process, as a trainer is; the two sizes take turns. So does a run over packed
rows of 65,536 tokens whose index and plan exist: 1 billion tokens, documents of 1,000 on average.
"""

import argparse
import gzip
import json
import pathlib
import random
import statistics
import tempfile
import time

from tests.benchmarks import figures

_LENGTH, _BATCH = 8192, 64
_PARTS = ("imports", "index build and save", "create_data_iterator", "first batch")
_PACKED, _PACKED_FILES, _PACKED_LENGTH, _MEAN_DOCUMENT = "packed", 64, 65_536, 1000


def make_sparse_mix(directory: pathlib.Path, files: int, instances: int) -> None:
  """Writes a manifest and sparse token files with `instances` windows in all."""
  directory.mkdir()
  paths = [directory / f"part-{i:05d}.npy" for i in range(files)]
  for i, path in enumerate(paths):
    with open(path, "wb") as file:
      file.truncate((instances // files + (i < instances % files)) * _LENGTH * 4)
  (directory / "mix.txt").write_text("".join(f"web,{path.name}\n" for path in paths))


def make_packed_mix(directory: pathlib.Path, instances: int) -> None:
  """Writes a sparse mix with the boundaries of its documents, its index and its plan."""
  make_sparse_mix(directory, _PACKED_FILES, instances)
  rng = random.Random(0)
  for path in directory.glob("*.npy"):
    lines, end = [], 0
    while (start := end) < path.stat().st_size // 4 - 4 * _MEAN_DOCUMENT:
      end += rng.randrange(1, 2 * _MEAN_DOCUMENT)
      lines.append(f"{start},{end}\n")
    path.with_suffix(".csv.gz").write_bytes(gzip.compress("".join(lines).encode(), 1))
  figures.fresh_process(__file__, "--here", directory)  # Makes the index and the plan.


def measure_here(directory: pathlib.Path) -> dict[str, float]:
  """Measures the start of this process."""
  times = [time.perf_counter()]
  import jax
  import numpy as np

  import maxtext_olmo
  from maxtext_olmo.corpus import manifest
  from maxtext_olmo.loader import olmo_grain  # noqa: F401

  times.append(time.perf_counter())
  if directory.name != _PACKED or not (directory / "index.json").exists():
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
  if directory.name == _PACKED:
    config.update(dataset_type="olmo_packed", olmo_pad_id=100_277, olmo_eos_id=100_257)
    config.update(olmo_boundaries="csv", olmo_document_mask=True, olmo_source_group_size=8)
    config.update(max_target_length=_PACKED_LENGTH, global_batch_size_to_load=8)
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
  add("--packed-tokens", type=int, default=1_000_000_000, help="(default: %(default)s)")
  add("--repeats", type=int, default=3, help="processes of each size (default: %(default)s)")
  add("--here", metavar="DIR", type=pathlib.Path, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.here:
    print(json.dumps(measure_here(args.here)))
    return
  with tempfile.TemporaryDirectory(prefix="maxtext_olmo_bench_") as temporary:
    mixes = {n: pathlib.Path(temporary, n) for n in ("large", "small", _PACKED)}
    make_sparse_mix(mixes["large"], args.files, args.instances)
    make_sparse_mix(mixes["small"], 10, 1_000_000)
    make_packed_mix(mixes[_PACKED], args.packed_tokens // _LENGTH)
    run = lambda name: figures.fresh_process(__file__, "--here", mixes[name])  # noqa: E731
    runs = figures.alternate(list(mixes), args.repeats, run)

  def medians(name: str) -> list[float]:
    return [statistics.median(run[name] for run in runs[size]) for size in mixes]

  rows = [(name, *medians(name)) for name in (*_PARTS, "total after imports")]
  cells = [
      (label, f"{a:.2f} s", f"{b:.2f} s", f"{a / b:.2f}", f"{c:.2f} s") for label, a, b, c in rows
  ]
  sizes = [size / 1e6 for size in medians("bytes")]
  large, small, packed = (f"{size:.0f} MB" for size in sizes)
  cells.append(("peak memory", large, small, f"{sizes[0] / sizes[1]:.2f}", packed))
  print(f"{args.files} files, medians of {args.repeats} fresh processes; {figures.machine()}.\n")
  titles = ("", f"{args.instances:,} instances", "1,000,000", "ratio", "packed rows")
  print(figures.table(titles, cells))
  goals = [
      figures.goal("first batch, after imports", rows[-1][1], "≤", 1, "s"),
      figures.goal("first batch of packed rows, after imports", rows[-1][3], "≤", 1, "s"),
      figures.goal("peak memory", sizes[0], "≤", 450, "MB"),
  ]
  print(figures.table(figures.GOALS_HEAD, goals))


if __name__ == "__main__":
  main()
