"""Tests of the config kept next to checkpoints."""

import os
import pathlib

from absl.testing import absltest

from maxtext_olmo import config as config_lib
from maxtext_olmo import errors
from maxtext_olmo.loader import run_config
from tests.loader import cases


class RunConfigTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = self.create_tempdir().full_path

  def options(self, **values):
    values = {"dataset_type": "synthetic", "checkpoint_dir": self.directory, **values}
    return config_lib.Options.read(cases.data_config(**values))

  def test_a_kept_config_reads_back_as_the_same_options(self):
    options = self.options(
        olmo_batch_schedule=((0, 4), (10, 8)), global_batch_size_to_load=8, max_target_length=64
    )
    run_config.keep(options)
    values = run_config.load(self.directory)
    self.assertEqual(vars(config_lib.Options.read(cases.data_config(**values))), vars(options))

  def test_paths_are_kept_as_absolute_paths(self):
    os.chdir(self.directory)
    run_config.keep(self.options(checkpoint_dir="checkpoints"))
    values = run_config.load(os.path.join(self.directory, "checkpoints"))
    self.assertEqual(values["checkpoint_dir"], os.path.join(self.directory, "checkpoints"))

  def test_the_last_start_counts(self):
    for seed in (1, 2):
      run_config.keep(self.options(data_shuffle_seed=seed))
    self.assertEqual(run_config.load(self.directory)["data_shuffle_seed"], 2)
    (file,) = pathlib.Path(self.directory, "olmo_run").iterdir()
    self.assertEqual(file.name, "config.json")

  def test_a_run_without_checkpoints_keeps_none(self):
    run_config.keep(self.options(enable_checkpointing=False))
    self.assertIsNone(run_config.load(self.directory))

  def test_a_damaged_file_is_an_error_and_unknown_keys_are_left_out(self):
    path = pathlib.Path(self.directory, "olmo_run", "config.json")
    path.parent.mkdir()
    path.write_text('{"data_shuffle_seed": 3, "key_of_a_later_release": 1}')
    self.assertEqual(run_config.load(self.directory), {"data_shuffle_seed": 3})
    for text in ("[1]", "{"):
      path.write_text(text)
      with self.assertRaisesRegex(errors.ConfigError, "cannot be read"):
        run_config.load(self.directory)


if __name__ == "__main__":
  absltest.main()
