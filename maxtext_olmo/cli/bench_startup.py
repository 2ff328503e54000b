"""From nothing to the first batch, at the size of the real mix and at that of a small one.

Sparse files stand in for the mix: they have its sizes, hold no blocks on disk, and read as zeros. Each measurement is a fresh
process, as a trainer's is; the two sizes take turns.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time

from maxtext_olmo import errors

_SEQUENCE_LENGTH = 8192
_BATCH = 64
_SMALL_INSTANCES = 1_000_000
_SMALL_FILES = 10


@dataclasses.dataclass(frozen=True)
class Measurement:
  """What one process took."""

  imports: float
  index: float
  iterator: float
  first_batch: float
  peak_bytes: int

  @property
  def after_imports(self) -> float:
    return self.index + self.iterator + self.first_batch


def measure(*, files: int, instances: int, repeats: int) -> str:
  """Measures both sizes and returns a table."""
  with tempfile.TemporaryDirectory(prefix="maxtext_olmo_bench_") as directory:
    large = pathlib.Path(directory, "large")
    small = pathlib.Path(directory, "small")
    _make_sparse_mix(large, files, instances)
    _make_sparse_mix(small, _SMALL_FILES, _SMALL_INSTANCES)
    found: dict[str, list[Measurement]] = {"small": [], "large": []}
    for _ in range(repeats):
      found["small"].append(_in_fresh_process(small))
      found["large"].append(_in_fresh_process(large))
  return _table(found, files, instances, repeats)


def _make_sparse_mix(directory: pathlib.Path, files: int, instances: int) -> None:
  directory.mkdir()
  lines = []
  for i in range(files):
    windows = instances // files + (i < instances % files)
    path = directory / f"part-{i:05d}.npy"
    with open(path, "wb") as file:
      try:
        os.truncate(file.fileno(), windows * _SEQUENCE_LENGTH * 4)
      except OSError as error:
        raise errors.CorpusError(
            f"{path}: this file system takes no sparse file of {windows * _SEQUENCE_LENGTH * 4}"
            f" bytes ({error.strerror}); set TMPDIR to one that does, or pass --instances."
        ) from error
    lines.append(f"web,{path.name}\n")
  (directory / "mix.txt").write_text("".join(lines))


def _in_fresh_process(directory: pathlib.Path) -> Measurement:
  done = subprocess.run(
      [sys.executable, "-m", "maxtext_olmo.cli.bench_startup", str(directory)],
      env={**os.environ, "JAX_PLATFORMS": "cpu"},
      stdout=subprocess.PIPE,
      text=True,
      check=True,
  )
  return Measurement(**json.loads(done.stdout.splitlines()[-1]))


def _measure_here(directory: pathlib.Path) -> Measurement:
  began = time.perf_counter()
  import jax
  import numpy as np

  import maxtext_olmo
  from maxtext_olmo.corpus import manifest as manifest_lib
  from maxtext_olmo.loader import olmo_grain  # noqa: F401

  imported = time.perf_counter()
  entries = manifest_lib.read_mix(str(directory / "mix.txt"))
  index = maxtext_olmo.build_index(
      [(str(directory / entry.path), entry.label) for entry in entries],
      _SEQUENCE_LENGTH,
      tokenizer="dolma2",
      dtype="uint32",
      base=str(directory),
  )
  path = str(directory / "index.json")
  index.save(path)
  indexed = time.perf_counter()
  config = maxtext_olmo.get_config()
  config.update(
      olmo_index_path=path,
      max_target_length=_SEQUENCE_LENGTH,
      global_batch_size_to_load=_BATCH,
      vocab_size=100278,
      checkpoint_dir="",
  )
  mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
  train, _ = maxtext_olmo.create_data_iterator(config, mesh)
  created = time.perf_counter()
  jax.block_until_ready(next(train))
  served = time.perf_counter()
  train.close()
  return Measurement(
      imports=imported - began,
      index=indexed - imported,
      iterator=created - indexed,
      first_batch=served - created,
      peak_bytes=_peak_bytes(),
  )


def _peak_bytes() -> int:
  """Of this program; `ru_maxrss` would also count what the process held that started it, up to the `exec`."""
  found = re.search(r"VmHWM:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())
  if found is None:
    raise errors.MaxtextOlmoError("This system does not say how much memory a process held.")
  return int(found[1]) * 1024


def _table(found: dict[str, list[Measurement]], files: int, instances: int, repeats: int) -> str:
  def median(size: str, name: str) -> float:
    return statistics.median(getattr(m, name) for m in found[size])

  rows = [
      ("imports", "imports"),
      ("index build and save", "index"),
      ("create_data_iterator", "iterator"),
      ("first batch", "first_batch"),
      ("together, after imports", "after_imports"),
  ]
  head_large = f"{instances:,} instances"
  head_small = f"{_SMALL_INSTANCES:,} instances"
  lines = [
      f"Start-up, medians of {repeats} fresh processes each, alternating; batch {_BATCH} × {_SEQUENCE_LENGTH};",
      f"{files} files; {os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}.",
      "",
      f"| | {head_large} | {head_small} | ratio |",
      "|---|---:|---:|---:|",
  ]
  for label, name in rows:
    large, small = median("large", name), median("small", name)
    lines.append(f"| {label} | {large:.2f} s | {small:.2f} s | {large / small:.2f} |")
  large, small = (median(size, "peak_bytes") / 1e6 for size in ("large", "small"))
  lines.append(f"| peak resident memory | {large:.0f} MB | {small:.0f} MB | {large / small:.2f} |")
  return "\n".join(lines) + "\n"


if __name__ == "__main__":
  print(json.dumps(dataclasses.asdict(_measure_here(pathlib.Path(sys.argv[1])))))
