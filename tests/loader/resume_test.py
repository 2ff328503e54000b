"""Tests of where a run resumes: at a step, at a position, or from the latest checkpoint."""

import json
import os
import pathlib
import shutil
from typing import Any, ClassVar

import grain
import numpy as np
import orbax.checkpoint as ocp
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.loader import resume
from tests.loader import cases


def setUpModule():
  cases.compile_fast()


class ResumeTest(cases.LoaderCase):

  defaults: ClassVar[dict[str, Any]] = {
      **cases.WINDOWS,
      "global_batch_size_to_load": 8,
      "data_shuffle_seed": 0,
  }

  def setUp(self):
    super().setUp()
    self.checkpoints = pathlib.Path(self.create_tempdir().full_path)

  def start(self, **values):
    """Returns the step and the position where a run begins."""
    iterator = self.train(**{"checkpoint_dir": str(self.checkpoints), **values})
    return iterator.step, iterator.position

  def state(self, step, size=8):
    values = {"initial_step": step, "global_batch_size_to_load": size, "checkpoint_dir": ""}
    return self.train(**values).get_state()

  def save(self, label, **items):
    with ocp.CheckpointManager(self.checkpoints) as manager:
      manager.save(label, args=ocp.args.Composite(**items))

  def model(self):
    return ocp.args.StandardSave({"w": np.zeros(3)})

  def test_without_a_checkpoint_a_run_begins_at_the_beginning(self):
    self.assertEqual(self.start(), (0, 0))
    self.assertEqual(self.start(checkpoint_dir=""), (0, 0))
    self.assertEqual(self.start(checkpoint_dir=str(self.checkpoints / "none")), (0, 0))

  def test_an_explicit_step_counts_steps_done(self):
    self.assertEqual(self.start(initial_step=12), (12, 96))

  def test_an_explicit_step_beats_the_checkpoint(self):
    self.save(6, data=ocp.args.JsonSave(self.state(7)))
    self.assertEqual(self.start(initial_step=0), (0, 0))

  def test_a_checkpoint_without_data_state_means_one_step_more_than_its_label(self):
    self.save(6, items=self.model())
    self.assertEqual(self.start(), (7, 56))

  def test_the_past_batch_sizes_turn_steps_into_positions(self):
    self.save(6, items=self.model())
    self.assertEqual(
        self.start(olmo_batch_schedule=((0, 2), (5, 16)), global_batch_size_to_load=16), (7, 42)
    )

  def test_a_position_can_be_set_explicitly(self):
    self.assertEqual(self.start(olmo_initial_position=56), (7, 56))
    self.assertEqual(self.start(olmo_initial_position=57, initial_step=100), (100, 57))
    self.save(6, items=self.model())
    self.assertEqual(self.start(olmo_initial_position=1000), (7, 1000))

  def test_the_state_in_a_checkpoint_wins(self):
    self.save(6, items=self.model(), data=ocp.args.JsonSave(self.state(7, size=4)))
    self.assertEqual(self.start(olmo_initial_position=5), (7, 28))

  def test_the_state_that_grain_saves_for_maxtext_is_found(self):
    train = self.train()
    cases.take(train, 3)
    self.save(2, items=self.model(), iter=grain.checkpoint.CheckpointSave(train))
    self.assertEqual(self.start(), (3, 24))

  def test_the_latest_committed_checkpoint_counts_and_no_other(self):
    self.save(3, data=ocp.args.JsonSave(self.state(4)))
    (self.checkpoints / "9").mkdir()
    (self.checkpoints / "11" / "items").mkdir(parents=True)
    (self.checkpoints / "12.orbax-checkpoint-tmp-1" / "items").mkdir(parents=True)
    (self.checkpoints / "notes").mkdir()
    # A killed save that writes in place leaves its metadata, without the time of its end.
    (self.checkpoints / "13").mkdir()
    (self.checkpoints / "13" / "_CHECKPOINT_METADATA").write_text(
        json.dumps({"init_timestamp_nsecs": 5, "commit_timestamp_nsecs": None})
    )
    self.assertEqual(resume.latest_committed_step(str(self.checkpoints)), 3)
    self.assertEqual(self.start(), (4, 32))

  def test_a_checkpoint_that_cannot_be_read_is_an_error_and_not_a_resume_from_an_older_one(self):
    self.save(3, data=ocp.args.JsonSave(self.state(4)))
    self.save(5, data=ocp.args.JsonSave(self.state(6)))
    metadata = self.checkpoints / "5" / "_CHECKPOINT_METADATA"
    metadata.unlink()
    os.symlink(metadata, metadata)  # Opening it fails, even for root.
    # Without this file, which not every version of Orbax writes, only the metadata says it.
    (self.checkpoints / "5" / "commit_success.txt").unlink(missing_ok=True)
    with self.assertRaisesRegex(
        errors.ResumeError, "5/_CHECKPOINT_METADATA cannot be read(.|\n)*move this checkpoint away"
    ):
      self.start()
    self.assertEqual(self.start(initial_step=6), (6, 48))

  def test_an_older_checkpoint_that_cannot_be_read_does_not_matter(self):
    self.save(3, data=ocp.args.JsonSave(self.state(4)))
    self.save(5, data=ocp.args.JsonSave(self.state(6)))
    metadata = self.checkpoints / "3" / "_CHECKPOINT_METADATA"
    metadata.unlink()
    os.symlink(metadata, metadata)
    (self.checkpoints / "3" / "commit_success.txt").unlink(missing_ok=True)
    self.assertEqual(self.start(), (6, 48))
    self.assertEqual(resume.committed_steps(str(self.checkpoints)), [5])

  def test_names_may_be_padded_with_zeros(self):
    self.save(3, data=ocp.args.JsonSave(self.state(4, size=2)))
    (self.checkpoints / "3").rename(self.checkpoints / "000003")
    (self.checkpoints / "²").mkdir()
    self.assertEqual(self.start(), (4, 8))

  @parameterized.parameters(
      ("a_file", errors.ConfigError, "checkpoint_dir='.*' is not a directory"),
      ("/proc/version", errors.ConfigError, "checkpoint_dir='.*' is not a directory"),
      ("a_file/below", errors.WriteError, "Cannot write .*a_file/below.*Not a directory"),
      ("/proc/checkpoints", errors.WriteError, "Cannot write /proc/checkpoints"),
  )
  def test_a_directory_that_cannot_be_used_is_a_typed_error(self, name, error, message):
    (self.checkpoints / "a_file").write_text("")
    with self.assertRaisesRegex(error, message):
      self.start(checkpoint_dir=str(self.checkpoints / name))

  def test_a_disabled_checkpoint_directory_is_not_looked_into(self):
    self.save(3, data=ocp.args.JsonSave(self.state(4)))
    self.assertEqual(self.start(enable_checkpointing=False), (0, 0))

  def test_a_state_of_another_stream_is_refused(self):
    state = self.state(4)
    state["history"][-1]["identity"]["seed"] = 5
    self.save(3, data=ocp.args.JsonSave(state))
    with self.assertRaisesRegex(
        errors.ResumeError, "^Checkpoint 3 in (.|\n)*seed: the checkpoint has 5, this run has 0"
    ):
      self.start()

  @parameterized.parameters("[1]", '{"step": 4}', "{}", "null", "", "\\xff", "[" * 100_000, None)
  def test_a_lost_data_state_is_an_error_and_not_a_resume_by_step(self, text):
    self.save(6, items=self.model(), data=ocp.args.JsonSave(self.state(7, size=4)))
    path = self.checkpoints / "6" / "data" / "metadata"
    path.unlink()
    if text is not None:
      path.write_text(text)
    with self.assertRaisesRegex(
        errors.ResumeError, "6/data.*(expected|is not JSON)(.|\\n)*set initial_step"
    ):
      self.start()
    self.assertEqual(self.start(initial_step=7, olmo_initial_position=28), (7, 28))

  def test_a_data_item_that_was_deleted_is_an_error(self):
    self.save(6, items=self.model(), data=ocp.args.JsonSave(self.state(7)))
    shutil.rmtree(self.checkpoints / "6" / "data")
    with self.assertRaisesRegex(errors.ResumeError, "6/data cannot be read"):
      self.start()
    (self.checkpoints / "6" / "data").write_text("a file")
    with self.assertRaisesRegex(errors.ResumeError, "6/data cannot be read"):
      self.start()

  def test_a_checkpoint_that_never_had_a_data_item_says_so(self):
    self.save(6, items=self.model())
    with self.assertLogs(level="INFO") as logs:
      self.start()
    self.assertLen([line for line in logs.output if "without a data state" in line], 1)

  def test_a_damaged_state_is_named(self):
    self.save(3, data=ocp.args.JsonSave(self.state(4)))
    (self.checkpoints / "3" / "data" / "metadata").write_text(json.dumps(self.state(4))[:40])
    with self.assertRaisesRegex(errors.ResumeError, "data/metadata is not JSON"):
      self.start()


if __name__ == "__main__":
  absltest.main()
