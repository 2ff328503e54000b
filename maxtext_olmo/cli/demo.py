"""`maxtext-olmo demo`: kills a training run, resumes it, and shows that no data was lost.

The demo trains with `python -m maxtext_olmo.cli.demo --config=…`. This runs the tiny trainer, and
also records a digest of every row that a process trains on, in the directory named by the variable
`MAXTEXT_OLMO_DEMO_LEDGER`. If `MAXTEXT_OLMO_DEMO_PAUSE` is set to a step, the trainer pauses at
that step, so that it can be killed there.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import os
import pathlib
import random
import shutil
import signal
import sys
import sysconfig
import time
from collections.abc import Sequence
from typing import Any

from maxtext_olmo import cli
from maxtext_olmo import errors

LEDGER_VARIABLE = "MAXTEXT_OLMO_DEMO_LEDGER"
PAUSE_VARIABLE = "MAXTEXT_OLMO_DEMO_PAUSE"
_SEQUENCE_LENGTH = 128
_BATCH = 8
_CHECKPOINT_PERIOD = 8
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef
_KINDS: dict[type, str] = {
    ast.Module: "modules",
    ast.ClassDef: "classes",
    ast.FunctionDef: "functions",
}


def add_parser(subparsers: Any) -> None:
  """Adds `demo`."""
  option = cli.add_command(
      subparsers,
      "demo",
      run,
      help="make a corpus, train on 2 processes, kill one, resume on 1, compare",
      description=(
          "Makes a corpus of Python's own documentation strings, trains a small model on two JAX"
          " processes, kills one of them mid-run, resumes with a single process, and compares the"
          " result with an uninterrupted run."
      ),
  )
  option("--directory DIR", "directory for all files of the demo", default="demo-run")
  option("--steps N", "number of training steps, at least 24", default=48)


def run(args: argparse.Namespace) -> int:
  """Runs the demo; returns 0 if the two runs agree."""
  from rich.console import Console

  if args.steps < 3 * _CHECKPOINT_PERIOD:
    raise errors.ConfigError(
        f"--steps={args.steps} leaves no room for a kill between two checkpoints; use"
        f" {3 * _CHECKPOINT_PERIOD} or more."
    )
  console = Console(highlight=False)
  began = time.monotonic()
  root = pathlib.Path(args.directory)
  if root.exists():
    if not (root / "demo.txt").exists():
      raise errors.ConfigError(
          f"{root} exists and was not made by a demo. Choose another --directory."
      )
    shutil.rmtree(root)
  root.mkdir(parents=True)
  (root / "demo.txt").write_text("Made by `maxtext-olmo demo`; safe to delete.\n")

  numbers = itertools.count(1)

  def chapter(text: str, explanation: str) -> None:
    console.print(f"\n[bold cyan]{next(numbers)}.[/] [bold]{text}[/]\n   [dim]{explanation}[/]\n")

  chapter(
      "A corpus in OLMo's format, from Python's own documentation strings",
      "Headerless token files, a mix manifest that lists them, and an index that says where each"
      " instance is.",
  )
  index_path, vocab_size = _make_corpus(console, root)
  kill_at = random.Random(time.time_ns()).randint(_CHECKPOINT_PERIOD + 2, args.steps - 6)
  chapter(
      f"Train on 2 processes; one of them is killed at step {kill_at}",
      "Each process reads the rows that its device holds. A checkpoint contains the model and one"
      " small file for the data: a position, and the identity of the stream.",
  )
  flags = _flags(index_path, vocab_size, args.steps)
  _train(console, root / "interrupted", flags, processes=2, kill_at=kill_at)
  chapter(
      "Start again, on 1 process: it resumes from the last checkpoint",
      "A position counts samples, not processes, so the number of processes may change.",
  )
  _train(console, root / "interrupted", flags, processes=1)
  chapter("The same run without interruption, on 1 process", "The reference for the comparison.")
  _train(console, root / "untouched", flags, processes=1)
  chapter(
      "Compare",
      "Every process recorded a digest of each row that it trained on. Process 0 also recorded the"
      " loss of each step.",
  )
  same = _compare(console, root, args.steps, kill_at)
  console.print(f"\nThis took {time.monotonic() - began:.0f} s. All files are in [bold]{root}[/].")
  return 0 if same else 1


def docstrings(limit_files: int = 700) -> dict[str, list[str]]:
  """Returns docstrings of Python's standard library, by kind, read from its sources."""
  library = pathlib.Path(sysconfig.get_paths()["stdlib"])
  skipped = {"test", "tests", "site-packages", "idlelib", "__pycache__", "lib2to3", "turtledemo"}
  files = [
      path
      for path in sorted(library.rglob("*.py"))
      if not skipped & set(path.relative_to(library).parts)
  ][:limit_files]
  found: dict[str, list[str]] = {kind: [] for kind in _KINDS.values()}
  for path in files:
    try:
      tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
      continue
    for node in ast.walk(tree):
      if isinstance(node, _Documented):
        text = ast.get_docstring(node)
        if text:
          found[_KINDS[type(node)]].append(text)
  return {kind: texts for kind, texts in found.items() if texts}


