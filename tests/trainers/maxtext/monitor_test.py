"""Tests of the position and the epoch in MaxText's metrics and log."""

import json
import pathlib
import re

from absl.testing import absltest

from tests.trainers.maxtext import runs

STARTS_PROCESSES = True


def setUpModule():
  runs.set_up_module()


@runs.needs_maxtext
class MonitorTest(absltest.TestCase):

  def test_metrics_and_log_have_the_position_and_the_epoch_of_each_step(self):
    directory = pathlib.Path(self.create_tempdir().full_path)
    runs.write_corpus(directory, 30)
    found = {}
    logged = {}
    # The metrics file of a second start has its own steps alone, at another batch size.
    for number, (steps, rows) in enumerate(((5, 4), (9, 6))):
      path = directory / f"metrics-{number}.jsonl"
      run = runs.start(
          directory,
          f"steps={steps}",
          f"per_device_batch_size={rows}",
          f"metrics_file={path}",
      ).wait()
      for line in map(json.loads, path.read_text().splitlines()):
        if "learning/loss" in line:
          found[int(line["step"])] = line["data/position"], line["data/epoch"]
      pattern = r"olmo_grain: step (\d+) began at position (\d+), epoch (\d+)\."
      for step, position, epoch in re.findall(pattern, run.log()):
        logged[int(step)] = int(position), int(epoch)
    positions = [0, 4, 8, 12, 16, 20, 26, 32, 38]
    self.assertEqual(found, {k: (p, p // 30) for k, p in enumerate(positions)})
    self.assertEqual(logged, found)


if __name__ == "__main__":
  absltest.main()
