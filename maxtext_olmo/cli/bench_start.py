"""From the start of a process to its first batch, at several sizes of the corpus, for each loader; and the tiny trainer's wait.

Sparse files stand in for large corpora, as in `bench_startup`. A loader that takes too long or too much memory is stopped, and
the table says so. Loaders with a format of their own cannot be measured, since nobody converts terabytes for it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from maxtext_olmo.cli import bench_children
from maxtext_olmo.cli import bench_corpus
from maxtext_olmo.cli import bench_plan
from maxtext_olmo.cli import bench_startup
from maxtext_olmo.corpus import index_builder as index_lib

INSTANCES = (1_000_000, 50_000_000, 724_000_000)
_FILES = {1_000_000: 10, 50_000_000: 100, 724_000_000: 950}
_MOST_BYTES = 6_000_000_000
_PEERS = (
    "MaxText olmo_grain",
    "OLMo-core",
    "Grain Dataset over memmap",
    "torch DataLoader over memmap",
)
_OURS = "this library"
_START_PARTS = ("imports", "index", "iterator", "first_batch")
_TRAINER_STEPS = 200
_COMPILED_BY = 20
_MOST_TRAINER_SECONDS = 300


@dataclasses.dataclass(frozen=True)
class Start:
  """One loader at one size; what is None was not reached, and `missing` says why.

  Attributes:
    after_imports: Seconds from the end of the imports to the first batch, with an index that is there already, as a trainer
      finds it; only this library's is known.
    parts: Seconds of its parts, for this library.
  """

  name: str
  instances: int
  seconds: float | None = None
  after_imports: float | None = None
  peak_bytes: int | None = None
  missing: str = ""
  parts: dict[str, float] = dataclasses.field(default_factory=dict)


def measure(*, repeats: int, patience: float, say: Callable[[str], None]) -> list[Start]:
  """This library at all sizes, in turn, and the peers as far as they get."""
  found = []
  with tempfile.TemporaryDirectory(prefix="maxtext_olmo_bench_") as directory:
    mixes = {n: pathlib.Path(directory, str(n)) for n in INSTANCES}
    for n, mix in mixes.items():
      bench_startup._make_sparse_mix(mix, _FILES[n], n)
    ours: dict[int, list[tuple[float, bench_startup.Measurement]]] = {n: [] for n in INSTANCES}
    for _ in range(repeats):
      for n, mix in mixes.items():
        say(f"{_OURS} at {n:,} instances")
        began = time.perf_counter()
        measured = bench_startup._in_fresh_process(mix)
        ours[n].append((time.perf_counter() - began, measured))
    for n, runs in ours.items():
      found.append(
          Start(
              _OURS,
              n,
              statistics.median(seconds for seconds, _ in runs),
              statistics.median(run.iterator + run.first_batch for _, run in runs),
              int(statistics.median(run.peak_bytes for _, run in runs)),
              parts={
                  name: statistics.median(getattr(run, name) for _, run in runs)
                  for name in _START_PARTS
              },
          )
      )
    for candidate in bench_plan.CANDIDATES:
      if candidate.name in _PEERS:
        found += _measure_peer(candidate, mixes, patience, say)
  return found


def _measure_peer(
    candidate: bench_plan.Candidate,
    mixes: dict[int, pathlib.Path],
    patience: float,
    say: Callable[[str], None],
) -> list[Start]:
  found: list[Start] = []
  for n, mix in mixes.items():
    if found and found[-1].missing:
      found.append(Start(candidate.name, n, missing="not tried, after the smaller size"))
      continue
    say(f"{candidate.name} at {n:,} instances")
    spec = {
        **candidate.spec({}, filter=candidate.filters[0], documents=False),
        "files": sorted(map(str, mix.glob("*.npy"))),
        "directory": str(mix),
        "vocab_size": bench_corpus.VOCAB_SIZE,
        "eos_id": bench_corpus.EOS_ID,
        "batch": 64,
        "length": 8192,
    }
    try:
      began = time.perf_counter()
      with bench_children.Child(candidate.kind, patience=patience, most_bytes=_MOST_BYTES) as child:
        opened = child.ask(do="open", name="a", spec=spec)
        seconds = time.perf_counter() - began
      found.append(Start(candidate.name, n, seconds, None, opened["peak_bytes"]))
    except bench_children.Unavailable as reason:
      found.append(Start(candidate.name, n, missing=str(reason)))
  return found


def trainer_wait(say: Callable[[str], None]) -> dict[str, float]:
  """The share of its time that the tiny trainer waits for batches, once it has compiled."""
  say("the tiny trainer")
  done = subprocess.run(
      [sys.executable, "-m", "maxtext_olmo.cli.bench_start"],
      env={**os.environ, "JAX_PLATFORMS": "cpu"},
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      text=True,
      check=True,
      timeout=_MOST_TRAINER_SECONDS,
  )
  return json.loads(done.stdout.splitlines()[-1])


def _train_here(directory: pathlib.Path) -> dict[str, float]:
  """Trains as `configs/tiny.py` does, on a small corpus of its vocabulary."""
  from maxtext_olmo.loader import olmo_grain
  from maxtext_olmo.loader import registry
  from maxtext_olmo.trainers.tiny import config as config_lib
  from maxtext_olmo.trainers.tiny import trainer

  held: list[Any] = []

  def make(config: Any, mesh: Any, process_indices: Any = None) -> Any:
    held.append(olmo_grain.make_olmo_grain_train_iterator(config, mesh, process_indices))
    return held[0]

  registry.register_dataset_type("bench", make, make)
  config = config_lib.get_config()
  config.update(
      dataset_type="bench",
      olmo_index_path=_small_index(directory),
      max_target_length=128,
      global_batch_size_to_load=8,
      vocab_size=512,
      emb_dim=64,
      num_layers=2,
      num_heads=2,
      head_dim=32,
      mlp_dim=192,
      steps=_TRAINER_STEPS,
      checkpoint_dir="",
  )
  marks: list[tuple[float, float]] = []

  def on_batch(step: int, batch: Any) -> None:
    if step >= _COMPILED_BY:
      marks.append((time.perf_counter(), held[0].metrics()["wait_seconds"]))

  trainer.train(config, on_batch=on_batch)
  seconds, waited = (marks[-1][i] - marks[0][i] for i in range(2))
  return {"wait_share": waited / seconds, "step_seconds": seconds / (len(marks) - 1)}


def _small_index(directory: pathlib.Path) -> str:
  tokens = np.random.default_rng(1).integers(0, 512, 1 << 21).astype(np.uint16)
  tokens.tofile(directory / "part.npy")
  index = index_lib.build_index(
      [(str(directory / "part.npy"), "web")],
      128,
      tokenizer="bytes",
      dtype="uint16",
      base=str(directory),
  )
  index.save(directory / "index.json")
  return str(directory / "index.json")


def to_json(start: Start) -> dict[str, Any]:
  """All of it."""
  return dataclasses.asdict(start)


if __name__ == "__main__":
  with tempfile.TemporaryDirectory() as temporary:
    print(json.dumps(_train_here(pathlib.Path(temporary))))