def _make_corpus(console: Any, root: pathlib.Path) -> tuple[pathlib.Path, int]:
  """Writes token files, a manifest and an index; returns the index's path and vocabulary size."""
  from maxtext_olmo.corpus import index_builder as index_lib
  from maxtext_olmo.corpus import manifest as manifest_lib
  from maxtext_olmo.corpus import tokenize
  from maxtext_olmo.corpus import tokenizer

  directory = root / "corpus"
  made = tokenize.make_corpus(
      docstrings(), directory, tokenizer.ByteTokenizer(), tokens_per_file=200_000
  )
  entries = manifest_lib.read_mix(made.mix_file, tokenizer=made.tokenizer)
  index = index_lib.build_index(
      [(entry.path, entry.label) for entry in entries],
      _SEQUENCE_LENGTH,
      tokenizer=made.tokenizer,
      dtype=made.dtype,
      base=str(directory.absolute()),
  )
  path = root / "index.json"
  index.save(str(path))
  console.print(
      f"  {made.documents:,} documents, {made.tokens:,} tokens in {made.files} headerless"
      f" {made.dtype} files\n"
      f"  index: {index.total_instances:,} instances of {_SEQUENCE_LENGTH} tokens, fingerprint"
      f" {index.fingerprint[:12]}…"
  )
  return path, made.vocab_size


def _flags(index_path: pathlib.Path, vocab_size: int, steps: int) -> dict[str, object]:
  return {
      "dataset_type": "olmo_grain",
      "olmo_index_path": index_path,
      "max_target_length": _SEQUENCE_LENGTH,
      "global_batch_size_to_load": _BATCH,
      "vocab_size": vocab_size,
      "data_shuffle_seed": 34521,
      "olmo_eval_instances": 64,
      "eval_interval": _CHECKPOINT_PERIOD * 2,
      "steps": steps,
      "learning_rate": 3e-3,
      "checkpoint_period": _CHECKPOINT_PERIOD,
      "log_interval": _CHECKPOINT_PERIOD,
  }


def _train(
    console: Any,
    directory: pathlib.Path,
    flags: dict[str, object],
    *,
    processes: int,
    kill_at: int | None = None,
) -> None:
  """Runs the trainer on two devices in total; kills a process at step `kill_at`, if given."""
  from maxtext_olmo.trainers import launch

  ledger = directory / f"ledger-{processes}-processes"
  ledger.mkdir(parents=True, exist_ok=True)
  metrics = directory / "metrics.jsonl"
  flags = {**flags, "checkpoint_dir": directory / "checkpoints", "metrics_file": metrics}
  output = _Output(console)
  started = launch.LocalRun(
      [f"--config.{name}={value}" for name, value in flags.items()],
      module="maxtext_olmo.cli.demo",
      processes=processes,
      devices=2 // processes,
      output=output,  # type: ignore[arg-type]
      env={
          LEDGER_VARIABLE: str(ledger),
          PAUSE_VARIABLE: str(-1 if kill_at is None else kill_at),
          "JAX_PLATFORMS": "cpu",
          "JAX_COMPILATION_CACHE_DIR": str(directory.parent.absolute() / "compilation-cache"),
      },
  )
  try:
    if kill_at is not None:
      _wait_for_step(started, ledger, kill_at, directory / "checkpoints")
      output.silent = True
      console.print(f"   [bold red]kill -9 {started.pids[1]}[/]  (process 1)")
      os.kill(started.pids[1], signal.SIGKILL)
    outcome = started.wait()
  finally:
    started.stop()
  if kill_at is not None:
    console.print(f"   launcher: {outcome.reason}")
  elif outcome.code:
    raise errors.MaxtextOlmoError(f"The trainer failed: {outcome.reason}.")


def _wait_for_step(
    started: Any, ledger: pathlib.Path, step: int, checkpoints: pathlib.Path
) -> None:
  """Waits until both processes pause at a step and a checkpoint has been written."""
  from maxtext_olmo.loader import resume

  while started.running:
    stand = len(read_ledger(ledger).get(step, {})) == _BATCH
    # Steps are short, so a checkpoint in the background may not be written yet.
    if stand and resume.latest_committed_step(checkpoints) is not None:
      return
    time.sleep(0.05)
  raise errors.MaxtextOlmoError(f"The trainer ended before step {step}: {started.wait().reason}.")


def _losses(metrics: pathlib.Path) -> dict[int, float]:
  entries = map(json.loads, metrics.read_text().splitlines())
  return {entry["step"]: entry["loss"] for entry in entries}


