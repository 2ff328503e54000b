"""Tests of prefetching with worker processes."""

import concurrent.futures
import functools
import mmap
import os
import signal
import subprocess
import sys
import time

import grain
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.rows import prefetch
from maxtext_olmo.rows import workers as worker_processes
from tests import distributed
from tests import workers as workers_lib

STARTS_PROCESSES = True


def _keep(i):
  return i % 3 != 1


def _element(i):
  return {"i": np.array(i), "pid": np.array(os.getpid()), "large": np.zeros(1 << 18)}


def _end_after_four(i):
  return {"i": i} if i < 4 else {}


def _wait_until(path, i):
  while i and not os.path.exists(path):
    time.sleep(0.01)
  return i


def _dataset(n=20):
  return grain.MapDataset.range(n).filter(_keep).map(_element)


def _opened():
  dataset = grain.MapDataset.range(10**6).map(_element)
  options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
  return iter(worker_processes.in_workers(dataset.to_iter_dataset(options), workers=2, ahead=1))


def print_turns():
  """Prints the first elements of two workers, and the number of processes that made them."""
  elements = _opened()
  found = [next(elements) for _ in range(6)]
  elements.close()
  print([int(e["i"]) for e in found], len({int(e["pid"]) for e in found}))


def run_until_killed():
  """Prints the process ids of its workers, and waits to be killed with their queues full."""
  elements = _opened()
  print(*sorted({int(next(elements)["pid"]) for _ in range(4)}), flush=True)
  time.sleep(3600)


def _is_alive(pid):
  try:
    with open(f"/proc/{pid}/stat") as file:
      return file.read().rpartition(")")[2].split()[0] != "Z"
  except OSError:
    return False


class PrefetchProcessesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(workers_lib.started_quickly())

  def test_closing_ends_even_while_another_thread_waits_for_an_element(self):
    path = self.create_tempdir().full_path + "/released"
    dataset = grain.MapDataset.range(10**6).map(functools.partial(_wait_until, path))
    iterator = iter(prefetch.PrefetchedDataset(dataset, workers=1, ahead=1))
    self.assertEqual(next(iterator), 0)
    with concurrent.futures.ThreadPoolExecutor() as pool:
      waiting = pool.submit(next, iterator)
      closing = pool.submit(iterator.close)
      open(path, "w").close()
      closing.result()
      self.assertIn(type(waiting.exception()), (type(None), RuntimeError, ValueError))
    with self.assertRaisesRegex(ValueError, "closed"):
      next(iterator)

  @parameterized.parameters((1, 1), (2, 3))
  def test_elements_and_states_do_not_depend_on_the_workers(self, workers, ahead):
    iterator = iter(prefetch.PrefetchedDataset(_dataset(), workers=workers, ahead=ahead))
    found, states, pids = [], [], set()
    for element in iterator:
      found.append(int(element["i"]))
      states.append(iterator.get_state()["next_index"])
      pids.add(int(element["pid"]))
    iterator.close()
    self.assertEqual(found, [i for i in range(20) if i % 3 != 1])
    self.assertEqual(states, [i + 1 for i in found])
    self.assertLen(pids - {os.getpid()}, workers)

  def test_a_state_restores_with_any_number_of_workers(self):
    one = iter(prefetch.PrefetchedDataset(_dataset(), ahead=2))
    for _ in range(5):
      next(one)
    state = one.get_state()
    rest = [int(e["i"]) for e in one]
    for workers in (1, 2):
      other = iter(prefetch.PrefetchedDataset(_dataset(), workers=workers))
      next(other)
      other.set_state(state)
      self.assertEqual([int(e["i"]) for e in other], rest)
      other.close()

  def test_an_empty_dict_is_the_end(self):
    dataset = grain.MapDataset.range(10).map(_end_after_four)
    iterator = iter(prefetch.PrefetchedDataset(dataset, workers=2))
    self.assertLen(list(iterator), 4)
    iterator.close()

  def test_workers_take_turns_in_a_script_that_parses_no_flags(self):
    code = "from tests.rows import workers_test as t; t.print_turns()"
    done = distributed.run_python(code)
    self.assertEqual(done.stdout, "[0, 1, 2, 3, 4, 5] 2\n", done.stderr)

  def test_a_script_without_a_main_guard_is_told_to_add_one(self):
    script = self.create_tempfile(
        "script.py", "from tests.rows import workers_test\nworkers_test.print_turns()\n"
    )
    done = subprocess.run(
        [sys.executable, script.full_path],
        env=distributed.child_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    self.assertEqual((done.returncode, done.stdout), (1, ""))
    self.assertIn("below `if __name__ == '__main__':`", done.stderr)
    self.assertNotIn("Exception ignored", done.stderr)

  def test_elements_do_not_come_through_shared_memory(self):
    # Elements in shared memory that are in transit at close would stay until the interpreter exits.
    iterator = iter(prefetch.PrefetchedDataset(_dataset(), workers=1))
    array = next(iterator)["large"]
    iterator.close()
    while isinstance(array, np.ndarray):
      array = array.base
    self.assertNotIsInstance(array, mmap.mmap)

  def test_a_killed_worker_is_an_error_and_not_a_hang(self):
    dataset = grain.MapDataset.range(10**6).map(_element)
    iterator = iter(prefetch.PrefetchedDataset(dataset, workers=2, ahead=2))
    pids = {int(next(iterator)["pid"]) for _ in range(4)}
    os.kill(min(pids), signal.SIGKILL)
    with self.assertRaisesRegex(
        errors.WorkerError, f"process {min(pids)} with exit code -9.*grain_worker_count"
    ):
      for _ in range(100):
        next(iterator)
    iterator.close()

  def test_workers_keep_working_after_the_signal_with_which_schedulers_stop_a_task(self):
    dataset = grain.MapDataset.range(10**6).map(_element)
    iterator = iter(prefetch.PrefetchedDataset(dataset, workers=2, ahead=2))
    pids = {int(next(iterator)["pid"]) for _ in range(4)}
    for pid in pids:
      os.kill(pid, signal.SIGTERM)
    later = {int(next(iterator)["pid"]) for _ in range(20)}
    self.assertEqual(later, pids)
    iterator.close()

  def test_workers_end_when_their_trainer_is_killed(self):
    code = "from tests.rows import workers_test as t; t.run_until_killed()"
    trainer = subprocess.Popen(
        [sys.executable, "-c", code],
        env=distributed.child_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    with trainer:
      pids = [int(pid) for pid in trainer.stdout.readline().split()]
      os.kill(trainer.pid, signal.SIGKILL)
    self.assertLen(pids, 2)
    # Wait at most two minutes, so that the test fails instead of hanging.
    end = time.monotonic() + 120
    while (left := [pid for pid in pids if _is_alive(pid)]) and time.monotonic() < end:
      time.sleep(0.05)
    self.assertEmpty(left)


if __name__ == "__main__":
  absltest.main()
