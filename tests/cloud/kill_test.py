"""Runs over a bucket that are killed, and continue elsewhere: no sample is lost or repeated."""

import os
import random

import jax
from absl.testing import absltest

from tests.cloud import cases
from tests.cloud import child as child_lib
from tests.loader import cases as loader_cases

STARTS_PROCESSES = True

_STEPS = 36


def setUpModule():
  jax.config.update("jax_num_cpu_devices", 1)
  loader_cases.compile_fast()


class KillTest(cases.BucketCase):

  def test_a_killed_run_continues_from_disk_to_bucket_and_back(self):
    expected = [child_lib.hash_of(batch) for batch in self.local_batches(_STEPS)]
    remote = self.remote_index()
    self.proxy.set(latency=0.02, status={503: 0.02}, reset=0.01, cut=0.01)
    output = os.path.join(self.work, "steps")
    places = (self.index_path, remote, self.index_path, remote)
    choose = random.Random(5)
    for number, place in enumerate(places):
      config = {**cases.CONFIG, "olmo_index_path": place}
      job = {"config": config, "steps": _STEPS, "seconds": 0.01, "output": output}
      process = child_lib.start(job)
      self.addCleanup(process.kill)
      if number < len(places) - 1:
        before = len(child_lib.lines_of(output))
        child_lib.kill_after(process, output, before + choose.randrange(2, 8))
      else:
        self.assertEqual(process.wait(), 0)
    lines = child_lib.lines_of(output)
    self.assertEqual([line["step"] for line in lines], list(range(_STEPS)))
    self.assertEqual([line["hash"] for line in lines], expected)


if __name__ == "__main__":
  absltest.main()