def _compare(console: Any, root: pathlib.Path, steps: int, kill_at: int) -> bool:
  """Prints both runs side by side.

  Returns:
    Whether the runs agree, and the interrupted run really resumed from a checkpoint.
  """
  from rich.table import Table

  before = read_ledger(root / "interrupted" / "ledger-2-processes")
  after = read_ledger(root / "interrupted" / "ledger-1-processes")
  expected = read_ledger(root / "untouched" / "ledger-1-processes")
  resumed_at = min(after)
  losses = _losses(root / "interrupted" / "metrics.jsonl")
  expected_losses = _losses(root / "untouched" / "metrics.jsonl")
  off = [abs(losses[step] - expected_losses[step]) for step in range(steps)]

  table = Table(title="loss, step by step")
  for name in ("step", "killed and resumed", "uninterrupted", "difference", "rows of the batch"):
    table.add_column(name, justify="right")
  differing = 0
  for step in range(steps):
    bad = _differing_rows(expected[step], before.get(step, {}), after.get(step), resumed_at > step)
    differing += bad
    if step % 6 == 0 or step in (resumed_at - 1, resumed_at, kill_at, steps - 1):
      who = "2 processes" if step < resumed_at else "1 process"
      table.add_row(
          f"{step}",
          f"{losses[step]:.6f}  ({who})",
          f"{expected_losses[step]:.6f}",
          f"{off[step]:.1e}",
          _agreement(bad),
          end_section=step in (resumed_at - 1, kill_at),
      )
  console.print(table)
  rows = [digest for step in range(steps) for digest in expected[step].values()]
  again = len(set(before) & set(after))
  console.print(
      f"  killed at step {kill_at}; the last checkpoint was saved after step {resumed_at - 1}, so"
      f" the run resumed with step {resumed_at}; steps lost by the kill, trained again: {again}\n"
      f"  {len(rows)} rows in {steps} batches: {_agreement(differing)}, row by row;"
      f" {len(set(rows))} distinct\n"
      f"  losses agree {f'to {max(off):.1e}, which is rounding' if max(off) else 'exactly'}"
  )
  return 0 < resumed_at <= kill_at and not differing and max(off) < 1e-3


def _agreement(differing: int) -> str:
  return f"[bold red]{differing} differ[/]" if differing else "[bold green]identical[/]"


def _differing_rows(
    expected: dict[int, str],
    before: dict[int, str],
    after: dict[int, str] | None,
    kept: bool,
) -> int:
  """Returns the number of rows of a step that differ from the uninterrupted run.

  Args:
    expected: The digest of each row in the uninterrupted run.
    before: The digests of the killed run. Rows may be missing if a process was killed at this step.
    after: The digests of the resumed run, if it reached this step.
    kept: Whether the checkpoint from which the run resumed includes the step. If so, `before` is
      compared, otherwise `after`.
  """
  counting = before if kept else (after or {})
  wrong = {row for row, digest in expected.items() if counting.get(row) != digest}
  # A step that was trained before the kill and again after it must be the same both times.
  return len(wrong | {row for row, digest in before.items() if expected.get(row) != digest})


class _Output:
  """Prints the processes' lines until the kill; the launcher reports what happens after it."""

  def __init__(self, console: Any):
    self._console = console
    self.silent = False

  def write(self, text: str) -> None:
    if not self.silent:
      self._console.out("   " + text, end="", highlight=False)

  def flush(self) -> None:
    pass


def read_ledger(directory: pathlib.Path) -> dict[int, dict[int, str]]:
  """Returns digests by step and row, over all processes; the last digest of a row counts."""
  steps: dict[int, dict[int, str]] = {}
  for path in sorted(directory.glob("*.jsonl"), key=lambda path: path.stat().st_mtime):
    for line in path.read_text().splitlines():
      try:
        entry = json.loads(line)
      except ValueError:  # A killed process may leave an incomplete line.
        continue
      rows = {int(row): digest for row, digest in entry["rows"].items()}
      steps.setdefault(entry["step"], {}).update(rows)
  return steps


def _train_with_ledger(argv: Sequence[str]) -> int:
  import numpy as np
  import xxhash

  from maxtext_olmo.trainers.tiny import trainer

  pause_at = int(os.environ.get(PAUSE_VARIABLE, "-1"))
  path = pathlib.Path(os.environ[LEDGER_VARIABLE]) / f"{os.getpid()}.jsonl"
  with open(path, "w", encoding="utf-8") as ledger:

    def note(step: int, batch: dict[str, Any]) -> None:
      rows = {}
      for shard in batch["inputs"].addressable_shards:
        first = shard.index[0].indices(batch["inputs"].shape[0])[0]
        for i, row in enumerate(np.asarray(shard.data)):
          rows[first + i] = xxhash.xxh3_64_hexdigest(row.tobytes())
      ledger.write(json.dumps({"step": step, "rows": rows}) + "\n")
      ledger.flush()
      while step == pause_at:
        time.sleep(0.1)

    return trainer.main_from_argv(argv, on_batch=note)


if __name__ == "__main__":
  sys.exit(_train_with_ledger(sys.argv))
