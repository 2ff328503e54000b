"""Small runs of the trainer, for tests in this process and in others."""

from __future__ import annotations

import contextlib
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.trainers.tiny import config as config_lib
from maxtext_olmo.trainers.tiny import trainer


def make_config(**changes: Any) -> ConfigDict:
  """Returns the config of a short run on random tokens that compiles in a second or two."""
  config = config_lib.get_config()
  config.update(
      {
          "dataset_type": "synthetic",
          "vocab_size": 64,
          "max_target_length": 16,
          "global_batch_size_to_load": 4,
          "emb_dim": 16,
          "num_layers": 1,
          "num_heads": 2,
          "head_dim": 8,
          "mlp_dim": 32,
          "steps": 8,
          "warmup_steps": 2,
          "checkpoint_period": 3,
          "learning_rate": 1e-2,
      }
  )
  config.update(changes)
  return config


def write_counting_corpus(directory: pathlib.Path, length: int = 16) -> str:
  """Writes token files that repeatedly count to 40, which is learnt quickly; returns the index."""
  directory.mkdir(parents=True, exist_ok=True)
  entries = []
  for number in range(2):
    path = directory / f"part-{number}.npy"
    (np.arange(4000) % 40 + 1).astype("<u2").tofile(path)
    entries.append((str(path), "counting"))
  index = index_lib.build_index(
      entries, length, tokenizer="counting", dtype="uint16", base=str(directory)
  )
  index.save(str(directory / "index.json"))
  return str(directory / "index.json")


class Recorder:
  """Records the batches and metrics of a run; `stop_after` a step simulates an accident."""

  def __init__(self, stop_after: int | None = None):
    self.rows: dict[int, dict[int, list[int]]] = {}  # this process's rows of each step's inputs
    self.metrics: dict[int, dict[str, float]] = {}
    self._stop_after = stop_after

  @property
  def losses(self) -> dict[int, float]:
    return {step: metrics["loss"] for step, metrics in self.metrics.items()}

  def on_batch(self, step: int, batch: dict[str, jax.Array]) -> None:
    self.rows[step] = {
        shard.index[0].indices(batch["inputs"].shape[0])[0] + i: row.tolist()
        for shard in batch["inputs"].addressable_shards
        for i, row in enumerate(np.asarray(shard.data))
    }

  def on_step(self, step: int, metrics: dict[str, float]) -> None:
    self.metrics[step] = metrics
    if step == self._stop_after:
      raise Accident


class Accident(Exception):
  """Ends a run on purpose."""


def run(config: ConfigDict, stop_after: int | None = None) -> Recorder:
  """Trains, and survives an accident on purpose."""
  recorder = Recorder(stop_after)
  with contextlib.suppress(Accident):
    trainer.train(config, on_batch=recorder.on_batch, on_step=recorder.on_step)
  return recorder


def train_in_process(
    changes: dict[str, Any], cache: str
) -> tuple[dict[int, float], dict[int, dict[int, list[int]]]]:
  """Returns the losses of a run and this process's rows; for several processes."""
  compile_fast(cache)
  recorder = run(make_config(**changes))
  return recorder.losses, recorder.rows


_opened: list[str] | None = None


@contextlib.contextmanager
def counted_opens(path: str) -> Iterator[list[str]]:
  """Collects each time that this process opens a file."""
  global _opened
  if not hasattr(counted_opens, "hook"):  # Python has no way to remove one.
    counted_opens.hook = _note_open  # type: ignore[attr-defined]
    sys.addaudithook(_note_open)
  found: list[str] = []
  _opened = []
  try:
    yield found
  finally:
    found += [name for name in _opened if name == path]
    _opened = None


def _note_open(event: str, args: tuple[Any, ...]) -> None:
  if event == "open" and _opened is not None:
    _opened.append(str(args[0]))


def compile_fast(cache: str) -> None:
  """Compiles each program of a test file once, without optimizations."""
  jax.config.update("jax_disable_most_optimizations", True)
  jax.config.update("jax_compilation_cache_dir", cache)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
