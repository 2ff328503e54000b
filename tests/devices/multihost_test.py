"""Tests of maxtext_olmo.devices.multihost, on several devices and in several real processes."""

from __future__ import annotations

import json
from typing import Any

import grain
import jax
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.devices import multihost
from tests import distributed
from tests.devices import multihost_cases as cases

STARTS_PROCESSES = True

CASES = "tests.devices.multihost_cases:"


def setUpModule():
  jax.config.update("jax_num_cpu_devices", 4)


def _batches(count: int, rows: int = 4) -> list[dict[str, np.ndarray]]:
  return [{"x": np.full((rows, 3), step, np.int32)} for step in range(count)]


def _first(batches: Any) -> list[int]:
  return [int(batch["x"][0, 0]) for batch in batches]


def _loader(count: int = 20) -> grain.IterDataset:
  numbers = grain.MapDataset.range(4 * count).map(lambda n: {"x": np.array([n], np.int32)})
  return numbers.to_iter_dataset().batch(4)


class OneProcessTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.mesh = cases.mesh((2, 2), ("data", "model"))

  def make(self, loader: Any, *args: Any, **kwargs: Any) -> multihost.MultiHostDataLoadIterator:
    return multihost.MultiHostDataLoadIterator(loader, self.mesh, *args, **kwargs)

  def test_a_mesh_axis_that_does_not_exist_is_an_error_at_construction(self):
    with self.assertRaisesRegex(errors.ConfigError, "rows"):
      self.make(_batches(1), data_sharding=jax.sharding.PartitionSpec("rows"))

  def test_iterator_length_breaks_an_endless_stream_into_epochs(self):
    it = self.make(_batches(7), iterator_length=3)
    self.assertEqual([_first(it), _first(it), _first(it)], [[0, 1, 2], [3, 4, 5], [6]])
    self.assertLen(it, 3)

  def test_reset_after_epoch_starts_again(self):
    it = self.make(_batches(7), iterator_length=3, reset_after_epoch=True)
    self.assertEqual([_first(it), _first(it)], [[0, 1, 2], [0, 1, 2]])
    with self.assertRaises(StopIteration):
      next(it)
    it.reset()
    self.assertEqual(_first([next(it)]), [0])

  def test_an_epoch_after_the_end_of_the_data_warns(self):
    it = self.make(_batches(2))
    self.assertEqual(_first(it), [0, 1])
    with self.assertLogs("absl", "WARNING") as logs:
      self.assertEqual(_first(it), [])
    self.assertIn("Epoch 2 has no batches", logs.output[0])

  def test_reset_after_epoch_refuses_an_iterator_that_cannot_be_restarted(self):
    with self.assertRaisesRegex(
        errors.ConfigError, "list_iterator is an iterator that cannot be restarted"
    ):
      self.make(iter(_batches(2)), reset_after_epoch=True)

  def test_reset_after_epoch_resets_an_iterator_that_can_be_reset(self):
    inner = self.make(_batches(2), reset_after_epoch=True)
    it = self.make(inner, reset_after_epoch=True)
    self.assertEqual([_first(it), _first(it)], [[0, 1], [0, 1]])

  def test_a_dataloader_that_is_not_iterable_is_an_error(self):
    with self.assertRaisesRegex(ValueError, "must be iterable, but int is not"):
      self.make(5)

  def test_a_negative_length_is_an_error(self):
    with self.assertRaisesRegex(errors.ConfigError, "iterator_length=-1 is negative"):
      self.make(_batches(1), -1)

  def test_without_a_length_len_says_why(self):
    with self.assertRaisesRegex(TypeError, "no length: it was created without iterator_length"):
      len(self.make(_batches(1)))
    self.assertLen(list(self.make(_batches(3))), 3)

  def test_dataset_size_is_passed_on(self):
    self.assertEqual(self.make(_batches(1), dataset_size=77).get_dataset_size(), 77)
    self.assertIsNone(self.make(_batches(1)).get_dataset_size())

  def test_a_failed_fetch_is_not_counted(self):
    it = self.make(_batches(2))
    self.assertEqual(_first(it), [0, 1])
    self.assertEqual(it.step_counter, 2)
    state = it.get_state()
    self.assertEqual((state["step"], state["iterator_length"]), (2, None))
    self.assertNotIn("iterator", state)

  @parameterized.product(length=(None, 8), steps=(0, 1, 7, 8))
  def test_a_restored_iterator_continues_exactly(self, length: int | None, steps: int):
    it = iter(self.make(_loader(), iterator_length=length))
    for _ in range(steps):
      next(it)
    state = json.loads(json.dumps(it.get_state()))
    other = self.make(_loader(), iterator_length=length)
    other.set_state(state)
    found = _first(batch for batch, _ in zip(other, range(5)))
    self.assertEqual(found[0], 4 * steps)
    if length is not None and steps < length:
      self.assertLen(found, min(5, length - steps))

  def test_steps_count_over_epochs_and_a_restored_iterator_knows_its_epoch(self):
    it = self.make(_loader(), iterator_length=3)
    self.assertLen(list(it), 3)
    next(iter(it))
    state = json.loads(json.dumps(it.get_state()))
    self.assertEqual((state["step"], state["epoch_start"], it.position), (4, 3, 4))
    other = self.make(_loader(), iterator_length=3)
    other.set_state(state)
    self.assertEqual((other.step, other.step_counter), (4, 1))
    self.assertEqual(_first(other), [16, 20])

  def test_dropping_it_leaves_the_data_iterator_open(self):
    loader = iter(_loader())
    next(self.make(loader))
    self.assertEqual(int(next(loader)["x"][0, 0]), 4)

  def test_a_restored_iterator_ends_its_epoch_where_the_saved_one_would(self):
    it = self.make(_loader(), iterator_length=3)
    it.set_state({"step": 2, "iterator_length": 3, "iterator": it.get_state()["iterator"]})
    self.assertLen(list(it), 1)
    self.assertLen(list(it), 3)

  @parameterized.named_parameters(
      ("length", {"step": 1, "iterator_length": 4, "iterator": {}}, "iterator_length=4, but .*=3"),
      ("keys", {"position": 1}, "no iterator_length and no step, only"),
      ("step", {"step": 9, "iterator_length": 3, "iterator": {}}, "step 9, outside an epoch of 3"),
      ("inner", {"step": 1, "iterator_length": 3}, "lacks the state of a data iterator"),
  )
  def test_a_state_of_another_iterator_is_refused(self, state: dict[str, Any], text: str):
    it = self.make(_loader(), iterator_length=3)
    with self.assertRaisesRegex(errors.ResumeError, text):
      it.set_state(state)

  def test_a_state_with_data_is_refused_by_a_loader_that_takes_none(self):
    with self.assertRaisesRegex(errors.ResumeError, "list_iterator takes none"):
      self.make(_batches(3)).set_state({"step": 1, "iterator_length": None, "iterator": {}})

  def test_a_loader_without_state_warns_and_starts_an_epoch(self):
    it = self.make(_batches(5), iterator_length=3)
    with self.assertLogs("absl", "WARNING") as logs:
      it.set_state({"step": 2, "iterator_length": 3})
    self.assertIn("cannot be moved to step 2", logs.output[0])
    self.assertFalse(it.state_set)
    self.assertEqual(_first(it), [0, 1, 2])

  def test_close_ends_the_data_iterator(self):
    it = self.make(_loader())
    next(iter(it))
    it.close()
    self.make(_batches(1)).close()


