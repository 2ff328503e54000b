"""Walks a miniature of OLMo 3 from pretraining to fine-tuning, and kills it in every stage.

    python -m tests.recipe [--directory DIR]

One small model goes through the four stages with the configs of the 7B model, made small: windows
(stage 1), windows of another mix (stage 2), documents packed into long rows (stage 3), and packed
conversations with loss masks (SFT). A stage starts from the weights of the stage before.

All of this is done twice: without interruption, and with a run that SIGKILL ends in each stage at a
random step and that is then resumed. Every batch that a step was given, including those that a
kill made the run repeat, every loss, and the final weights and optimiser must be equal, bit for
bit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import xxhash

from maxtext_olmo import cli
from maxtext_olmo.cli import demo
from maxtext_olmo.loader import resume
from maxtext_olmo.trainers.tiny import checkpoints as checkpoints_lib
from maxtext_olmo.trainers.tiny import config as config_lib
from maxtext_olmo.trainers.tiny import model
from maxtext_olmo.trainers.tiny import trainer
from tests import chats
from tests import distributed
from tests.cli import runner

_LEDGER, _KILL = "RECIPE_LEDGER", "RECIPE_KILL"
_PERIOD = 5
_SMALL: dict[str, Any] = {
    "emb_dim": 32,
    "num_layers": 2,
    "num_heads": 2,
    "head_dim": 16,
    "mlp_dim": 64,
    "mesh_shape": (-1, 1),
    "learning_rate": 3e-3,
    "warmup_steps": 3,
    "checkpoint_period": _PERIOD,
    "max_checkpoints": 2,
    "log_interval": 1000,
}


@dataclasses.dataclass(frozen=True)
class Stage:
  """A stage of the recipe: a config of this package, and the keys that make it small."""

  name: str
  config: str
  keys: dict[str, Any]


class RecipeError(Exception):
  """A stage did not do what it should."""


def make_stages(root: pathlib.Path) -> list[Stage]:
  """Makes the corpora of all stages, and returns the stages."""
  tokenizer = chats.write_tokenizer(root / "tokenizer")
  texts = demo.docstrings(limit_files=150)
  short = [text for kind in ("modules", "functions") for text in texts[kind]]
  long = ["\n\n".join(short[i : i + 8]) for i in range(0, len(short), 8)]
  eos_id, pad_id = 0, 1
  keys = {**_SMALL, "vocab_size": 300, "olmo_eos_id": eos_id}
  packed = {"max_target_length": 256, "global_batch_size_to_load": 4, "olmo_pad_id": pad_id}
  windows = {"max_target_length": 64, "global_batch_size_to_load": 8}
  pretraining = _make_index(root / "stage1", tokenizer, {"docs": short}, 64)
  midtraining = _make_index(root / "stage2", tokenizer, {"classes": texts["classes"]}, 64)
  half = len(long) // 2
  labels = {"first": long[:half], "second": long[half:]}
  extension = _make_index(root / "stage3", tokenizer, labels, 256, "--source-permutation-seed=123")
  fine_tuning = _make_sft(root / "sft", tokenizer, 256)
  return [
      Stage("1", "olmo3_7b_stage1", {**keys, **windows, "steps": 30, **pretraining}),
      Stage("2", "olmo3_7b_stage2", {**keys, **windows, "steps": 20, **midtraining}),
      Stage("3", "olmo3_7b_stage3_long_context", {**keys, **packed, "steps": 20, **extension}),
      # Two epochs end the run.
      Stage("SFT", "olmo3_sft_think", {**keys, **packed, "steps": 1000, **fine_tuning}),
  ]


def _make_index(
    folder: pathlib.Path,
    tokenizer: pathlib.Path,
    texts: dict[str, list[str]],
    length: int,
    *options: str,
) -> dict[str, str]:
  inputs = []
  for label, documents in texts.items():
    rows = [{"text": text} for text in documents]
    path = chats.write_chats(folder / f"{label}.jsonl", rows)
    inputs.append(f"{label}={path}")
  _command("corpus", "make", "--output", folder, "--tokenizer", tokenizer, *inputs)
  return _build_index(folder, tokenizer, length, *options)


def _make_sft(folder: pathlib.Path, tokenizer: pathlib.Path, length: int) -> dict[str, str]:
  path = chats.write_chats(folder / "chats.jsonl", chats.sums(180))
  words = ("--tokenizer", tokenizer, "--workers", 2, "--tokens-per-file", 9000)
  _command("corpus", "make-sft", path, "--output", folder, *words)
  return _build_index(folder, tokenizer, length)


def _build_index(
    folder: pathlib.Path, tokenizer: pathlib.Path, length: int, *options: str
) -> dict[str, str]:
  index = folder / "index.json"
  _command(
      *("index", "build", "--mix-file", folder / "mix.txt", "--tokenizer", tokenizer.name),
      *("--dtype", "uint16", "--sequence-length", length, "--output", index, *options),
  )
  return {"olmo_index_path": str(index)}


def _command(*words: Any) -> None:
  code, out, err = runner.run(*words)
  if code:
    raise RecipeError(f"maxtext-olmo {' '.join(map(str, words))} failed:\n{out}{err}")


@dataclasses.dataclass(frozen=True)
class Run:
  """A run of one stage.

  Attributes:
    stage: The stage.
    folder: Directory of the checkpoints, metrics and ledger.
    before: Directory of the stage before, whose weights it starts from; None for the first stage.
  """

  stage: Stage
  folder: pathlib.Path
  before: pathlib.Path | None

  @property
  def checkpoints(self) -> str:
    return str(self.folder / "checkpoints")

  def flags(self) -> list[str]:
    keys = dict(self.stage.keys)
    keys |= {"checkpoint_dir": self.checkpoints, "metrics_file": str(self.folder / "metrics.jsonl")}
    if self.before is not None:
      keys["load_parameters_path"] = str(self.before / "checkpoints")
    return [
        f"--config={config_lib.SHIPPED / self.stage.config}.py",
        *(f"--config.{name}={value}" for name, value in keys.items()),
    ]

  def train(self, programs: pathlib.Path, kill_at: int | None = None) -> None:
    """Trains in a process of its own, until the end or until it is killed."""
    self.folder.mkdir(parents=True, exist_ok=True)
    variables = {
        _LEDGER: str(self.folder / "ledger.jsonl"),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COMPILATION_CACHE_DIR": str(programs),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    if kill_at is not None:
      variables[_KILL] = str(kill_at)
    done = subprocess.run(
        [sys.executable, "-P", "-m", __spec__.name, "--train", *self.flags()],
        env=distributed.child_environment(variables),
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    expected = 0 if kill_at is None else -signal.SIGKILL
    if done.returncode != expected:
      raise RecipeError(
          f"Stage {self.stage.name} ended with {done.returncode}, expected {expected}:\n"
          f"{done.stderr[-3000:]}"
      )

  def last_step(self) -> int | None:
    """Returns the step of the latest checkpoint."""
    return resume.latest_committed_step(self.checkpoints)

  def ledger(self) -> list[tuple[int, dict[str, str]]]:
    """Returns the step and the digests of each batch that a step was given, in that order."""
    lines = (self.folder / "ledger.jsonl").read_text().splitlines()
    return [(line["step"], line["arrays"]) for line in map(json.loads, lines)]

  def metrics(self) -> list[dict[str, float]]:
    """Returns the metrics of each step."""
    return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

  def state(self) -> dict[str, np.ndarray]:
    """Returns the arrays of the latest checkpoint: weights, optimiser and step."""
    config = config_lib.read_config(["", *self.flags()])
    learner = model.Learner(config, model.make_mesh(config))
    checkpoints = checkpoints_lib.Checkpoints(self.checkpoints, read_only=True)
    state, _ = checkpoints.restore(checkpoints.latest, learner.abstract_state)
    checkpoints.close()
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def walk(root: pathlib.Path, rng: random.Random) -> Iterator[tuple[Any, ...]]:
  """Runs all stages with and without kills, and yields a row of the table for each.

  Raises:
    RecipeError: A killed run differs from the uninterrupted one.
  """
  programs = root / "programs"
  whole_before: pathlib.Path | None = None
  killed_before: pathlib.Path | None = None
  untrained = float("inf")  # Loss of the initial weights.
  for stage in make_stages(root):
    whole = Run(stage, root / f"whole-{stage.name}", whole_before)
    whole.train(programs)
    steps = len(whole.metrics())
    kill_at = rng.randrange(_PERIOD + 1, steps - 1)
    killed = Run(stage, root / f"killed-{stage.name}", killed_before)
    killed.train(programs, kill_at)
    resumed_from = killed.last_step()
    killed.train(programs)
    repeated = compare(whole, killed)
    losses = [line["loss"] for line in whole.metrics()]
    if losses[0] >= untrained:
      raise RecipeError(f"Stage {stage.name} did not start from the weights of the stage before.")
    untrained = losses[0] if whole_before is None else untrained
    trained = sum(line["target_tokens"] for line in whole.metrics())
    rows, length = (stage.keys[k] for k in ("global_batch_size_to_load", "max_target_length"))
    yield (
        stage.name,
        stage.config,
        f"{rows} x {length}",
        steps,
        kill_at,
        resumed_from,
        repeated,
        f"{trained / (steps * rows * length):.0%}",
        f"{losses[0]:.3f}",
        f"{losses[-1]:.3f}",
    )
    whole_before, killed_before = whole.folder, killed.folder


def compare(whole: Run, killed: Run) -> int:
  """Compares two runs of a stage, and returns the number of steps that the kill made it repeat."""
  name = whole.stage.name
  expected = dict(whole.ledger())
  if sorted(expected) != list(range(len(whole.metrics()))):
    raise RecipeError(f"Stage {name}: the uninterrupted run has a gap.")
  given = killed.ledger()
  for step, arrays in given:
    if arrays != expected.get(step):
      raise RecipeError(f"Stage {name}: step {step} had another batch after the kill.")
  if dict(given).keys() != expected.keys():
    raise RecipeError(f"Stage {name}: the killed run has other steps.")
  for ours, theirs in zip(whole.metrics(), killed.metrics(), strict=True):
    if ours != theirs:
      raise RecipeError(f"Stage {name}: metrics differ: {ours} and {theirs}.")
  ours, theirs = whole.state(), killed.state()
  different = [key for key in ours if ours[key].tobytes() != theirs[key].tobytes()]
  if different or ours.keys() != theirs.keys():
    raise RecipeError(f"Stage {name}: the final state differs: {', '.join(different)}.")
  return len(given) - len(expected)


def _train(argv: list[str]) -> int:
  """Runs the tiny trainer, which records its batches and kills itself at a step, if asked to."""
  kill_at = int(os.environ.get(_KILL, -1))
  checkpoints = next(a.partition("=")[2] for a in argv if a.startswith("--config.checkpoint_dir="))

  def on_batch(step: int, batch: dict[str, jax.Array]) -> None:
    arrays = {
        name: xxhash.xxh3_64_hexdigest(np.ascontiguousarray(array)) for name, array in batch.items()
    }
    with open(os.environ[_LEDGER], "a", encoding="utf-8") as file:
      file.write(json.dumps({"step": step, "arrays": arrays}) + "\n")
    if step == kill_at:
      while resume.latest_committed_step(checkpoints) is None:
        time.sleep(0.01)  # A checkpoint is being written in the background.
      os.kill(os.getpid(), signal.SIGKILL)

  return trainer.main_from_argv(["recipe", *argv], on_batch=on_batch)


def main(argv: list[str]) -> int:
  """Runs the recipe, prints a table, and returns 0 if no stage differs."""
  if argv[:1] == ["--train"]:
    return _train(argv[1:])
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--directory", help="directory for all files (default: a temporary one)")
  parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
  args = parser.parse_args(argv)
  root = pathlib.Path(args.directory or tempfile.mkdtemp(prefix="recipe_")).absolute()
  print(f"The seed of the kills is {args.seed}.", flush=True)
  began = time.monotonic()
  jax.config.update("jax_platforms", "cpu")
  table = []
  try:
    for row in walk(root, random.Random(args.seed)):
      table.append(row)
      print(f"Stage {row[0]}: batches, losses and the final state are equal.", flush=True)
  except RecipeError as error:
    print(error, file=sys.stderr)
    return 1
  finally:
    if args.directory is None:
      shutil.rmtree(root, ignore_errors=True)
  columns = ("stage", "config", "batch", "steps", "killed at", "resumed after", "repeated steps",
             "trained tokens", "first loss", "last loss")  # fmt: skip
  cli.print_table(columns, table)
  print(f"{time.monotonic() - began:.0f} s")
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
