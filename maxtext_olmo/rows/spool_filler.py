"""A thread that fills the spool with the data of upcoming steps, far ahead of the trainer.

    step   ── trainer ── read-ahead ──│── in the spool ──────────│── being fetched ──▶
                                      frontier                   next

The read-ahead requests the data of the next few steps itself. The thread begins after these steps,
so that nothing is requested twice, and fetches as many steps as fit into the spool. If the trainer
jumps to a different step, its iterator ends this thread and starts a new one.

During an outage of the store, the thread waits in a request. A second thread renews the files of
upcoming steps, so that other processes do not delete them meanwhile, and releases the rest.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator

import numpy as np
from absl import logging

from maxtext_olmo.corpus.storage import spooled as spooled_lib
from maxtext_olmo.errors import MaxtextOlmoError
from maxtext_olmo.rows import parts as parts_lib
from maxtext_olmo.rows import prefetch
from maxtext_olmo.rows import steps as steps_lib

# Limits of one request: small enough that half of the connections stay free for the trainer.
MAX_RANGES = 128
_MAX_BYTES = 16 << 20
_MAX_STEPS = 64
# How far ahead to fetch if the spool never fills up, for example if it can hold the whole corpus.
_MAX_DEPTH_SECONDS = 3600.0
_MIN_DEPTH_STEPS = 1000
_SECONDS_AT_END = 1.0
_SECONDS_WHEN_FULL = 0.25
_SECONDS_AFTER_ERROR = 60.0
# How long `close` waits for pending requests, so that what they read is not lost.
_CLOSE_SECONDS = 1.0
# Interval at which the threads check whether the process is ending; the process waits for them.
_SECONDS_BETWEEN_LOOKS = 0.2
# A spool file is completed at this age, so that other processes can read it.
_FLUSH_SECONDS = 1.0


def max_depth_steps(seconds_per_step: float) -> float:
  """Returns the maximum number of steps that the spool is filled ahead of the trainer.

  Args:
    seconds_per_step: The trainer's pace; 0 if it is not known yet.
  """
  return max(_MIN_DEPTH_STEPS, _MAX_DEPTH_SECONDS / (seconds_per_step or 1))


class SpoolFiller:
  """Keeps the spool filled with the ranges of upcoming steps, in a thread.

  Args:
    storage: Storage of the files, which reads through the spool.
    dataset: Dataset of the steps. The thread stays ahead of its read-ahead.
    step: Step that the trainer takes next.
    read_by_workers: Number of upcoming steps that worker processes read themselves.
  """

  def __init__(
      self,
      storage: spooled_lib.SpooledStorage,
      dataset: steps_lib.StepDataset,
      step: int,
      read_by_workers: int = 0,
  ):
    self._storage = storage
    self._dataset = dataset
    # A dataset caches the parts of recent steps, so the thread needs its own copy.
    self._coming = copy.copy(dataset)
    self._files = dataset.files
    self._read_by_workers = read_by_workers
    self._step = step
    self._next = step  # All steps before this one are in the spool, or have been read.
    self._seconds_per_step = 0.0
    self._advanced_at: float | None = None
    self._closed = threading.Event()
    self._changed = threading.Condition()
    self._release_lock = threading.RLock()
    # The threads are not daemons, because ending a daemon thread in the middle of compiled code may
    # abort the process.
    self._thread = threading.Thread(target=self._run, name="olmo-spool", daemon=False)
    self._thread.start()
    self._renewer = threading.Thread(target=self._renew, name="olmo-spool-renew", daemon=False)
    self._renewer.start()

  @classmethod
  def start(
      cls, dataset: steps_lib.StepDataset, step: int, read_by_workers: int = 0
  ) -> SpoolFiller | None:
    """Starts the thread if a dataset reads its files through a spool; otherwise returns None."""
    storages = [files.storage for files in dataset.files]
    if not storages or not isinstance(storages[0], spooled_lib.SpooledStorage):
      return None
    return cls(storages[0], dataset, step, read_by_workers)

  def advance(self, step: int) -> None:
    """Records the step that the trainer takes next."""
    now = time.monotonic()
    with self._changed:
      if self._advanced_at is not None and step > self._step:
        seconds = (now - self._advanced_at) / (step - self._step)
        # This is a mean over about 20 steps, so that a pause for a checkpoint does not distort it.
        share = 0.05 if self._seconds_per_step else 1.0
        self._seconds_per_step += share * (seconds - self._seconds_per_step)
      self._step, self._advanced_at = step, now
      self._changed.notify_all()

  @property
  def depth_steps(self) -> int:
    """The number of upcoming steps whose data needs no further requests.

    It is 0 while the trainer's own reads from the store have not reached the spool.
    """
    return 0 if self._storage.reads_directly else self._ahead

  @property
  def depth_seconds(self) -> float:
    """The number of seconds that `depth_steps` steps last at the trainer's current pace."""
    return self.depth_steps * self._seconds_per_step

  @property
  def _ahead(self) -> int:
    return max(0, self._next - self._step)

  def close(self, *, wait: bool = True) -> None:
    """Stops the thread and, by default, waits a second for its pending requests.

    During an outage of the store, they take longer. They end when the storage is closed or when the
    store answers; until then, a new thread does not send requests.
    """
    with self._release_lock:
      self._closed.set()
    with self._changed:
      self._changed.notify_all()
    if wait and self._thread is not threading.current_thread():
      self._thread.join(_CLOSE_SECONDS)

  def _run(self) -> None:
    prefetch.use_batch_scheduling()
    spool = self._storage.spool
    spool.release()  # Drops claims that an earlier thread left.
    while not self._ends() and not spool.off:
      try:
        seconds = self._fill_next_steps()
      except MaxtextOlmoError as error:
        if self._ends():  # The storage was closed, which cancels requests.
          break
        logging.warning(
            "Cannot fill the spool with step %d: %s Retrying in a minute.",
            self._next,
            error,
        )
        seconds = _SECONDS_AFTER_ERROR
      except Exception:
        if not self._ends():  # When the storage closes or the process ends, requests are cancelled.
          logging.exception("Filling the spool has stopped, because its thread failed.")
        break
      self._maintain(seconds)
    spool.flush()  # The storage may have been closed before the last request was answered.

  def _renew(self) -> None:
    """Renews the files of upcoming steps, even while the other thread waits for the store."""
    while not self._ends() and self._thread.is_alive():
      self._release()
      self._storage.spool.renew()
      self._closed.wait(_SECONDS_BETWEEN_LOOKS)

  def _release(self) -> None:
    """Releases the files of steps that are done; after `close`, a new thread may need them."""
    with self._release_lock:
      if not self._closed.is_set():
        self._storage.spool.release(self._step)

  def _fill_next_steps(self) -> float:
    """Puts the ranges of some steps into the spool; returns the seconds to wait afterwards."""
    first = self._next = max(self._next, self._frontier() + 1)
    if self._ahead > max_depth_steps(self._seconds_per_step):
      return _SECONDS_WHEN_FULL
    end, tables = first, list[parts_lib.Parts]()
    while sum(len(parts.source) for parts in tables) < MAX_RANGES and end < first + _MAX_STEPS:
      if not self._coming.has(end):
        break
      tables.append(self._coming.parts(end))
      end += 1
    if not tables:
      return _SECONDS_AT_END
    source = np.concatenate([parts.source for parts in tables])
    firsts = np.concatenate([parts.first for parts in tables])
    counts = np.concatenate([parts.count for parts in tables])
    for files in self._files:
      offsets, sizes = files.ranges(source, firsts, counts)
      for some in _pieces(sizes, min(_MAX_BYTES, 2 * self._storage.spool.max_range_bytes)):
        self._maintain(0.0)
        if self._ends() or first <= self._frontier():  # The trainer now reads these steps itself.
          return 0.0
        if not self._storage.stage(
            files.paths, source[some], offsets[some], sizes[some], end - 1, self._ends
        ):
          return _SECONDS_WHEN_FULL
    self._next = end
    return 0.0

  def _ends(self) -> bool:
    """Returns whether the thread should end: `close` was called, or the main thread has ended."""
    return self._closed.is_set() or not threading.main_thread().is_alive()

  def _frontier(self) -> int:
    """Returns the last step that the read-ahead or the worker processes read themselves."""
    return max(self._dataset.frontier, self._step - 1 + self._read_by_workers)

  def _maintain(self, seconds: float) -> None:
    """Tells the spool which steps are done, then waits."""
    spool = self._storage.spool
    self._release()
    until = time.monotonic() + seconds
    while True:
      spool.flush(older_than=_FLUSH_SECONDS)
      left = until - time.monotonic()
      if left <= 0 or self._ends():
        return
      with self._changed:
        if not self._closed.is_set():
          self._changed.wait(min(left, _SECONDS_BETWEEN_LOOKS))


def _pieces(sizes: np.ndarray, max_bytes: int) -> Iterator[slice]:
  """Divides ranges into pieces of at most `MAX_RANGES` ranges and `max_bytes`."""
  first = 0
  while first < len(sizes):
    total = np.cumsum(sizes[first : first + MAX_RANGES])
    count = max(1, int(np.searchsorted(total, max_bytes, side="right")))
    yield slice(first, first + count)
    first += count
