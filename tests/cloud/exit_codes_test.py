"""Tests the exit codes with which commands and runs end if a store does not answer.

A scheduler restarts some codes and gives up on others, so an outage must not look like an error in
the config. The tests take as long as the patience with a store that has never answered.
"""

from __future__ import annotations

import subprocess
import sys

from absl.testing import absltest

from maxtext_olmo import trainers
from tests import distributed
from tests.cloud import servers

STARTS_PROCESSES = True

_INDEX = "http://127.0.0.1:1/index.json"  # Nothing listens there.


class ExitCodesTest(absltest.TestCase):

  def start(self, *words: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "maxtext_olmo", *words],
        env=distributed.child_environment(servers.NO_METADATA),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    self.addCleanup(process.kill)
    return process

  def test_a_silent_store_ends_runs_and_commands_with_codes_that_ask_for_a_restart(self):
    checkpoints, results = (self.create_tempdir().full_path for _ in range(2))
    keys = {"dataset_type": "olmo_grain", "olmo_index_path": _INDEX, "checkpoint_dir": checkpoints}
    keys |= {"coordinator_address": f"127.0.0.1:{distributed.free_port()}", "num_processes": 2}
    started = [  # At the same time, because each waits for half a minute.
        self.start("verify", _INDEX, "--results", results, "--part", "0", "--of", "2"),
        *(
            self.start(
                "train",
                "--config=configs/tiny.py",
                *(f"--config.{key}={value}" for key, value in {**keys, "process_id": i}.items()),
            )
            for i in range(2)
        ),
    ]
    logs = [process.communicate()[1] for process in started]
    codes = [process.returncode for process in started]
    self.assertEqual(codes, [trainers.RESTART_CODE, 1, 1], "\n".join(logs))
    for log in logs:
      self.assertIn("Gave up after", log)


if __name__ == "__main__":
  absltest.main()
