"""Kills processes of a run at random points, restarts it differently, and counts its rows.

`KILLS` and `KILL_SEED` in the environment set the number and the seed of the kills, as `make
test-kill` does.
"""

from __future__ import annotations

import collections
import io
import os
import pathlib
import random
import signal
import time

import numpy as np
import xxhash
from absl import logging
from absl.testing import absltest

from maxtext_olmo.cli import demo
from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.corpus import source as source_lib
from maxtext_olmo.loader import resume
from maxtext_olmo.order import permutations
from maxtext_olmo.trainers import launch
from tests import corpora
from tests import distributed
from tests.trainers.tiny import train_cases

STARTS_PROCESSES = True

_KILLS = int(os.environ.get("KILLS", "8"))
_SEED = int(os.environ.get("KILL_SEED", "1"))
_LENGTH = 16
_DATA_SEED = 7


def _is_alive(pid: int) -> bool:
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  return True


class KillTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)
    self.index_path, _ = corpora.write_corpus(
        self.dir / "corpus",
        tokens_per_file=(1000, 2500, 700),
        sequence_length=_LENGTH,
        vocab_size=60,
    )
    self.checkpoints = self.dir / "checkpoints"
    self.env = distributed.child_environment(
        {
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "JAX_COMPILATION_CACHE_DIR": str(self.dir / "compilation_cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
    )
    self.attempts: list[tuple[int, int, pathlib.Path]] = []  # first step, batch size, ledger

  def start(self, rng: random.Random, steps: int) -> tuple[launch.LocalRun, io.StringIO]:
    """Starts the run anew, with other numbers of processes and workers and another batch size."""
    processes, workers = rng.choice((1, 2, 2, 2, 4)), rng.choice((0, 0, 1))
    size = rng.choice((4, 8, 12))
    ledger = self.dir / f"ledger-{len(self.attempts)}"
    ledger.mkdir()
    self.attempts.append((self.steps_done(), size, ledger))
    config = train_cases.make_config(
        dataset_type="olmo_grain",
        olmo_index_path=self.index_path,
        max_target_length=_LENGTH,
        global_batch_size_to_load=size,
        data_shuffle_seed=_DATA_SEED,
        olmo_apply_ngram_filter=False,
        grain_worker_count=workers,
        checkpoint_dir=str(self.checkpoints),
        checkpoint_period=4,
        max_checkpoints=2,
        steps=steps,
        learning_rate=1e-4,
    )
    output = io.StringIO()
    run = launch.LocalRun(
        [f"--config.{name}={value}" for name, value in config.items() if value is not None],
        processes=processes,
        module=demo.__name__,
        env={**self.env, demo.LEDGER_VARIABLE: str(ledger)},
        output=output,
    )
    self.addCleanup(run.stop)
    logging.info("%d processes, %d workers, batches of %d", processes, workers, size)
    return run, output

  def steps_done(self) -> int:
    label = resume.latest_committed_step(str(self.checkpoints))
    return 0 if label is None else label + 1

  def wait_until(self, holds, run: launch.LocalRun, output: io.StringIO) -> None:
    while not holds():
      self.assertTrue(run.running, output.getvalue())
      time.sleep(0.01)

  def lines(self) -> int:
    ledger = self.attempts[-1][2]
    return sum(path.read_text().count("\n") for path in ledger.glob("*.jsonl"))

  def is_saving(self) -> bool:
    return any("tmp" in path.name for path in self.checkpoints.glob("*"))

  def test_each_instance_is_trained_on_once_per_epoch_whatever_is_killed(self):
    rng = random.Random(_SEED)
    kinds = ["start", "step", "save", "step", "save", "step", "save", "step"]
    for kill in range(_KILLS):
      run, output = self.start(rng, steps=1_000_000)
      kind = kinds[kill % len(kinds)]
      if kind == "start":
        time.sleep(rng.uniform(0.5, 4))
      else:
        count = rng.randrange(1, 30)
        self.wait_until(lambda count=count: self.lines() >= count, run, output)
        if kind == "save":
          self.wait_until(self.is_saving, run, output)
      time.sleep(rng.uniform(0, 0.05))
      victim = rng.choice(run.pids)
      os.kill(victim, signal.SIGKILL)
      outcome = run.wait()
      self.assertEqual(outcome.code, 128 + signal.SIGKILL, output.getvalue())
      self.assertIn(f"(pid {victim}) was ended by SIGKILL", outcome.reason)
      self.assertFalse(any(_is_alive(pid) for pid in run.pids))
      logging.info("killed while at %s; %d steps are saved", kind, self.steps_done())
    run, output = self.start(rng, steps=self.steps_done() + 60)
    self.assertEqual(run.wait().code, 0, output.getvalue())
    self.check_ledger()

  def check_ledger(self) -> None:
    index = index_lib.load_index(self.index_path)
    rows = source_lib.OlmoNpyDataSource(index).read(np.arange(index.total_instances))
    digests = {
        xxhash.xxh3_64_hexdigest(row.astype(np.int32).tobytes()): i for i, row in enumerate(rows)
    }
    self.assertLen(digests, index.total_instances)
    taken: list[int] = []
    ends = [first for first, _, _ in self.attempts[1:]] + [self.steps_done()]
    for (first, size, directory), end in zip(self.attempts, ends):
      ledger = demo.read_ledger(directory)
      for step in range(first, end):
        self.assertEqual(sorted(ledger[step]), list(range(size)))
        taken += [digests[ledger[step][row]] for row in range(size)]
    n = index.total_instances
    self.assertGreater(len(taken), n)
    for start in range(0, len(taken), n):
      epoch = taken[start : start + n]
      counts = collections.Counter(epoch)
      self.assertEqual(max(counts.values()), 1)
      if len(epoch) == n:
        self.assertLen(counts, n)
    order = permutations.make_order("feistel", num_instances=n, seed=_DATA_SEED)
    self.assertEqual(taken, order.at(np.arange(len(taken))).tolist())
    logging.info("%d kills, %d samples in %.1f epochs", _KILLS, len(taken), len(taken) / n)


if __name__ == "__main__":
  absltest.main()
