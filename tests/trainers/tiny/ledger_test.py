"""Tests of the trainer with a tap."""

import pathlib
import subprocess
import sys

from absl.testing import absltest

from maxtext_olmo.trainers.tiny import ledger as ledger_lib
from tests import distributed

STARTS_PROCESSES = True


class DemoWorkerTest(absltest.TestCase):

  def test_it_writes_down_every_row_of_every_batch(self):
    directory = pathlib.Path(self.create_tempdir().full_path)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "maxtext_olmo.trainers.tiny.ledger",
            "--config.dataset_type=synthetic",
            "--config.vocab_size=64",
            "--config.max_target_length=16",
            "--config.steps=3",
            "--config.warmup_steps=1",
        ],
        env=distributed.child_environment({ledger_lib.LEDGER_VARIABLE: str(directory)}),
        capture_output=True,
        text=True,
        check=False,
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    ledger = ledger_lib.read_ledger(directory)
    self.assertEqual(sorted(ledger), [0, 1, 2])
    for rows in ledger.values():
      self.assertEqual(sorted(rows), list(range(8)))
    self.assertLen({digest for rows in ledger.values() for digest in rows.values()}, 24)


if __name__ == "__main__":
  absltest.main()
