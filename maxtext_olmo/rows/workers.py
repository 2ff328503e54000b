"""Supervision of Grain's workers: a dead worker raises an error, and none outlives its trainer."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
from typing import Any

import grain
from absl import flags

from maxtext_olmo import grain_compat
from maxtext_olmo.errors import WorkerError


def in_workers(dataset: grain.IterDataset, *, workers: int, ahead: int) -> grain.IterDataset:
  """Returns a dataset whose elements are made by worker processes, in turn.

  Args:
    dataset: Dataset of the elements to make.
    workers: Number of processes.
    ahead: Number of elements that each process prepares in advance.

  Raises:
    WorkerError: This process is itself a worker that is importing an unguarded main script.
  """
  if workers:
    _check_not_importing_main()
  parse_grain_flags()
  options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=ahead)
  made = dataset.mp_prefetch(options, worker_init_fn=_end_with_parent)
  return _WatchedDataset(made, workers) if workers else made


class _WatchedDataset(grain.IterDataset[Any]):
  """The elements of Grain's worker processes; if one dies, iteration raises instead of hanging."""

  def __init__(self, dataset: grain.IterDataset, workers: int):
    super().__init__(dataset)
    self._workers = workers

  def __iter__(self) -> _WatchedIterator:
    return _WatchedIterator(self._parent.__iter__(), self._workers)


_SECONDS_BETWEEN_LOOKS = 1.0
# A dead worker is an error only after this many looks, because elements that it had completed may
# still arrive.
_LOOKS_BEFORE_ERROR = 5
# Iterators with a dead worker. They are kept alive, because closing one, as its destructor does,
# would wait forever. Their other workers stay idle until this process exits.
_abandoned: list[Any] = []


class _WatchedIterator(grain.DatasetIterator[Any]):
  """Takes elements from workers in a thread, and checks the workers while it waits.

  Grain itself notices a dead worker only between two elements. If a worker is killed while an
  element is on its way, Grain waits for the rest of that element forever.
  """

  def __init__(self, opened: grain.DatasetIterator, workers: int):
    super().__init__()
    self._opened = opened
    self._count = workers
    self._others = {*multiprocessing.active_children()}
    self._workers: set[Any] = set()
    self._requests: queue.SimpleQueue[bool] = queue.SimpleQueue()
    self._results: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
    self._requested = False
    self._thread: threading.Thread | None = None

  def start_prefetch(self) -> None:
    self._opened.start_prefetch()

  def __next__(self) -> Any:
    grain_compat.assert_not_closed(self)
    if self._thread is None:
      self._thread = threading.Thread(
          target=_serve, args=(self._opened, self._requests, self._results), daemon=True
      )
      self._thread.start()
    if not self._requested:  # If the previous call was interrupted, its request is still pending.
      self._requests.put(True)
      self._requested = True
    looks = 0
    while True:
      dead = self._dead()
      try:
        element, error = self._results.get(timeout=_SECONDS_BETWEEN_LOOKS)
        break
      except queue.Empty:
        looks += bool(dead)
        if looks >= _LOOKS_BEFORE_ERROR:
          raise _worker_error(dead) from None
    self._requested = False
    if isinstance(error, RuntimeError) and self._dead():
      raise _worker_error(self._dead()) from error
    if error is not None:
      raise error
    return element

  def get_state(self) -> dict[str, Any]:
    return self._opened.get_state()

  def set_state(self, state: dict[str, Any]) -> None:
    self._opened.set_state(state)

  def close(self) -> None:
    # Globals are None when a destructor calls this while the interpreter shuts down.
    if self._closed or _abandoned is None:
      return
    if self._dead():
      _abandoned.append(self._opened)
    else:
      self._opened.close()
    self._requests.put(False)
    # This wakes a thread that is waiting for an element.
    self._results.put((None, ValueError("This iterator has been closed.")))
    if self._thread not in (None, threading.current_thread()) and not self._requested:
      # Without this, the interpreter may exit while the thread frees the workers' semaphores.
      self._thread.join()  # type: ignore[union-attr]
    super().close()

  def _dead(self) -> list[Any]:
    """Returns the worker processes that have ended with an error."""
    if len(self._workers) < self._count:
      found = {*multiprocessing.active_children()} - self._others
      self._workers |= {p for p in found if p.name.startswith("grain-process-prefetch")}
    return [process for process in self._workers if process.exitcode]


def _serve(opened: Any, requests: queue.SimpleQueue, results: queue.SimpleQueue) -> None:
  """Answers each request with the next element, or with the error that was raised instead."""
  while requests.get():
    try:
      results.put((next(opened), None))
    except Exception as error:
      results.put((None, error))


def _worker_error(dead: list[Any]) -> WorkerError:
  ends = ", ".join(f"process {process.pid} with exit code {process.exitcode}" for process in dead)
  return WorkerError(
      f"A worker that prepares batches has died: {ends}. Exit code 1 means that it raised an error,"
      " which is printed above. Exit code -9 often means that the host ran out of memory: use fewer"
      " workers (worker_count, or grain_worker_count in a config), or 0 for threads, and resume."
  )


def _check_not_importing_main() -> None:
  """Raises WorkerError if this is a new process that is still importing the main script."""
  # multiprocessing checks this flag too, but only later, and its error does not mention workers.
  if getattr(multiprocessing.current_process(), "_inheriting", False):
    raise WorkerError(
        "A worker process imports the main script, and the script tries to start workers again. Put"
        " the code of the script below `if __name__ == '__main__':`, or use no worker processes:"
        " worker_count=0 (grain_worker_count=0 in a config)."
    )


def parse_grain_flags() -> None:
  """Marks absl's flags as parsed, because Grain's workers cannot read unparsed flags."""
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()


def _end_with_parent(worker: int, count: int) -> None:
  """Makes this worker exit when its trainer does, even if the trainer is killed.

  Schedulers send SIGTERM to all processes of a task. The trainer decides when to stop, and needs
  its workers until then.
  """
  del worker, count
  signal.signal(signal.SIGTERM, signal.SIG_IGN)
  parent = multiprocessing.parent_process()
  if parent is None:
    return

  def wait() -> None:
    parent.join()
    os._exit(1)

  threading.Thread(target=wait, name="olmo-parent", daemon=True).start()
