"""Tests of the position and the epoch in MaxText's metrics and log, and of runs whose data ends."""

import json
import pathlib
import re

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.trainers.maxtext import adapter
from tests.trainers.maxtext import runs

STARTS_PROCESSES = True


def setUpModule():
  runs.set_up_module()


@runs.needs_maxtext
class MonitorTest(parameterized.TestCase):

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

  @parameterized.parameters(("train", "base.yml"), ("sft", "post_train/sft.yml"))
  def test_a_run_whose_data_fails_fails_with_the_error_of_the_data(self, entry_point, config):
    directory = pathlib.Path(self.create_tempdir().full_path)
    runs.write_corpus(directory, 40, files=1)
    bad = runs.expected_ids(directory, 12)[-1]  # In the third batch.
    tokens = np.memmap(directory / "data" / "part-0.npy", "<u2", "r+")
    tokens[bad * runs.LENGTH + 5] = runs.VOCABULARY
    tokens.flush()
    run = runs.start(
        directory,
        "steps=20",
        "per_device_batch_size=4",
        entry=adapter.ENTRY_POINTS[entry_point][0],
        config=config,
    )
    self.assertEqual(run.exit_codes(), [1])
    self.assertRegex(run.log(), r"\nmaxtext_olmo\.errors\.CorpusError: .*outside the vocabulary")

  def test_data_that_ends_before_the_run_gives_a_warning_with_the_right_number_of_steps(self):
    directory = pathlib.Path(self.create_tempdir().full_path)
    runs.write_corpus(directory, 18)
    arguments = ("per_device_batch_size=4", "olmo_num_epochs=1", "checkpoint_period=3")
    run = runs.start(directory, *arguments, "steps=20").wait()
    self.assertLen(run.steps(), 5)
    self.assertIn("the data ends after step 4, before steps=20", run.log())
    self.assertEqual(run.labels(), [0, 3])
    run = runs.start(directory, *arguments, "steps=5").wait()
    self.assertNotIn("the data ends", run.log())
    self.assertEqual(run.labels(), [0, 3, 4])


if __name__ == "__main__":
  absltest.main()
