"""Tests of `maxtext-olmo maxtext`."""

import os
import pathlib
import re

import yaml
from absl.testing import absltest

from tests.cli import runner
from tests.trainers.maxtext import runs


class CommandTest(absltest.TestCase):

  def test_help_names_every_command(self):
    code, out, _ = runner.run("maxtext", "--help")
    self.assertEqual(code, 0)
    for name in ("train", "sft", "dataloader", "migrate"):
      self.assertIn(name, out)

  def test_without_maxtext_the_error_says_what_to_install(self):
    if runs.has_maxtext():
      self.skipTest("MaxText is installed here.")
    code, _, err = runner.run("maxtext", "train")
    self.assertEqual(code, 2)
    self.assertIn("MaxText is not installed", err)

  def test_migrate_writes_a_config_and_says_what_was_repeated(self):
    directory = pathlib.Path(self.create_tempdir().full_path)
    runs.write_corpus(directory, 101)
    checkpoint = directory / "checkpoints" / "9"
    checkpoint.mkdir(parents=True)
    (checkpoint / "commit_success.txt").write_text("done")
    config = directory / "run.yml"
    config.write_text(
        yaml.safe_dump(
            {
                "base_config": "base.yml",
                "dataset_type": "olmo_grain",
                "olmo_index_path": str(directory / "index.json"),
                "max_target_length": runs.LENGTH,
            }
        )
    )
    code, out, err = runner.run(
        "maxtext",
        "migrate",
        f"--run-config={config}",
        f"--checkpoint-dir={directory / 'checkpoints'}",
        "--devices=2",
        "--restart=4",
        "per_device_batch_size=2",
        "grain_worker_count=0",
    )
    self.assertEqual(code, 0, err)
    text = re.sub(r" +", " ", out)
    self.assertIn("rows trained on 40", text)
    self.assertIn("rows repeated 4 ", text)
    self.assertIn("left in this epoch 65 ", text)
    self.assertIn("after a restart from checkpoint 4", text)
    self.assertTrue(os.path.exists(directory / "run-migrated.yml"))
    code, out, err = runner.run(
        "maxtext",
        "migrate",
        f"--run-config={config}",
        f"--checkpoint-dir={directory / 'checkpoints'}",
    )
    self.assertEqual(code, 2)
    self.assertIn("set --devices", err)


if __name__ == "__main__":
  absltest.main()
