"""Tests of where the data goes on inside MaxText, with and without a data state in the checkpoint."""

import asyncio
import pathlib

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.trainers import maxtext_checkpoints
from tests.trainers import maxtext_runs as runs

_BATCH = ("per_device_batch_size=4", "checkpoint_period=3")


def setUpModule():
  runs.set_up_module()


def _ids(run: runs.Run) -> list[int]:
  return [i for step in run.steps().values() for i in step.ids]


@runs.needs_maxtext
class ResumeTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = self.create_tempdir().full_path
    runs.write_corpus(self.directory, 100)

  def _run(self, *args: str, **kwargs) -> runs.Run:
    return runs.start(self.directory, *_BATCH, *args, **kwargs).wait()

  def test_a_checkpoint_of_maxtexts_own_loader_goes_on_by_its_step(self):
    self._run("steps=7", install=False)
    run = self._run("steps=10")
    self.assertEqual(list(run.steps()), [7, 8, 9])
    self.assertEqual(_ids(run), runs.expected_ids(self.directory, 40)[28:])

  def test_without_a_state_the_step_decides_and_no_row_is_left_out_or_repeated(self):
    first = self._run("steps=7")
    runs.remove_states(self.directory, "run")
    second = self._run("steps=10")
    self.assertEqual(_ids(first) + _ids(second), runs.expected_ids(self.directory, 40))

  def test_the_state_decides_where_the_batch_size_has_changed(self):
    first = self._run("steps=7")
    second = self._run("steps=10", "per_device_batch_size=6")
    self.assertEqual(list(second.steps()), [7, 8, 9])
    self.assertEqual(_ids(first) + _ids(second), runs.expected_ids(self.directory, 46))
    third = self._run("steps=12")
    self.assertEqual(_ids(third), runs.expected_ids(self.directory, 54)[46:])

  @parameterized.parameters(True, False)
  def test_load_full_state_path_goes_on_where_that_model_stopped(self, with_state):
    self._run("steps=7", "run_name=first")
    if not with_state:
      runs.remove_states(self.directory, "first")
    path = pathlib.Path(self.directory, "first", "checkpoints", "6", "items")
    run = self._run("steps=10", "run_name=second", f"load_full_state_path={path}")
    self.assertEqual(list(run.steps()), [7, 8, 9])
    self.assertEqual(_ids(run), runs.expected_ids(self.directory, 40)[28:])

  def test_initial_step_and_position_are_an_anchor_that_later_restarts_count_from(self):
    self._run("steps=7", install=False)
    anchor = ("initial_step=7", "olmo_initial_position=0")
    first = self._run("steps=10", *anchor)
    self.assertEqual(_ids(first), runs.expected_ids(self.directory, 12))
    runs.remove_states(self.directory, "run")
    second = self._run("steps=12", *anchor)
    self.assertEqual(list(second.steps()), [10, 11])
    self.assertEqual(_ids(second), runs.expected_ids(self.directory, 20)[12:])

  def test_initial_step_alone_is_taken_at_its_word(self):
    self._run("steps=4", install=False)
    run = self._run("steps=6", "initial_step=0")
    self.assertEqual(_ids(run), runs.expected_ids(self.directory, 8))
    self.assertIn("initial_step=0 decides", run.log())

  def test_the_position_alone_says_where_the_restored_step_is(self):
    self._run("steps=7", install=False)
    run = self._run("steps=9", "olmo_initial_position=50")
    self.assertEqual(list(run.steps()), [7, 8])
    self.assertEqual(_ids(run), runs.expected_ids(self.directory, 58)[50:])

  def test_another_seed_stops_the_run_before_a_step(self):
    self._run("steps=4")
    run = runs.start(self.directory, *_BATCH, "steps=8", "data_shuffle_seed=1")
    self.assertEqual(run.exit_codes(), [1])
    self.assertEmpty(run.steps())
    self.assertIn("set data_shuffle_seed back", run.log())

  def test_load_parameters_path_starts_at_the_beginning(self):
    self._run("steps=4", "run_name=first")
    path = pathlib.Path(self.directory, "first", "checkpoints", "3", "items")
    run = self._run("steps=2", "run_name=second", f"load_parameters_path={path}")
    self.assertEqual(list(run.steps()), [0, 1])
    self.assertEqual(_ids(run), runs.expected_ids(self.directory, 8))


class ModelStepTest(absltest.TestCase):

  def test_the_step_is_found_in_what_maxtext_restores(self):
    class Variable:

      def get_value(self):
        return np.int32(7)

    self.assertEqual(maxtext_checkpoints.model_step({"items": {"optimizer": {"step": 7}}}), 7)
    self.assertEqual(maxtext_checkpoints.model_step({"optimizer": {"step": Variable()}}), 7)
    self.assertEqual(maxtext_checkpoints.model_step({"items": {"step": np.int32(3)}}), 3)
    self.assertIsNone(maxtext_checkpoints.model_step({"items": {"params": {}}}))


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
  state = maxtext_checkpoints.DataState(iterator)

  async def save_and_load():
    write = await state.save(directory)
    iterator.state = {"step": 9}
    await write
    await (await state.load(directory))

  asyncio.run(save_and_load())
  return iterator.state


if __name__ == "__main__":
  absltest.main()
