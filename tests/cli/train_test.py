"""Tests of `maxtext-olmo train`."""

import json
import pathlib
import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized

from tests.cli import runner

STARTS_PROCESSES = True


class TrainTest(parameterized.TestCase):

  @parameterized.parameters("-h", "--help")
  def test_help_says_how_to_continue(self, flag):
    code, out, _ = runner.run("train", flag)
    self.assertEqual(code, 0)
    self.assertIn("--config=configs/tiny.py", out)

  def test_it_trains_with_the_keys_of_its_arguments(self):
    metrics = pathlib.Path(self.create_tempdir().full_path, "metrics.jsonl")
    keys = {"dataset_type": "synthetic", "steps": 2, "max_target_length": 8, "vocab_size": 32}
    keys |= {"emb_dim": 8, "num_layers": 1, "metrics_file": metrics}
    code, _, err = runner.run("train", *(f"--config.{key}={keys[key]}" for key in keys))
    self.assertEqual(code, 0, err)
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    self.assertEqual(steps, [0, 1])

  def test_an_invalid_key_is_a_usage_error(self):
    code, _, err = runner.run("train", "--config.steps=many")
    self.assertEqual(code, 2)
    self.assertIn("steps", err)

  def test_the_trainer_is_reached(self):
    done = subprocess.run(
        [sys.executable, "-m", "maxtext_olmo", "train", "--config=/no/such/config.py"],
        capture_output=True,
        text=True,
        check=False,
    )
    self.assertNotEqual(done.returncode, 0)
    self.assertIn("/no/such/config.py", done.stderr)


if __name__ == "__main__":
  absltest.main()
