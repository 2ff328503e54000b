"""Kills, threads, forks, and what is left after closing."""

from __future__ import annotations

import functools
import gc
import os
import pathlib
import pickle
import random
import signal
import threading
import time
import unittest
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import maxtext_olmo
from maxtext_olmo.corpus import source as source_lib
from tests.hostile import cases
from tests.hostile import fixture
from tests.trainers.tiny import ledger

_CYCLES = 200
_THREADS = 8
_END_SECONDS = 30
_KILLS = int(os.environ.get("HOSTILE_KILLS", "6"))
_STREAMS: dict[str, dict[str, Any]] = {
    "windows": fixture.WINDOWS,
    "stored-order": fixture.STORED,
    "documents": fixture.DOCUMENTS,
    "packed": {**fixture.DOCUMENTS, "olmo_packing": "first_fit", "olmo_packing_bins": 4},
    "synthetic": fixture.SYNTHETIC,
}


def all_cases() -> Iterator[cases.Case]:
  """Yields the cases of this module."""
  make = functools.partial(cases.Case, must_work=True)
  for number in (signal.SIGKILL, signal.SIGTERM):
    yield make(f"kills/{number.name}", functools.partial(_kill, number=number), seconds=900)
  for name, base in _STREAMS.items():
    for attempt in (_share, _close_in_use, _move_in_use, _fork):
      what = attempt.__name__.strip("_").replace("_", "-")
      yield make(f"threads/{what}-{name}", functools.partial(attempt, base=base))
    yield make(f"cycles/{name}", functools.partial(_cycle, base=base), seconds=120)
  workers = functools.partial(_cycle, base={**fixture.WINDOWS, "grain_worker_count": 1}, count=2)
  yield make("cycles/workers", workers, seconds=120)
  for name, bad in {"data_sharding": (("nowhere",),), "vocab_size": 5}.items():
    attempt = functools.partial(_fail, base={**fixture.WINDOWS, name: bad})
    yield make(f"cycles/failing-{name}", attempt)


# Kills.


class _Kills(ledger.LedgerTestCase):
  """Rounds of a run that is killed; `check_ledger` then compares what it was trained on."""

  number = signal.SIGKILL
  folder = pathlib.Path()

  def create_tempdir(self, *_: Any, **__: Any) -> Any:
    return type("Folder", (), {"full_path": str(self.folder)})

  def runTest(self) -> None:
    rng = random.Random(int(self.number))
    for _ in range(_KILLS):
      run, output = self.start(rng, steps=1_000_000)
      count = rng.randrange(1, 30)
      self.wait_until(lambda count=count: self.lines() >= count, run, output)
      time.sleep(rng.uniform(0, 0.2))
      os.kill(rng.choice(run.pids), self.number)
      deadline = time.monotonic() + _END_SECONDS
      while run.running and time.monotonic() < deadline:
        time.sleep(0.05)
      self.assertFalse(run.running, f"{self.number.name} did not end the run")
      self.assertNotEqual(run.wait().code, 0)
    run, output = self.start(rng, steps=self.steps_done() + 60)
    self.assertEqual(run.wait().code, 0, output.getvalue())
    self.check_ledger()


def _kill(folder: pathlib.Path, number: signal.Signals) -> None:
  test = _Kills()
  test.number, test.folder = number, folder
  result = test.run(unittest.TestResult())
  assert result is not None
  for _, report in [*result.errors, *result.failures]:
    raise cases.WrongDataError(report[-800:])


# Threads.


def _in_threads(work: Callable[[int], None]) -> list[BaseException]:
  """Runs a function in several threads; returns what they raised."""
  raised: list[BaseException] = []

  def run(number: int) -> None:
    try:
      work(number)
    except BaseException as error:
      raised.append(error)

  threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(_THREADS)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  return raised


def _rows(batches: list[fixture.Batch]) -> list[bytes]:
  return sorted(batch["inputs"].tobytes() for batch in batches)


def _share(folder: pathlib.Path, base: dict[str, Any]) -> None:
  """Threads take the batches of one iterator: each batch goes to one of them."""
  index, options = fixture.write(folder), fixture.with_order_cache(folder, base)
  with fixture.opened(index, options) as iterator:
    expected = fixture.take_all(iterator, 15)
  taken: list[fixture.Batch] = []
  left = threading.Semaphore(15)
  with fixture.opened(index, options) as iterator:

    def work(number: int) -> None:
      while left.acquire(blocking=False):
        try:
          batch = next(iterator)
        except StopIteration:
          return
        taken.append({name: np.asarray(array) for name, array in batch.items()})
        iterator.get_state()
        iterator.metrics()

    for error in _in_threads(work):
      raise error
  if _rows(taken) != _rows(expected):
    raise cases.WrongDataError(f"{len(taken)} batches, not the {len(expected)} of one thread")


