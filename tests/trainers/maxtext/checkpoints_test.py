"""Tests of where the data resumes inside MaxText."""

import pathlib
import shutil
import tempfile

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.trainers.maxtext import checkpoints as checkpoints_lib
from tests.trainers.maxtext import runs

STARTS_PROCESSES = True

_BATCH = ("per_device_batch_size=4", "checkpoint_period=3")


def setUpModule():
  runs.set_up_module()


def _ids(run: runs.Run) -> list[int]:
  return [i for step in run.steps().values() for i in step.ids]


@runs.needs_maxtext
class ResumeTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    # Two runs of seven steps that most tests continue: on our batches, and on those of MaxText's
    # own loader.
    cls.begun = {}
    for name, install in (("ours", True), ("own", False)):
      directory = tempfile.mkdtemp(prefix="maxtext_resume_")
      cls.addClassCleanup(shutil.rmtree, directory)
      runs.write_corpus(directory, 100)
      run = runs.start(directory, *_BATCH, "steps=7", install=install).wait()
      cls.begun[name] = directory, run

  def setUp(self):
    super().setUp()
    self.directory = self.create_tempdir().full_path

  def _go_on(self, begun: str, *args: str) -> runs.Run:
    """Starts again in a copy of a begun run, or in what earlier calls made of it."""
    if not pathlib.Path(self.directory, "run").exists():
      self._copy(begun, "run")
    return self._start(*args).wait()

  def _copy(self, begun: str, name: str) -> pathlib.Path:
    source = pathlib.Path(self.begun[begun][0], "run")
    return pathlib.Path(shutil.copytree(source, pathlib.Path(self.directory, name)))

  def _start(self, *args: str) -> runs.Run:
    index = pathlib.Path(self.begun["ours"][0], "index.json")
    return runs.start(self.directory, *_BATCH, f"olmo_index_path={index}", *args)

  @property
  def _checkpoints(self) -> pathlib.Path:
    return pathlib.Path(self.directory, "run", "checkpoints")

  @property
  def _history(self) -> pathlib.Path:
    return self._checkpoints / "olmo_history.jsonl"

  def _expected(self, first: int, last: int) -> list[int]:
    return runs.expected_ids(self.begun["ours"][0], last)[first:]

  def test_a_checkpoint_of_maxtexts_own_loader_resumes_by_its_step(self):
    run = self._go_on("own", "steps=10")
    self.assertEqual(list(run.steps()), [7, 8, 9])
    self.assertEqual(_ids(run), self._expected(28, 40))
    self.assertIn("no data state and no history; the data resumes with step 7", run.log())

  def test_checkpoints_get_no_data_and_the_history_decides_where_the_batch_size_has_changed(self):
    second = self._go_on("ours", "steps=10", "per_device_batch_size=6")
    self.assertEqual(list(second.steps()), [7, 8, 9])
    self.assertEqual(_ids(second), self._expected(28, 46))
    self.assertIn(
        "comes from olmo_history.jsonl; the data resumes with step 7, position 28", second.log()
    )
    self.assertEqual(second.log().count("olmo_grain: step 7 at position 28"), 1)
    self.assertNotIn("olmo_grain: step 0 at position 0", second.log())
    third = self._go_on("ours", "steps=12")
    self.assertEqual(_ids(third), self._expected(46, 54))
    self.assertEmpty(list(self._checkpoints.glob("*/iter")))
    self.assertLen(self._history.read_text().splitlines(), 3)

  def test_a_kill_between_the_history_and_the_first_batch_changes_nothing(self):
    self._copy("ours", "run")
    run = self._start("steps=12", "per_device_batch_size=6")
    run.kill_when(lambda: len(self._history.read_text().splitlines()) == 2)
    self.assertEmpty(run.steps())
    run = self._start("steps=9").wait()
    self.assertEqual(_ids(run), self._expected(28, 36))

  def test_going_back_drops_what_came_after_the_step(self):
    self._go_on("ours", "steps=10", "per_device_batch_size=6")
    for label in (7, 9):
      shutil.rmtree(self._checkpoints / str(label), ignore_errors=True)
    run = self._go_on("ours", "steps=10", "per_device_batch_size=5")
    self.assertEqual(list(run.steps()), [7, 8, 9])
    self.assertEqual(_ids(run), self._expected(28, 43))
    run = self._go_on("ours", "steps=11")
    self.assertEqual(_ids(run), self._expected(43, 47))

  def test_a_lost_history_stops_the_run(self):
    self._copy("ours", "run")
    self._history.unlink()
    run = self._start("steps=9")
    self.assertEqual(run.exit_codes(), [1])
    self.assertEmpty(run.steps())
    self.assertIn(
        "olmo_history.jsonl, is missing, and without it the position of step 7", run.log()
    )
    run = self._start("steps=9", "initial_step=7", "olmo_initial_position=28").wait()
    self.assertEqual(_ids(run), self._expected(28, 36))

  def test_a_history_that_cannot_be_written_stops_the_run(self):
    self._checkpoints.mkdir(parents=True)
    self._history.mkdir()
    run = self._start("steps=2")
    self.assertEqual(run.exit_codes(), [1])
    self.assertEmpty(run.steps())
    self.assertIn("ResumeError: The history of the run in", run.log())

  @parameterized.parameters(True, False)
  def test_the_data_state_of_an_earlier_release_decides(self, with_history):
    self._copy("ours", "run")
    runs.add_states(self.directory, "run")
    if not with_history:
      self._history.unlink()
      shutil.rmtree(self._checkpoints / "olmo_run")
    second = self._start("steps=10", "per_device_batch_size=6").wait()
    self.assertEqual(_ids(second), self._expected(28, 46))
    self.assertIn("comes from the data state in the checkpoint; the data resumes", second.log())
    third = self._start("steps=12").wait()
    self.assertEqual(_ids(third), self._expected(46, 54))
    self.assertIn("comes from olmo_history.jsonl;", third.log())

  def test_a_lost_data_state_of_an_earlier_release_stops_the_run(self):
    self._copy("ours", "run")
    runs.add_states(self.directory, "run")
    (self._checkpoints / "6" / "iter" / "process_0.json").unlink()
    run = self._start("steps=9")
    self.assertEqual(run.exit_codes(), [1])
    self.assertEmpty(run.steps())
    self.assertIn("6/iter holds no data state of this library", run.log())

  @parameterized.parameters(True, False)
  def test_load_full_state_path_continues_where_that_model_stopped(self, with_state):
    first = self._copy("ours", "first")
    if with_state:
      runs.add_states(self.directory, "first")
    path = first / "checkpoints" / "6" / "items"
    second = ("run_name=second", f"load_full_state_path={path}")
    run = self._start("steps=10", "per_device_batch_size=6", *second).wait()
    self.assertEqual(list(run.steps()), [7, 8, 9])
    self.assertEqual(_ids(run), self._expected(28, 46))
    run = self._start("steps=12", *second).wait()
    self.assertEqual(_ids(run), self._expected(46, 54))

  def test_initial_step_and_position_are_an_anchor_that_later_restarts_count_from(self):
    anchor = ("initial_step=7", "olmo_initial_position=0")
    first = self._go_on("own", "steps=10", *anchor)
    self.assertEqual(_ids(first), self._expected(0, 12))
    second = self._go_on("own", "steps=11", "per_device_batch_size=6", *anchor)
    self.assertEqual(list(second.steps()), [10])
    self.assertEqual(_ids(second), self._expected(12, 18))
    self._history.unlink()  # Without it, steps are counted from the anchor in this run's batches.
    third = self._go_on("own", "steps=12", *anchor)
    self.assertEqual(_ids(third), self._expected(16, 20))

  def test_a_restored_model_begins_a_new_corpus_in_the_same_directory(self):
    other = self.create_tempdir().full_path
    runs.write_corpus(other, 60)
    new = ("initial_step=7", "olmo_initial_position=0", f"olmo_index_path={other}/index.json")
    first = self._go_on("ours", "steps=10", *new)
    self.assertEqual(list(first.steps()), [7, 8, 9])
    self.assertEqual(_ids(first), runs.expected_ids(other, 12))
    self.assertIn("comes from initial_step=7 and olmo_initial_position=0", first.log())
    # The same command again continues after what it has trained by then.
    second = self._go_on("ours", "steps=12", *new)
    self.assertEqual(list(second.steps()), [10, 11])
    self.assertEqual(_ids(second), runs.expected_ids(other, 20)[12:])
    self.assertIn("comes from olmo_history.jsonl; the data resumes with step 10", second.log())
    # Back at the old checkpoint, with the old corpus, it is as if nothing had happened.
    for label in (9, 11):
      shutil.rmtree(self._checkpoints / str(label))
    third = self._go_on("ours", "steps=9")
    self.assertEqual(_ids(third), self._expected(28, 36))

  def test_initial_step_alone_is_used_as_given_once(self):
    run = self._go_on("own", "steps=9", "initial_step=0")
    self.assertEqual(_ids(run), self._expected(0, 8))
    self.assertIn("the data resumes at step 0, because initial_step is set", run.log())
    run = self._go_on("own", "steps=10", "initial_step=0")
    self.assertEqual(_ids(run), self._expected(8, 12))

  def test_the_position_alone_says_where_the_restored_step_is_until_there_is_a_checkpoint(self):
    self._copy("own", "run")
    run = self._start("steps=12")
    run.kill_when(self._history.exists)
    run = self._go_on("own", "steps=9", "olmo_initial_position=50")
    self.assertEqual(list(run.steps()), [7, 8])
    self.assertEqual(_ids(run), self._expected(50, 58))
    run = self._go_on("own", "steps=10", "olmo_initial_position=50")
    self.assertEqual(_ids(run), self._expected(58, 62))

  def test_another_seed_stops_the_run_before_a_step(self):
    self._copy("ours", "run")
    run = self._start("steps=9", "data_shuffle_seed=1")
    self.assertEqual(run.exit_codes(), [1])
    self.assertEmpty(run.steps())
    self.assertIn("set data_shuffle_seed back", run.log())

  def test_load_parameters_path_starts_at_the_beginning(self):
    path = pathlib.Path(self.begun["ours"][0], "run", "checkpoints", "6", "items")
    run = self._start("steps=2", "run_name=second", f"load_parameters_path={path}").wait()
    self.assertEqual(list(run.steps()), [0, 1])
    self.assertEqual(_ids(run), self._expected(0, 8))


