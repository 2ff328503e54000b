"""MaxText's own `olmo_grain` loader and this package's, counted and timed in one run.

The ledger records which instances each loader serves in an epoch of steps, on 1, 2 and 4 hosts, and
after a restart from checkpoint 100 (saved after step 100, so step 101 comes next). Hosts are
loaders with their own shard of the same batches, as in each process of a job. Times and memory come
from fresh processes that take turns.
"""

import argparse
import collections
import contextlib
import importlib
import itertools
import json
import os
import pathlib
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

_INSTANCES = 2003
_LENGTH = 128
_BATCH = 8
_RESTART = 100
_LONG = 2048
_LONG_BATCH = 16
_LONG_STEPS = 24
_SEED = 3
_MODULES = {
    "MaxText": "maxtext.input_pipeline.olmo_grain_data_processing",
    "maxtext_olmo": "maxtext_olmo.loader.olmo_grain",
}


def compare(*, sizes: Sequence[int], repeats: int) -> str:
  """Measures everything and returns two tables in Markdown."""
  from maxtext_olmo.trainers.maxtext import shapes

  shapes.installed_version()
  with tempfile.TemporaryDirectory(prefix="maxtext_olmo_compare_") as directory:
    lines = _ledger_table(pathlib.Path(directory, "ledger"))
    lines += ["", *_speed_table(pathlib.Path(directory), sizes, repeats)]
  return "\n".join(lines) + "\n"


def _ledger_table(directory: pathlib.Path) -> list[str]:
  index_path = _write_corpus(directory, _INSTANCES, _LENGTH)
  steps = _INSTANCES // _BATCH
  rows = steps * _BATCH
  table = [
      f"{_INSTANCES} instances, batches of {_BATCH}, {steps} steps: {rows} rows, which are one"
      " epoch.",
      "",
      "| | " + " | ".join(_MODULES) + " |",
      "|---|---:|---:|",
  ]
  for hosts in (1, 2, 4):
    theirs, ours = (
        len(set(serve(index_path, hosts, 0, steps))) for serve in (_serve_theirs, _serve_ours)
    )
    table.append(f"| distinct instances, {hosts} host(s) | {theirs} | {ours} |")
  for before, after in ((1, 1), (1, 2), (2, 1), (4, 2)):
    cells = []
    for serve in (_serve_theirs, _serve_ours):
      done = _RESTART + 1
      served = serve(index_path, before, 0, done) + serve(index_path, after, done, steps - done)
      distinct = len(set(served))
      cells.append(f"{len(served) - distinct} repeated, {rows - distinct} lost")
    table.append(
        f"| restart from checkpoint {_RESTART}, {before} → {after} host(s)"
        f" | {cells[0]} | {cells[1]} |"
    )
  return table


def _serve_theirs(index_path: str, hosts: int, first: int, count: int) -> list[int]:
  """Returns the instances that MaxText's loader serves in `count` steps from step `first` on."""
  from maxtext.input_pipeline import olmo_data
  from maxtext.input_pipeline import olmo_data_grain

  index = olmo_data.load_index(index_path)
  rows = _BATCH // hosts
  served = []
  for host in range(hosts):
    loader = olmo_data_grain.make_olmo_grain_data_loader(
        index,
        seed=_SEED,
        batch_size=rows,
        shard_index=host,
        shard_count=hosts,
        apply_ngram_filter=False,
        # MaxText passes the label of the checkpoint, which is that of the last step done.
        initial_step=max(0, first - 1) * rows,
    )
    for batch in itertools.islice(loader, count):
      served += _decode(batch["inputs"])
  return served


def _serve_ours(index_path: str, hosts: int, first: int, count: int) -> list[int]:
  """Returns the instances that ours serves in `count` steps from step `first` on."""
  from maxtext_olmo.corpus import index_builder as index_lib
  from maxtext_olmo.corpus import token_files
  from maxtext_olmo.order import schedule
  from maxtext_olmo.order import stream
  from maxtext_olmo.rows import reader
  from maxtext_olmo.rows import steps
  from maxtext_olmo.rows import windows

  index = index_lib.load_index(index_path)
  order = stream.train_stream(index, order="feistel", seed=_SEED)
  served = []
  for rows in np.split(np.arange(_BATCH), hosts):
    dataset = steps.StepDataset(
        windows.WindowRows(index),
        reader.FileReader(token_files.TokenFiles.of_index(index)),
        order,
        schedule.BatchSchedule.constant(_BATCH),
        {_BATCH: rows},
        first_step=first,
    )
    for i in range(count):
      served += _decode(dataset[i]["tokens"])
  return served


def _write_corpus(
    directory: pathlib.Path, instances: int, length: int, sparse: bool = False
) -> str:
  """Writes one token file, and MaxText's index, which both read; returns the index's path.

  Its rows are random and begin with their instance id, unless the file is to be `sparse`.
  """
  from maxtext.input_pipeline import olmo_data

  directory.mkdir(parents=True)
  tokens = directory / "part-0.npy"
  if sparse:
    tokens.touch()
    os.truncate(tokens, instances * length * 4)
  else:
    rng = np.random.Generator(np.random.PCG64(1))
    rows = rng.integers(0, 50_000, size=(instances, length), dtype=np.uint32)
    rows[:, 0], rows[:, 1] = np.divmod(np.arange(instances), 1000)
    rows.astype("<u4").tofile(tokens)
  index = olmo_data.build_index(
      [(str(tokens), "web")],
      length,
      tokenizer="none",
      header_reader=lambda _: ("uint32", (instances * length,)),
  )
  index.save(str(directory / "index.json"))
  return str(directory / "index.json")


