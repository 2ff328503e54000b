"""Watches Grain's worker processes: a dead worker raises an error, none outlives its trainer."""

from __future__ import annotations

import multiprocessing
import os
import queue
import threading
from typing import Any

import grain
from absl import flags

from maxtext_olmo import grain_compat
from maxtext_olmo.errors import WorkerError


def in_workers(dataset: grain.IterDataset, *, workers: int, ahead: int) -> grain.IterDataset:
  """Returns a dataset whose elements are made by worker processes, in turn.

  Args:
    dataset: The elements to make.
    workers: The number of processes.
    ahead: The number of elements that each of them prepares in advance.
  """
  parse_grain_flags()
  options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=ahead)
  made = dataset.mp_prefetch(options, worker_init_fn=_end_with_parent)
  return _WatchedDataset(made, workers) if workers else made


class _WatchedDataset(grain.IterDataset[Any]):
  """The elements of Grain's worker processes; a worker that dies raises an error, never a hang."""

  def __init__(self, dataset: grain.IterDataset, workers: int):
    super().__init__(dataset)
    self._workers = workers

  def __iter__(self) -> _WatchedIterator:
    return _WatchedIterator(self._parent.__iter__(), self._workers)


_SECONDS_BETWEEN_LOOKS = 1.0
_LOOKS_BEFORE_ERROR = 5  # Elements that were complete when a worker died may still arrive.
# Iterators with a dead worker. Closing one, as its destructor does, would wait forever; its other
# workers stay idle until this process exits.
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
    if not self._requested:  # Otherwise the previous call was interrupted.
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
    if self._closed:
      return
    if self._dead():
      _abandoned.append(self._opened)
    else:
      self._opened.close()
    self._requests.put(False)
    # Wakes a thread that is waiting for an element.
    self._results.put((None, ValueError("This iterator has been closed.")))
    if self._thread not in (None, threading.current_thread()) and not self._requested:
      # Otherwise the interpreter may exit while the thread frees the workers' semaphores.
      self._thread.join()  # type: ignore[union-attr]
    super().close()

  def _dead(self) -> list[Any]:
    """Returns the worker processes that have ended with an error."""
    if len(self._workers) < self._count:
      found = {*multiprocessing.active_children()} - self._others
      self._workers |= {p for p in found if p.name.startswith("grain-process-prefetch")}
    return [process for process in self._workers if process.exitcode]


def _serve(opened: Any, requests: queue.SimpleQueue, results: queue.SimpleQueue) -> None:
  """Puts one element, or the error that was raised instead, for each request."""
  while requests.get():
    try:
      results.put((next(opened), None))
    except Exception as error:
      results.put((None, error))


def _worker_error(dead: list[Any]) -> WorkerError:
  ends = ", ".join(f"process {process.pid} with exit code {process.exitcode}" for process in dead)
  return WorkerError(
      f"A worker that prepares batches has died: {ends}. Exit code -9 often means that the host ran"
      " out of memory. Use fewer workers (grain_worker_count), or 0 for threads, and resume."
  )


def parse_grain_flags() -> None:
  """Marks absl's flags as parsed: Grain's workers read them, even in scripts without app.run."""
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()


def _end_with_parent(worker: int, count: int) -> None:
  """Makes this worker exit when its trainer does, even if the trainer is killed."""
  del worker, count
  parent = multiprocessing.parent_process()
  if parent is None:
    return

  def wait() -> None:
    parent.join()
    os._exit(1)

  threading.Thread(target=wait, name="olmo-parent", daemon=True).start()
