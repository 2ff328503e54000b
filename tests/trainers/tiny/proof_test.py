"""Kills and changes a run of the tiny trainer, and asks it about every step that it was fed."""

from __future__ import annotations

import io
import os
import pathlib
import random
import signal
import time

from absl.testing import absltest

from maxtext_olmo.trainers import launch
from tests import distributed
from tests.trainers import proof
from tests.trainers.tiny import tapped
from tests.trainers.tiny import train_cases

STARTS_PROCESSES = True


class TinyProofTest(proof.ProofTestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)
    self.checkpoints = self.dir / "checkpoints"

  def start(
      self, corpus: proof.Corpus, phase: proof.Phase, tap: pathlib.Path
  ) -> tuple[launch.LocalRun, io.StringIO]:
    """Starts the trainer as a phase says."""
    config = train_cases.make_config(
        dataset_type="olmo_grain",
        olmo_index_path=corpus.index_path,
        max_target_length=proof.LENGTH,
        vocab_size=proof.VOCABULARY,
        global_batch_size_to_load=phase.rows,
        olmo_document_mask=True,
        olmo_apply_ngram_filter=True,
        olmo_eos_id=proof.EOS,
        checkpoint_dir=str(self.checkpoints),
        checkpoint_period=proof.PERIOD,
        max_checkpoints=0,
        steps=phase.steps or 1_000_000,
        learning_rate=1e-4,
    )
    keys = {**config, "olmo_mixture": proof.MIXTURE, **phase.keys}
    output = io.StringIO()
    run = launch.LocalRun(
        [f"--config.{name}={value}" for name, value in keys.items() if value is not None],
        processes=phase.processes,
        module=tapped.__name__,
        env=distributed.child_environment(
            {
                tapped.VARIABLE: str(tap),
                "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
                "JAX_COMPILATION_CACHE_DIR": str(self.dir / "compilation_cache"),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            }
        ),
        output=output,
    )
    self.addCleanup(run.stop)
    return run, output

  def run_phase(self, corpus: proof.Corpus, phase: proof.Phase, tap: pathlib.Path) -> None:
    run, output = self.start(corpus, phase, tap)
    if phase.steps is not None:
      self.assertEqual(run.wait().code, 0, output.getvalue())
      return
    # A save may end several steps of so small a model later.
    while not any(tap.glob(f"{phase.kill_at}-*.npz")) or phase.kill_at > proof.PERIOD + (
        proof.next_step(self.checkpoints)
    ):
      self.assertTrue(run.running, output.getvalue())
      time.sleep(0.01)
    time.sleep(random.uniform(0, 0.05))
    os.kill(random.choice(run.pids), signal.SIGKILL)
    self.assertEqual(run.wait().code, 128 + signal.SIGKILL, output.getvalue())

  def test_every_step_and_document_of_a_run_with_every_change_is_explained_as_it_was_fed(self):
    self.prove(self.dir, self.checkpoints, self.run_phase)


if __name__ == "__main__":
  absltest.main()
