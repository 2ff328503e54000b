"""Threads and forked processes that share an iterator, for every dataset type and packing."""

import concurrent.futures
import os
import sys
import threading
import unittest
from collections.abc import Callable
from typing import Any

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.devices import multihost
from tests.loader import cases

STARTS_PROCESSES = True

_THREADS = 4
_STEPS = 24
_WINDOWS = dict(dataset_type="olmo_grain", max_target_length=8, olmo_eos_id=-1, olmo_packing_bins=0)
_KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("windows", _WINDOWS),
    ("synthetic", dict(_WINDOWS, dataset_type="synthetic", olmo_index_path="")),
    ("planned", dict(olmo_packing="planned")),
    ("unpacked", dict(olmo_packing="none", olmo_long_documents="truncate")),
    ("unpacked_split", dict(olmo_packing="none", olmo_long_documents="split")),
    ("first_fit", dict(olmo_packing="first_fit")),
    ("best_fit", dict(olmo_packing="best_fit")),
    ("concat_then_split", dict(olmo_packing="concat_then_split")),
    ("planned_slice", dict(olmo_packing="planned", olmo_shard="slice")),
)


def setUpModule():
  cases.compile_fast()
  # Threads change places as often as they can, so that a race shows.
  interval = sys.getswitchinterval()
  sys.setswitchinterval(1e-6)
  unittest.addModuleCleanup(sys.setswitchinterval, interval)


def _row(batch: dict[str, Any]) -> bytes:
  return np.asarray(batch["inputs"]).tobytes() + np.asarray(batch["inputs_segmentation"]).tobytes()


class ThreadsTest(cases.DocumentsCase):

  def open(self, values: dict[str, Any]) -> Any:
    return self.train(olmo_num_epochs=0, **values)

  @parameterized.named_parameters(*_KINDS)
  def test_each_batch_goes_to_one_thread(self, values):
    expected = [_row(batch) for batch in cases.take(self.open(values), _STEPS)]
    iterator = self.open(values)
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
      found = list(pool.map(lambda _: _row(next(iterator)), range(_STEPS)))
    self.assertCountEqual(found, expected)
    self.assertEqual(iterator.step, _STEPS)

  @parameterized.named_parameters(*_KINDS)
  def test_states_are_consistent_while_threads_take_batches(self, values):
    reference = self.open(values)
    states = [reference.get_state()]
    rows = []
    for _ in range(_STEPS):
      rows.append(_row(next(reference)))
      states.append(reference.get_state())
    iterator = self.open(values)
    next(iterator)
    stop = threading.Event()

    def until_stopped(act: Callable[[], Any]) -> Callable[[], list[Any]]:
      def run() -> list[Any]:
        found = []
        while not stop.is_set():
          found.append(act())
        return found

      return run

    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
      saving = pool.submit(until_stopped(iterator.get_state))
      reading = pool.submit(until_stopped(iterator.metrics))
      moving = pool.submit(lambda: [iterator.set_state(states[3]) for _ in range(5)])
      try:
        found = [_row(next(iterator)) for _ in range(12)]
        moving.result()
      finally:
        stop.set()
      for state in saving.result():
        self.assertEqual(state, states[state["step"]])
      self.assertNotEmpty(reading.result())
    for row in found:
      self.assertIn(row, rows)
    iterator.set_state(states[2])
    self.assertEqual([_row(next(iterator)) for _ in range(3)], rows[2:5])

  @parameterized.named_parameters(*_KINDS)
  def test_closing_it_while_threads_take_batches_ends_them(self, values):
    iterator = self.open(values)
    began = threading.Barrier(_THREADS)

    def run() -> Exception:
      next(iterator)
      began.wait()
      while True:
        try:
          next(iterator)
        except Exception as error:
          return error

    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
      threads = [pool.submit(run) for _ in range(_THREADS - 1)]
      began.wait()
      iterator.close()
      for thread in threads:
        self.assertRegex(repr(thread.result()), "closed|StopIteration")  # Or the epoch has ended.

  @parameterized.named_parameters(("all", {}), ("held_out", {"olmo_eval_instances": 24}))
  def test_an_evaluation_is_shared_too(self, values):
    values = dict(_WINDOWS, eval_interval=1, olmo_eval_index_path=self.index_path, **values)
    if "olmo_eval_instances" in values:
      values["olmo_eval_index_path"] = ""
    expected = [_row(batch) for batch in self.make(**values)[1]]
    iterator = iter(self.make(**values)[1])

    def take() -> list[bytes]:
      # The batches of a thread; a `for` statement would start the evaluation again.
      return [_row(batch) for batch in iter(lambda: next(iterator, None), None)]

    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
      threads = [pool.submit(take) for _ in range(_THREADS)]
      found = [row for thread in threads for row in thread.result()]
    self.assertCountEqual(found, expected)

  def test_a_generator_of_the_callers_is_never_entered_twice(self):
    batches = ({"x": np.full((4, 2), number)} for number in range(200))
    iterator = multihost.MultiHostDataLoadIterator(batches, cases.device_mesh())
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
      found = list(pool.map(lambda _: int(next(iterator)["x"][0, 0]), range(200)))
    self.assertCountEqual(found, range(200))


class ForkTest(cases.DocumentsCase):

  @parameterized.named_parameters(*_KINDS)
  def test_a_forked_child_gets_an_error_and_the_parent_continues(self, values):
    expected = cases.take_inputs(self.train(**values), 3)
    iterator = self.train(**values)
    found = cases.take_inputs(iterator, 1)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
      try:
        next(iterator)
        said = "a batch"
      except errors.ConfigError as error:
        said = str(error)
        iterator.close()
      except BaseException as error:
        said = repr(error)
      os.write(write, said.encode())
      os._exit(0)
    os.close(write)
    with open(read, encoding="utf-8") as pipe:
      said = pipe.read()
    os.waitpid(child, 0)
    self.assertIn(f"created in process {os.getpid()} and cannot be used in process {child}", said)
    found += cases.take_inputs(iterator, 2)
    np.testing.assert_array_equal(found, expected)


if __name__ == "__main__":
  absltest.main()
