"""Prefetching: threads or worker processes make the next elements while the trainer is busy.

Threads are the default: making a batch is one call, which does not hold the GIL for long. Worker
processes are Grain's, and exit with their trainer. Grain's own state can be restored only with the
same number of workers. Here the state is the number of elements taken, and a restore reopens the
dataset at that element. So a run may change its number of workers and still get the same elements.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import grain
import numpy as np

from maxtext_olmo import grain_compat
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import ResumeError
from maxtext_olmo.rows import workers as workers_lib

T = TypeVar("T")


class Prefetcher(Generic[T]):
  """The results of `make(first)`, `make(first + 1)`, … in order, made in advance by threads.

  An exception ends the sequence: `take` raises it, and so does every later call. KeyboardInterrupt
  does not end the sequence: the next call continues.

  Example:
    >>> with contextlib.closing(Prefetcher(lambda number: number**2, ahead=2)) as squares:
    ...   [squares.take() for _ in range(4)]
    [0, 1, 4, 9]

  Args:
    make: Function that makes the result with a given number. It must not reference the owner of
      this object, because then neither would ever be garbage-collected.
    ahead: Number of results that are ready or being made; 0 makes each result on request.
    threads: Number of threads that make results.
    first: First number to pass to `make`.
  """

  def __init__(self, make: Callable[[int], T], ahead: int, threads: int = 1, first: int = 0):
    self._make = make
    self._next = first
    self._error: Exception | None = None
    self._results: collections.deque[concurrent.futures.Future[T]] = collections.deque()
    self._pool: concurrent.futures.ThreadPoolExecutor | None = None
    if ahead:
      self._pool = concurrent.futures.ThreadPoolExecutor(
          min(threads, ahead), "olmo-prefetch", use_batch_scheduling
      )
      for number in range(first, first + ahead):
        self._results.append(self._pool.submit(make, number))
      self._next += ahead

  def take(self) -> T:
    """Returns the next result; raises the exception that `make` raised."""
    if self._error is not None:
      raise self._error
    try:
      if self._pool is None:
        result = self._make(self._next)
      else:
        result = self._results[0].result()  # If this wait is interrupted, no result is lost.
        self._results.popleft()
        self._results.append(self._pool.submit(self._make, self._next))
    except Exception as error:
      self._error = error
      raise
    self._next += 1
    return result

  @property
  def ready(self) -> int:
    """The number of results that are ready to be taken."""
    # The results are copied first, because another thread may take one meanwhile.
    return sum(result.done() for result in tuple(self._results))

  def close(self, *, wait: bool = True, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
    """Cancels pending work and, by default, waits for work that is running."""
    self._error = self._error or RuntimeError("This prefetcher has been closed.")
    # At interpreter exit, the threads have ended, and globals of modules may be gone.
    if self._pool is not None and not finalizing():
      self._pool.shutdown(wait, cancel_futures=True)
      self._results.clear()


def check_process(pid: int) -> None:
  """Raises ConfigError in a process forked from the one that created an iterator.

  Args:
    pid: The id of the process that created the iterator.
  """
  if os.getpid() != pid:
    raise ConfigError(
        f"This iterator was created in process {pid} and cannot be used in process {os.getpid()},"
        " which was forked from it without its threads. Create it in the process that uses it, or"
        " start processes with multiprocessing's 'spawn'."
    )


def use_batch_scheduling() -> None:
  """Runs the calling thread as SCHED_BATCH, so that waking it never preempts the trainer."""
  if hasattr(os, "SCHED_BATCH"):
    with contextlib.suppress(OSError):
      os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class PrefetchedDataset(grain.IterDataset[Any]):
  """The elements of a `MapDataset` in order. Skips None; an empty dict ends the iteration.

  Args:
    dataset: Dataset of the elements. An element must depend on its index only.
    workers: Number of processes that prepare elements; 0 uses a thread.
    ahead: Number of elements that each process, or the thread, prepares in advance; 0 makes each
      element on request.
  """

  def __init__(self, dataset: grain.MapDataset, *, workers: int = 0, ahead: int = 1):
    super().__init__(dataset)
    if workers < 0 or ahead < 0 or (workers and not ahead):
      raise ConfigError(
          f"worker_count={workers} and worker_buffer_size={ahead} must not be negative, and workers"
          " need a buffer of at least 1."
      )
    self._workers = workers
    self._ahead = ahead

  def __iter__(self) -> PrefetchedIterator:
    return PrefetchedIterator(self._parent, self._workers, self._ahead)

  def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
    """Keeps only a slice of the elements; called by the workers of Grain's `mp_prefetch`."""
    del sequential_slice
    self._parents = (self._parent.slice(sl),)

  @property
  def _element_spec(self) -> Any:
    return grain_compat.get_element_spec(self._parent)


