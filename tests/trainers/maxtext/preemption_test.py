"""Tests of maxtext_olmo.trainers.maxtext.preemption with JAX's own preemption service."""

from __future__ import annotations

import os
import signal
import time

from absl.testing import absltest
from jax.experimental import multihost_utils

from maxtext_olmo.trainers.maxtext import preemption
from tests import distributed

STARTS_PROCESSES = True


def steps_until_preemption() -> tuple[bool, bool]:
  """Takes steps as MaxText does, gets SIGTERM, and returns what was noted before and after it."""
  preemption.watch()
  preemption.watch()
  before = preemption.is_preempted()
  if multihost_utils.jax.process_index() == 0:
    os.kill(os.getpid(), signal.SIGTERM)
  step = 0
  while not multihost_utils.reached_preemption_sync_point(step):
    multihost_utils.sync_global_devices(f"step {step}")
    time.sleep(0.01)
    step += 1
  return before, preemption.is_preempted()


class PreemptionTest(absltest.TestCase):

  def test_a_preemption_is_noted_on_all_processes(self):
    found = distributed.run("tests.trainers.maxtext.preemption_test:steps_until_preemption")
    self.assertEqual(found, [(False, True)] * 2)


if __name__ == "__main__":
  absltest.main()