class ModelStepTest(absltest.TestCase):

  def test_the_step_is_found_in_what_maxtext_restores(self):
    class Variable:

      def get_value(self):
        return np.int32(7)

    self.assertEqual(checkpoints_lib.model_step({"optimizer": {"step": 7}}), 7)
    self.assertEqual(checkpoints_lib.model_step({"optimizer": {"step": Variable()}}), 7)
    self.assertEqual(checkpoints_lib.model_step({"step": np.int32(3)}), 3)
    self.assertIsNone(checkpoints_lib.model_step({"params": {}}))


class LatestLabelTest(absltest.TestCase):

  def test_both_kinds_of_orbax_managers_say_which_checkpoint_is_the_latest(self):
    found = runs.in_child(_latest_labels, self.create_tempdir().full_path)
    self.assertEqual(found, [None, None, 5, None, 6])

  def test_another_kind_of_manager_is_refused_by_name(self):
    with self.assertRaisesRegex(errors.ConfigError, "MaxText, dict, has neither latest_step"):
      checkpoints_lib.latest_label({})


def _latest_labels(directory: str) -> list[int | None]:
  import orbax.checkpoint as ocp
  from orbax.checkpoint import v1 as ocp_v1

  found = [checkpoints_lib.latest_label(None)]
  with ocp.CheckpointManager(f"{directory}/first") as manager:
    found.append(checkpoints_lib.latest_label(manager))
    manager.save(5, args=ocp.args.StandardSave({"w": np.ones(2)}))
    manager.wait_until_finished()
    found.append(checkpoints_lib.latest_label(manager))
  with ocp_v1.training.Checkpointer(f"{directory}/second") as manager:
    found.append(checkpoints_lib.latest_label(manager))
    manager.save_checkpointables(6, {"items": {"w": np.ones(2)}})
    found.append(checkpoints_lib.latest_label(manager))
  return found


if __name__ == "__main__":
  absltest.main()