def _decode(rows: np.ndarray) -> list[int]:
  return (rows[:, 0].astype(np.int64) * 1000 + rows[:, 1]).tolist()


def _speed_table(directory: pathlib.Path, sizes: Sequence[int], repeats: int) -> list[str]:
  table = [
      f"Medians of {repeats} fresh processes each, taking turns; {os.cpu_count()} cores,"
      f" {platform.machine()}, Python {platform.python_version()}.",
      "",
      "| | " + " | ".join(_MODULES) + " | ratio |",
      "|---|---:|---:|---:|",
  ]
  for size in sizes:
    path = _write_corpus(directory / f"sparse-{size}", size, _LENGTH, sparse=True)
    found = _in_turns("first", path, repeats)
    theirs, ours = (_median(found[name], "seconds") for name in _MODULES)
    table.append(
        f"| first batch, {size:,} instances | {theirs:.2f} s | {ours:.2f} s | {theirs / ours:.1f} |"
    )
    theirs, ours = (_median(found[name], "bytes") / 1e6 for name in _MODULES)
    table.append(
        f"| memory above the imports, {size:,} instances | {theirs:.0f} MB | {ours:.0f} MB |"
        f" {theirs / ours:.1f} |"
    )
  path = _write_corpus(directory / "long", _LONG_BATCH * _LONG_STEPS, _LONG)
  found = _in_turns("rate", path, repeats)
  theirs, ours = (_median(found[name], "tokens_per_second") for name in _MODULES)
  table.append(
      f"| tokens per second, filter on, {_LONG_BATCH} × {_LONG} | {theirs:,.0f} | {ours:,.0f} |"
      f" {ours / theirs:.1f} |"
  )
  return table


def _median(found: Sequence[dict[str, float]], name: str) -> float:
  return statistics.median(measured[name] for measured in found)


def _in_turns(what: str, index_path: str, repeats: int) -> dict[str, list[dict[str, float]]]:
  found = collections.defaultdict(list)
  for _, name in itertools.product(range(repeats), _MODULES):
    done = subprocess.run(
        [sys.executable, "-P", __file__, what, name, index_path],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "DECOUPLE_GCLOUD": "TRUE"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
      raise RuntimeError(f"{name}'s loader failed:\n{done.stderr[-2000:]}")
    found[name].append(json.loads(done.stdout.splitlines()[-1]))
  return found


def _config(index_path: str, length: int, batch: int) -> Any:
  """Returns the part of MaxText's config that both loaders read."""
  return types.SimpleNamespace(
      dataset_type="olmo_grain",
      olmo_index_path=index_path,
      max_target_length=length,
      global_batch_size_to_load=batch,
      global_batch_size_to_train_on=batch,
      data_shuffle_seed=_SEED,
      grain_worker_count=0,
      enable_checkpointing=False,
      generate_padding_batch_train=False,
      expansion_factor_real_data=-1,
  )


def _measure(what: str, name: str, index_path: str) -> dict[str, float]:
  """Measures one loader in this process."""
  import jax

  mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
  loader = importlib.import_module(_MODULES[name])

  def make(config: Any) -> Iterator[Any]:
    return loader.make_olmo_grain_train_iterator(config, mesh, [0])

  jax.block_until_ready(jax.device_put(np.zeros(1), jax.devices()[0]))
  if what == "first":
    _forget_peak()
    imported = _peak_bytes()
    began = time.perf_counter()
    jax.block_until_ready(next(make(_config(index_path, _LENGTH, _BATCH))))
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "bytes": max(1e5, _peak_bytes() - imported)}
  batches = make(_config(index_path, _LONG, _LONG_BATCH))
  for _ in range(2):
    jax.block_until_ready(next(batches))
  began = time.perf_counter()
  for _ in range(_LONG_STEPS):
    jax.block_until_ready(next(batches))
  seconds = time.perf_counter() - began
  return {"tokens_per_second": _LONG_STEPS * _LONG_BATCH * _LONG / seconds}


def _forget_peak() -> None:
  """Resets the memory peak, so that it does not include the imports."""
  with contextlib.suppress(OSError):
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> int:
  status = pathlib.Path("/proc/self/status")
  if status.exists():
    for line in status.read_text().splitlines():
      if line.startswith("VmHWM:"):
        return int(line.split()[1]) * 1024
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
  """Measures one loader if arguments name it, and otherwise both."""
  if len(sys.argv) == 4:
    sys.stdout.write("\n" + json.dumps(_measure(*sys.argv[1:])) + "\n")
    sys.stdout.flush()
    # Neither loader's threads have anything left to do.
    os._exit(0)
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
  sizes = [1_000_000, 10_000_000]
  add = parser.add_argument
  add("--instances", type=int, nargs="+", default=sizes, help="sizes (default: %(default)s)")
  add("--repeats", type=int, default=3, help="measurements of each time (default: %(default)s)")
  args = parser.parse_args()
  print(compare(sizes=args.instances, repeats=args.repeats))


if __name__ == "__main__":
  main()