class PrefetchedIterator(grain.DatasetIterator[Any]):
  """The iterator of a `PrefetchedDataset`, with the number of elements taken as its state.

  Args:
    dataset: Dataset of the elements.
    workers: Number of processes that prepare elements.
    ahead: Number of elements that are prepared in advance.
    threads: Number of threads that prepare elements if there are no workers.
  """

  def __init__(self, dataset: grain.MapDataset, workers: int, ahead: int, threads: int = 1):
    super().__init__()
    self._dataset = dataset
    self._workers = workers
    self._ahead = ahead
    self._threads = threads
    self._taken = 0
    self._take: Callable[[], Any] | None = None
    self._close: Callable[..., None] | None = None

  def __next__(self) -> Any:
    grain_compat.assert_not_closed(self)
    if self._take is None:
      self.start_prefetch()
    while True:
      element = self._take()  # type: ignore[misc]
      if isinstance(element, dict) and not element:
        raise StopIteration
      self._taken += 1
      if element is not None:
        return element

  def start_prefetch(self) -> None:
    """Starts preparing elements, so that the first one is ready when it is requested."""
    if self._take is not None:
      return
    if self._workers:
      elements = _From(self._dataset, self._taken)
      single = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
      made = elements.to_iter_dataset(single)
      ready = workers_lib.in_workers(made, workers=self._workers, ahead=self._ahead)
      opened = _FromWorkers(iter(ready))
      self._take, self._close = opened.take, opened.close
    else:
      make = functools.partial(_element, self._dataset, len(self._dataset))
      prefetcher = Prefetcher(make, self._ahead, self._threads, self._taken)
      self._take, self._close = prefetcher.take, prefetcher.close

  def get_state(self) -> dict[str, Any]:
    return {"next_index": self._taken}

  def set_state(self, state: dict[str, Any]) -> None:
    taken = state.get("next_index") if isinstance(state, dict) else None
    # NumPy integers are accepted, because a checkpoint may turn Python integers into them.
    if isinstance(taken, bool) or not isinstance(taken, (int, np.integer)) or taken < 0:
      raise ResumeError(
          f"Expected the state of a prefetched dataset, {{'next_index': n}}, found {state!r}."
      )
    self._stop()
    self._taken = int(taken)

  def close(self, *, wait: bool = True) -> None:
    self._stop(wait)
    super().close()

  def __del__(self):
    # The garbage collector may run anywhere, even in a thread that is just starting, where waiting
    # for another thread can deadlock.
    self._stop(wait=False)

  def _stop(self, wait: bool = True) -> None:
    if self._close is not None:
      self._close(wait=wait)
    self._take = self._close = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Wrapped:
  """A worker's element, wrapped because Grain looks inside tuples and dicts.

  Grain would skip an element that is None, and its count of elements would be wrong. It would also
  put a worker's arrays into shared memory. Arrays that are in transit when the iterator is closed
  would stay there until the interpreter exits and reports them as leaked.
  """

  value: Any


class _FromWorkers:
  """The elements that worker processes make; `close` is safe while another thread calls `take`."""

  def __init__(self, elements: grain.DatasetIterator[_Wrapped]):
    self._elements = elements
    self._lock = threading.Lock()
    self._closed = False
    elements.start_prefetch()

  def take(self) -> Any:
    """Returns the next element."""
    with self._lock:
      if self._closed:
        raise RuntimeError("This prefetcher has been closed.")
      return next(self._elements).value

  def close(self, *, wait: bool = True) -> None:
    """Stops the workers and, by default, waits until they have ended."""
    if not wait and self._lock.locked():
      threading.Thread(target=self.close, daemon=True).start()
      return
    # The lock makes this wait for a thread in `take`, which a stopped worker would never answer.
    with self._lock:
      self._closed = True
      self._elements.close()


class _From(grain.MapDataset[_Wrapped]):
  """The elements of a dataset from `first` on."""

  def __init__(self, dataset: grain.MapDataset, first: int):
    super().__init__(dataset)
    self._first = first

  def __len__(self) -> int:
    return max(0, len(self._parent) - self._first)

  def __getitem__(self, index):
    if isinstance(index, slice):
      return self.slice(index)
    return _Wrapped(self._parent[self._first + index])


def _element(dataset: grain.MapDataset, length: int, index: int) -> Any:
  """Returns an element; raises StopIteration past the end."""
  if index >= length:
    raise StopIteration
  return dataset[index]
