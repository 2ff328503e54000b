"""Kills processes of a run at random points, restarts it differently, and counts its rows.

`KILLS` and `KILL_SEED` in the environment set the number and the seed of the kills, as `make
test-kill` does.
"""

from __future__ import annotations

import os
import random
import signal
import time

from absl import logging
from absl.testing import absltest

from tests.trainers.tiny import ledger

STARTS_PROCESSES = True

_KILLS = int(os.environ.get("KILLS", "8"))
_SEED = int(os.environ.get("KILL_SEED", "1"))


class KillTest(ledger.LedgerTestCase):

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
      self.assertFalse(any(ledger.is_alive(pid) for pid in run.pids))
      logging.info("killed while at %s; %d steps are saved", kind, self.steps_done())
    run, output = self.start(rng, steps=self.steps_done() + 60)
    self.assertEqual(run.wait().code, 0, output.getvalue())
    self.check_ledger()
    logging.info("%d kills", _KILLS)


if __name__ == "__main__":
  absltest.main()
