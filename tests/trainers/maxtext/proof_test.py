"""Kills and changes a run of the real MaxText, and asks it about every step that it was fed."""

import pathlib

from absl.testing import absltest

from tests.trainers import proof
from tests.trainers.maxtext import runs

STARTS_PROCESSES = True


def setUpModule():
  runs.set_up_module()


@runs.needs_maxtext
class MaxTextProofTest(proof.ProofTestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)

  def run_phase(self, corpus: proof.Corpus, phase: proof.Phase, tap: pathlib.Path) -> None:
    keys = {
        "max_target_length": proof.LENGTH,
        "vocab_size": proof.VOCABULARY,
        "per_device_batch_size": phase.rows // phase.processes,
        "checkpoint_period": proof.PERIOD,
        "steps": phase.steps or 1000,
        "olmo_mixture": proof.MIXTURE,
        "olmo_document_mask": True,
        "olmo_eos_id": proof.EOS,
        **phase.keys,
    }
    # The command line is YAML, which has no tuples; pairs of numbers are read in either notation.
    keys["olmo_stages"] = list(phase.keys.get("olmo_stages", ()))
    arguments = [f"{name}={value}" for name, value in keys.items()]
    kills = phase.steps is None
    run = runs.start(
        self.dir, *arguments, processes=phase.processes, pause=0.1 if kills else 0, arrays=tap
    )
    if not kills:
      run.wait()
      return
    run.kill_at(phase.kill_at)

  def test_every_step_and_document_of_a_run_with_every_change_is_explained_as_it_was_fed(self):
    self.prove(self.dir, self.dir / "run" / "checkpoints", self.run_phase)


if __name__ == "__main__":
  absltest.main()
