"""A run that is stopped and started differently, with a ledger of every row that it trained on."""

from __future__ import annotations

import collections
import io
import os
import pathlib
import random
import time
from collections.abc import Callable, Mapping

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

_LENGTH = 16
_DATA_SEED = 7


def is_alive(pid: int) -> bool:
  """Returns whether a process exists."""
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  return True


class LedgerTestCase(absltest.TestCase):
  """A test that starts a run several times and then checks what it was trained on."""

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

  def start(
      self, rng: random.Random, steps: int, workers: int | None = None
  ) -> tuple[launch.LocalRun, io.StringIO]:
    """Starts the run anew, with other numbers of processes and workers and another batch size."""
    processes = rng.choice((1, 2, 2, 2, 4))
    workers = rng.choice((0, 0, 1)) if workers is None else workers
    flags, env = self.prepare(steps, size=rng.choice((4, 8, 12)), workers=workers)
    output = io.StringIO()
    run = launch.LocalRun(flags, processes=processes, module=demo.__name__, env=env, output=output)
    self.addCleanup(run.stop)
    logging.info("%d processes, %d workers", processes, workers)
    return run, output

  def prepare(
      self, steps: int, *, size: int, workers: int = 0, **changes: object
  ) -> tuple[list[str], Mapping[str, str]]:
    """Returns the command line and the environment of the next start."""
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
        **changes,
    )
    flags = [f"--config.{name}={value}" for name, value in config.items() if value is not None]
    return flags, {**self.env, demo.LEDGER_VARIABLE: str(ledger)}

  def steps_done(self) -> int:
    label = resume.latest_committed_step(str(self.checkpoints))
    return 0 if label is None else label + 1

  def wait_until(
      self, holds: Callable[[], bool], run: launch.LocalRun, output: io.StringIO
  ) -> None:
    while not holds():
      self.assertTrue(run.running, output.getvalue())
      time.sleep(0.01)

  def lines(self) -> int:
    ledger = self.attempts[-1][2]
    return sum(path.read_text().count("\n") for path in ledger.glob("*.jsonl"))

  def is_saving(self) -> bool:
    return any("tmp" in path.name for path in self.checkpoints.glob("*"))

  def check_ledger(self, *, complete: bool = True) -> None:
    """Checks that the saved steps took the first rows of the order, each once per epoch.

    Args:
      complete: Whether the run must have taken more than an epoch.
    """
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
    if complete:
      self.assertGreater(len(taken), n)
    for start in range(0, len(taken), n):
      epoch = taken[start : start + n]
      counts = collections.Counter(epoch)
      self.assertEqual(max(counts.values()), 1)
      if len(epoch) == n:
        self.assertLen(counts, n)
    order = permutations.make_order("feistel", num_instances=n, seed=_DATA_SEED)
    self.assertEqual(taken, order.at(np.arange(len(taken))).tolist())
    logging.info("%d samples in %.1f epochs", len(taken), len(taken) / n)
