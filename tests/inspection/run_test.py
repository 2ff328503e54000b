"""Tests of finding a run and opening it."""

import json
import os
import pathlib
import shutil
import tempfile
import unittest

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.inspection import run as run_lib
from maxtext_olmo.loader import history_file
from tests.inspection import small_run
from tests.loader import cases

_run: small_run.SmallRun


def setUpModule():
  global _run
  cases.compile_fast()
  directory = tempfile.TemporaryDirectory(prefix="inspection_run_test_")
  unittest.addModuleCleanup(directory.cleanup)
  _run = small_run.write(directory.name)


def _files(directory: str) -> list[str]:
  return sorted(str(path) for path in pathlib.Path(directory).rglob("*"))


class FindRunTest(parameterized.TestCase):

  def test_a_checkpoint_its_directory_and_the_one_above_name_the_run(self):
    for path in (f"{_run.checkpoints}/14", _run.checkpoints, os.path.dirname(_run.checkpoints)):
      found = run_lib.find_run(path)
      self.assertEqual((found.label, found.checkpoint_dir), (14, _run.checkpoints))
      self.assertEqual(found.parsed()[0], 15)
      self.assertEqual(found.config["olmo_index_path"], _run.index_path)
    self.assertEqual(run_lib.find_run(f"{_run.checkpoints}/4").label, 4)
    self.assertEqual(run_lib.find_run(_run.checkpoints, label=9).parsed()[0], 10)

  def test_a_checkpoint_can_be_named_although_a_later_one_cannot_be_read(self):
    checkpoints = pathlib.Path(self.create_tempdir().full_path) / "checkpoints"
    shutil.copytree(_run.checkpoints, checkpoints)
    (checkpoints / "14" / "commit_success.txt").unlink(missing_ok=True)
    metadata = checkpoints / "14" / "_CHECKPOINT_METADATA"
    metadata.unlink()
    metadata.symlink_to(metadata)  # Opening it fails, even for root.
    self.assertEqual(run_lib.find_run(f"{checkpoints}/4").label, 4)
    self.assertEqual(run_lib.find_run(str(checkpoints), label=9).parsed()[0], 10)
    with self.assertRaisesRegex(errors.ResumeError, "14/_CHECKPOINT_METADATA cannot be read"):
      run_lib.find_run(str(checkpoints))

  def test_a_config_names_the_run_in_its_checkpoint_dir_or_one_to_come(self):
    found = run_lib.run_of_config("config.py", _run.config)
    self.assertEqual((found.path, found.label), ("config.py", 14))
    new = run_lib.run_of_config("config.py", {**_run.config, "checkpoint_dir": ""})
    self.assertIsNone(new.label)
    with run_lib.open_iterator(new) as iterator:
      self.assertEqual(iterator.step, 0)

  def test_what_is_not_a_run_is_an_error(self):
    with self.assertRaisesRegex(errors.ConfigError, "does not exist"):
      run_lib.find_run("/nowhere/at/all")
    with self.assertRaisesRegex(errors.ConfigError, "has no committed checkpoint and no olmo_run"):
      run_lib.find_run(self.create_tempdir().full_path)
    with self.assertRaisesRegex(errors.ConfigError, "no committed checkpoint 7"):
      run_lib.find_run(_run.checkpoints, label=7)

  def test_a_run_whose_config_was_not_kept_asks_for_one(self):
    found = run_lib.Run(_run.checkpoints, None)
    with self.assertRaisesRegex(errors.ConfigError, "--config"), run_lib.open_iterator(found):
      pass

  def test_rows_that_stream_cannot_be_inspected(self):
    config = {**_run.config, "dataset_type": "olmo_documents", "olmo_packing": "first_fit"}
    found = run_lib.Run("x", {**config, "checkpoint_dir": "", "olmo_eos_id": 256})
    with self.assertRaisesRegex(errors.ConfigError, "streams"), run_lib.open_iterator(found):
      pass


class OpenIteratorTest(absltest.TestCase):

  def steps_without_states(self, config, *, history=True, item=None):
    """Returns the steps done by a copy of the run whose checkpoints have no data state."""
    copy = pathlib.Path(self.create_tempdir().full_path) / "checkpoints"
    shutil.copytree(_run.checkpoints, copy)
    for path in copy.glob("*/data"):
      shutil.rmtree(path)
      metadata = path.parent / "_CHECKPOINT_METADATA"
      values = json.loads(metadata.read_text())
      metadata.write_text(json.dumps({**values, "item_handlers": {}}))
      if item:
        (path.parent / item).mkdir()
    if not history:
      (copy / history_file.NAME).unlink()
    with run_lib.open_iterator(run_lib.find_run(str(copy), config=config)) as iterator:
      return iterator.step, iterator.position

  def test_without_a_data_state_the_label_says_how_many_steps_are_done(self):
    self.assertEqual(self.steps_without_states(_run.config), (15, 60))
    # Tunix labels a checkpoint with the number of steps.
    self.assertEqual(self.steps_without_states(_run.config, item="model_params"), (14, 58))

  def test_without_history_too_wherever_the_config_begins_the_data(self):
    for config in (_run.config, {**_run.config, "initial_step": 0}):
      self.assertEqual(self.steps_without_states(config, history=False), (15, 30))
    anchor = {"initial_step": 10, "olmo_initial_position": 0}
    found = self.steps_without_states({**_run.config, **anchor}, history=False)
    self.assertEqual(found, (15, 10))

  def test_every_step_is_what_the_run_was_fed_and_nothing_is_written(self):
    before = _files(str(_run.directory))
    with run_lib.open_iterator(run_lib.find_run(_run.checkpoints)) as iterator:
      self.assertEqual(iterator.step, 15)
      for step, batch in enumerate(_run.batches):
        for name, values in iterator.explain(step).arrays.items():
          np.testing.assert_array_equal(values, batch[name])
    self.assertEqual(_files(str(_run.directory)), before)

  def test_a_state_of_another_stream_is_refused(self):
    config = {**_run.config, "data_shuffle_seed": 5}
    found = run_lib.find_run(_run.checkpoints, config=config)
    with self.assertRaisesRegex(errors.ResumeError, "seed"), run_lib.open_iterator(found):
      pass


if __name__ == "__main__":
  absltest.main()