class SeveralProcessesTest(parameterized.TestCase):

  @parameterized.parameters((2, 2), (4, 1))
  def test_hosts_rows_form_one_batch_in_process_order(self, processes: int, devices: int):
    rows = 4 // processes
    results = distributed.run(
        CASES + "global_batches", processes=processes, devices=devices, args=(rows, 2)
    )
    for batches in results:
      self.assertEqual(
          [batch["inputs"] for batch in batches],
          [[[100 * step + row] * 3 for row in range(4)] for step in range(2)],
      )
      self.assertEqual(batches[0]["ids"], [0, 1, 2, 3])

  def test_data_sharding_decides_which_rows_a_host_delivers(self):
    layouts = (
        ((4, 1), ("data",)),  # rows across hosts
        ((2, 2), ("data",)),  # two hosts hold the same rows
        ((2, 2), ("data", "model")),  # and each half of their columns
        ((1, 4), (None,)),  # all hosts hold all rows
    )
    results = distributed.run(CASES + "place_on_layouts", processes=4, args=(layouts,))
    self.assertEqual(results, [[(8, 4), (4, 4), (4, 4), (2, 4)]] * 4)

  def test_resume_is_exact_on_every_host(self):
    for straight, resumed in distributed.run(CASES + "resume_after", args=(4,)):
      self.assertEqual(straight, resumed)

  def test_a_batch_keeps_its_class(self):
    for shapes in distributed.run(CASES + "llm_batch_round_trip", devices=2):
      self.assertEqual(shapes, ["(8, 5)"] * 6 + ["(8,)"] * 2)


if __name__ == "__main__":
  absltest.main()
