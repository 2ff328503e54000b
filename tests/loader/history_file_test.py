"""Tests of the history in a run's directory, by which checkpoints that hold only a step resume."""

import json
import pathlib
import resource

import numpy as np
import orbax.checkpoint as ocp
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.loader import history_file
from tests.loader import cases


def setUpModule():
  cases.compile_fast()


class HistoryFileTest(cases.LoaderCase):

  def setUp(self):
    super().setUp()
    self.checkpoints = pathlib.Path(self.create_tempdir().full_path)
    self.path = self.checkpoints / history_file.NAME

  def run_to(self, step, **values):
    """Continues a run up to a step, saves only the model; returns the steps' rows and the state."""
    iterator = self.train(checkpoint_dir=str(self.checkpoints), **values)
    rows = []
    while iterator.step < step:
      rows.append(iterator.row_numbers(iterator.step).tolist())
      next(iterator)
    state = iterator.get_state()
    iterator.close()
    with ocp.CheckpointManager(self.checkpoints) as manager:
      model = ocp.args.StandardSave({"w": np.ones(2)})
      manager.save(step - 1, args=ocp.args.Composite(model=model))
    return rows, state

  def start(self, **values):
    iterator = self.train(checkpoint_dir=str(self.checkpoints), **values)
    return iterator.step, iterator.position

  def lines(self):
    return [json.loads(line)["step"] for line in self.path.read_text().splitlines()]

  def go_back_to(self, step):
    """Removes the checkpoints after the one that has `step` steps done."""
    with ocp.CheckpointManager(self.checkpoints) as manager:
      for label in manager.all_steps():
        if label >= step:
          manager.delete(label)

  def test_steps_resume_exactly_after_changes_of_the_batch_size(self):
    rows, _ = self.run_to(3)  # 12 samples
    more, _ = self.run_to(5, global_batch_size_to_load=7)  # 14
    rows += more
    more, state = self.run_to(7, global_batch_size_to_load=2)  # 4
    rows += more
    self.assertEqual(self.start(), (7, 30))
    taken = [row for batch in rows for row in batch]
    stream = self.train().stream
    self.assertEqual(taken, stream.instance_ids(np.arange(30)).tolist())
    self.assertEqual(self.lines(), [0, 3, 5])
    self.assertEqual(history_file.state_at(self.checkpoints, 7), state)

  def test_restarts_that_change_nothing_add_nothing(self):
    for step in (2, 4, 6):
      self.run_to(step)
    self.assertEqual(self.lines(), [0])

  def test_going_back_drops_what_came_after_the_step(self):
    self.run_to(2)
    self.run_to(4)
    self.run_to(6, global_batch_size_to_load=8)
    self.assertEqual(self.start(), (6, 32))
    self.go_back_to(2)
    self.run_to(7)  # As if there had been no other size.
    self.assertEqual(self.start(global_batch_size_to_load=8), (7, 28))
    self.assertEqual(self.lines(), [0, 4, 2])

  def test_a_new_run_discards_the_history_of_the_previous_run(self):
    self.run_to(3)
    self.run_to(5, global_batch_size_to_load=8)
    self.go_back_to(0)
    self.run_to(2, global_batch_size_to_load=2)
    self.assertEqual(self.start(), (2, 4))

  def test_nothing_is_written_before_batches_are_read_or_without_checkpoints(self):
    self.start()
    self.assertFalse(self.path.exists())
    next(self.train(checkpoint_dir=str(self.checkpoints), enable_checkpointing=False))
    self.assertFalse(self.path.exists())

  def test_explicit_keys_override_the_history(self):
    self.run_to(3)
    self.run_to(5, global_batch_size_to_load=8)
    self.assertEqual(self.start(initial_step=1), (1, 4))
    self.assertEqual(self.start(olmo_initial_position=2), (5, 2))

  def test_a_step_of_another_stream_is_refused(self):
    self.run_to(3)
    with self.assertRaisesRegex(errors.ResumeError, "olmo_history.jsonl: .*another stream"):
      self.start(data_shuffle_seed=3)

  def test_an_incomplete_last_line_is_ignored_and_overwritten(self):
    self.run_to(3)
    whole = self.path.read_bytes()
    for tail in (whole[:-1], b"{", b"\xff"):
      self.path.write_bytes(whole + tail)
      self.assertEqual(self.start(global_batch_size_to_load=8), (3, 12))
    self.run_to(5, global_batch_size_to_load=8)
    self.assertEqual(self.lines(), [0, 3])

  @parameterized.parameters(b"{\n", b"[1]\n", b'{"step": 4}\n', b"[" * 100_000 + b"\n", b"\xff\n")
  def test_other_damage_is_an_error_where_the_history_is_needed(self, line):
    self.run_to(3)
    self.path.write_bytes(line + self.path.read_bytes())
    with self.assertRaisesRegex(errors.ResumeError, "olmo_history.jsonl is damaged: line 1: "):
      self.start()
    before = self.path.read_bytes()
    with self.assertLogs(level="WARNING") as logs:
      next(self.train(checkpoint_dir=str(self.checkpoints), initial_step=3))
    self.assertIn("history of the run cannot be written", str(logs.output))
    self.assertEqual(self.path.read_bytes(), before)

  def test_a_start_that_was_killed_before_its_first_batch_is_not_part_of_the_state(self):
    _, state = self.run_to(3)
    other = self.train(global_batch_size_to_load=8)
    other.set_state(state)
    history_file.write(self.checkpoints, other.history, 3)
    self.assertEqual(self.lines(), [0, 3])
    self.assertEqual(history_file.state_at(self.checkpoints, 3), state)
    self.assertLen(history_file.state_at(self.checkpoints, 4)["history"], 2)

  def test_a_history_that_begins_at_the_step_is_all_that_is_known(self):
    iterator = self.train()
    iterator.go_to(5, 7, keep_history=False)
    history_file.write(self.checkpoints, iterator.history, 5)
    self.assertIsNone(history_file.state_at(self.checkpoints, 4))
    self.assertEqual(history_file.state_at(self.checkpoints, 5)["position"], 7)

  def test_a_file_that_cannot_be_written_is_an_error_for_write(self):
    history = self.train().history
    self.path.mkdir()
    with self.assertRaisesRegex(errors.ResumeError, "not a regular file"):
      history_file.write(self.checkpoints, history, 0)
    with self.assertRaisesRegex(errors.WriteError, "Cannot write /proc/none"):
      history_file.write("/proc/none", history, 0)

  def test_a_file_that_cannot_be_written_is_a_warning(self):
    self.path.mkdir()
    with self.assertLogs(level="WARNING") as logs:
      next(self.train(checkpoint_dir=str(self.checkpoints)))
    self.assertIn("history of the run cannot be written", str(logs.output))

  def test_a_full_disk_is_a_warning(self):
    history = self.train().history
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # Python ignores the signal.
    try:
      with self.assertLogs(level="WARNING") as logs:
        history_file.record(self.checkpoints, history, 0)
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    self.assertIn("history of the run cannot be written", str(logs.output))
    history_file.record(self.checkpoints, history, 0)
    self.assertEqual(self.lines(), [0])


if __name__ == "__main__":
  absltest.main()
