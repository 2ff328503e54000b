"""Tests of where the data resumes inside MaxText, with and without a data state."""

import asyncio
import pathlib
import shutil
import tempfile

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

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

  def _expected(self, first: int, last: int) -> list[int]:
    return runs.expected_ids(self.begun["ours"][0], last)[first:]

  def test_a_checkpoint_of_maxtexts_own_loader_goes_on_by_its_step(self):
    run = self._go_on("own", "steps=10")
    self.assertEqual(list(run.steps()), [7, 8, 9])
    self.assertEqual(_ids(run), self._expected(28, 40))
    self.assertIn("saved without a data state; the data resumes with step 7", run.log())

  def test_without_a_state_the_step_decides_and_no_row_is_left_out_or_repeated(self):
    self._copy("ours", "run")
    runs.remove_states(self.directory, "run")
    run = self._start("steps=10").wait()
    self.assertEqual(_ids(self.begun["ours"][1]) + _ids(run), self._expected(0, 40))

  def test_without_a_state_the_history_decides_where_the_batch_size_has_changed(self):
    self._copy("ours", "run")
    runs.remove_states(self.directory, "run")
    second = self._start("steps=10", "per_device_batch_size=6").wait()
    self.assertEqual(_ids(second), self._expected(28, 46))
    self.assertIn("but the run has its history, step 7, position 28", second.log())
    runs.remove_states(self.directory, "run")
    third = self._start("steps=12").wait()
    self.assertEqual(_ids(third), self._expected(46, 54))

  def test_a_lost_data_state_stops_the_run(self):
    for path in self._copy("ours", "run").glob("checkpoints/6/iter/*.json"):
      path.unlink()
    run = self._start("steps=9")
    self.assertEqual(run.exit_codes(), [1])
    self.assertEmpty(run.steps())
    self.assertIn("6/iter holds no data state of this library", run.log())

  def test_the_state_decides_where_the_batch_size_has_changed(self):
    second = self._go_on("ours", "steps=10", "per_device_batch_size=6")
    self.assertEqual(list(second.steps()), [7, 8, 9])
    self.assertEqual(_ids(second), self._expected(28, 46))
    # It is read once, when MaxText has restored the model.
    self.assertEqual(second.log().count("olmo_grain: data state restored, step 7, position 28"), 1)
    self.assertEqual(second.log().count("olmo_grain: step 7 at position 28"), 1)
    self.assertNotIn("olmo_grain: step 0 at position 0", second.log())
    third = self._go_on("ours", "steps=12")
    self.assertEqual(_ids(third), self._expected(46, 54))

  @parameterized.parameters(True, False)
  def test_load_full_state_path_goes_on_where_that_model_stopped(self, with_state):
    first = self._copy("ours", "first")
    if not with_state:
      runs.remove_states(self.directory, "first")
    path = first / "checkpoints" / "6" / "items"
    run = self._start("steps=10", "run_name=second", f"load_full_state_path={path}").wait()
    self.assertEqual(list(run.steps()), [7, 8, 9])
    self.assertEqual(_ids(run), self._expected(28, 40))

  def test_initial_step_and_position_are_an_anchor_that_later_restarts_count_from(self):
    anchor = ("initial_step=7", "olmo_initial_position=0")
    first = self._go_on("own", "steps=10", *anchor)
    self.assertEqual(_ids(first), self._expected(0, 12))
    runs.remove_states(self.directory, "run")
    second = self._go_on("own", "steps=12", *anchor)
    self.assertEqual(list(second.steps()), [10, 11])
    self.assertEqual(_ids(second), self._expected(12, 20))

  def test_a_restored_model_begins_a_new_corpus_in_the_same_directory(self):
    other = self.create_tempdir().full_path
    runs.write_corpus(other, 60)
    new = ("initial_step=7", "olmo_initial_position=0", f"olmo_index_path={other}/index.json")
    first = self._go_on("ours", "steps=10", *new)
    self.assertEqual(list(first.steps()), [7, 8, 9])
    self.assertEqual(_ids(first), runs.expected_ids(other, 12))
    self.assertIn("initial_step=7 and olmo_initial_position=0, not a data state", first.log())
    self.assertNotIn("without a data state", first.log())
    # The same command again continues after the state that it has saved by then.
    second = self._go_on("ours", "steps=12", *new)
    self.assertEqual(list(second.steps()), [10, 11])
    self.assertEqual(_ids(second), runs.expected_ids(other, 20)[12:])
    self.assertIn("data state restored, step 10, position 12", second.log())

  def test_initial_step_alone_is_taken_at_its_word(self):
    run = self._go_on("own", "steps=9", "initial_step=0")
    self.assertEqual(_ids(run), self._expected(0, 8))
    self.assertIn("the data resumes at initial_step=0", run.log())

  def test_the_position_alone_says_where_the_restored_step_is(self):
    run = self._go_on("own", "steps=9", "olmo_initial_position=50")
    self.assertEqual(list(run.steps()), [7, 8])
    self.assertEqual(_ids(run), self._expected(50, 58))

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

    self.assertEqual(checkpoints_lib.model_step({"items": {"optimizer": {"step": 7}}}), 7)
    self.assertEqual(checkpoints_lib.model_step({"optimizer": {"step": Variable()}}), 7)
    self.assertEqual(checkpoints_lib.model_step({"items": {"step": np.int32(3)}}), 3)
    self.assertIsNone(checkpoints_lib.model_step({"items": {"params": {}}}))


class DataStateTest(absltest.TestCase):

  def test_what_was_saved_is_loaded(self):
    self.assertEqual(runs.in_child(_save_and_load, self.create_tempdir().full_path), {"step": 3})


def _save_and_load(path: str) -> dict:
  class Iterator:

    def __init__(self):
      self.state = {"step": 3}

    def get_state(self):
      return self.state

    def set_state(self, state):
      self.state = state

  class Directory(type(pathlib.Path())):

    async def await_creation(self):
      return self

  directory = Directory(path)
  iterator = Iterator()
  state = checkpoints_lib.DataState(iterator)

  async def save_and_load():
    write = await state.save(directory)
    iterator.state = {"step": 9}
    await write
    await (await state.load(directory))

  asyncio.run(save_and_load())
  return iterator.state


if __name__ == "__main__":
  absltest.main()