def _close_in_use(folder: pathlib.Path, base: dict[str, Any]) -> None:
  """One thread closes while others take: they end, with an error or with the end."""
  index, options = fixture.write(folder), fixture.with_order_cache(folder, base)
  with fixture.opened(index, options) as iterator:

    def work(number: int) -> None:
      for step in range(10):
        if number == 0 and step == 3:
          iterator.close()
        next(iterator)

    raised = _in_threads(work)
  for error in raised:  # Grain's own iterators raise a ValueError once they are closed.
    if not isinstance(error, (StopIteration, ValueError)):
      raise error


def _move_in_use(folder: pathlib.Path, base: dict[str, Any]) -> None:
  """One thread goes back to a state while others take; afterwards it is where it was set to."""
  index, options = fixture.write(folder), fixture.with_order_cache(folder, base)
  with fixture.opened(index, options) as iterator:
    fixture.take_all(iterator, 2)
    state = iterator.get_state()
    expected = fixture.take_all(iterator, 2)

    def work(number: int) -> None:
      for _ in range(3):
        if number == 0:
          iterator.set_state(state)
        next(iterator, None)

    for error in _in_threads(work):
      raise error
    iterator.set_state(state)
    fixture.expect(fixture.take_all(iterator, 2), expected)


# Forks.


def _fork(folder: pathlib.Path, base: dict[str, Any]) -> None:
  """After a fork, both processes read the truth; the child reads without JAX, as it must."""
  index, options = fixture.write(folder), fixture.with_order_cache(folder, base)
  with fixture.opened(index, options) as iterator:
    expected = fixture.take_all(iterator, 8)
  rows = source_lib.OlmoNpyDataSource(loaded := maxtext_olmo.load_index(index))
  ids = np.arange(loaded.total_instances)
  truth = rows.read(ids)
  with fixture.opened(index, options) as iterator:
    found = fixture.take_all(iterator, 4)
    inside, outside = os.pipe()
    child = os.fork()
    if child == 0:
      try:
        os.write(outside, pickle.dumps(bool(np.array_equal(rows.read(ids), truth))))
      finally:
        os._exit(0)
    os.close(outside)
    found += fixture.take_all(iterator, 4)
    with os.fdopen(inside, "rb") as answers:
      answer = answers.read()
    os.waitpid(child, 0)
  if not answer or not pickle.loads(answer):
    raise cases.WrongDataError("the forked process did not read the true rows")
  fixture.expect(found, expected)


# What is left after closing.


def _held() -> dict[str, int]:
  """Counts the threads, processes and files that this process holds."""
  gc.collect()
  me = os.getpid()
  children = pathlib.Path(f"/proc/{me}/task/{me}/children").read_text().split()
  return {
      "threads": len(os.listdir("/proc/self/task")),
      "children": len(children),
      "descriptors": len(os.listdir("/proc/self/fd")),
      "shared memory": len(os.listdir("/dev/shm")),
  }


def _expect_held(before: dict[str, int]) -> None:
  """Raises WrongDataError unless everything is released soon."""
  for _ in range(50):
    after = _held()
    if all(after[name] <= before[name] for name in before):
      return
    time.sleep(0.1)  # A thread that was told to end may still be ending.
  raise cases.WrongDataError(f"held before: {before}, after: {after}")


def _cycle(folder: pathlib.Path, base: dict[str, Any], count: int = _CYCLES) -> None:
  """Opens and closes often; in the end, no more is held than after the first three times."""
  index, options = fixture.write(folder), fixture.with_order_cache(folder, base)
  for number in range(count + 3):
    with fixture.opened(index, options) as iterator:
      next(iterator)
    if number == 2:  # Pools that stay are started.
      before = _held()
  _expect_held(before)


def _fail(folder: pathlib.Path, base: dict[str, Any]) -> None:
  """Checks that an iterator that cannot be opened, or fails, leaves nothing open."""
  index = fixture.write(folder)
  for number in range(53):
    try:
      with fixture.opened(index, base) as iterator:
        next(iterator)
      raise cases.WrongDataError("it was opened")
    except maxtext_olmo.MaxtextOlmoError:
      pass
    if number == 2:
      before = _held()
  _expect_held(before)
