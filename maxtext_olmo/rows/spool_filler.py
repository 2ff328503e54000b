"""Fills the spool: a thread fetches the data of coming steps, far ahead of the trainer.

    step   ── trainer ── read-ahead ──│── in the spool ──────────│── being fetched ──▶
                                      frontier                   next

The read-ahead requests the data of the next few steps itself. The thread begins after these steps,
so that nothing is requested twice, and fetches as many as fit into the spool. If the trainer jumps
to another step, its iterator ends this thread and starts another.
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

# A piece of work: small enough that half of the connections stay free for the trainer.
_MAX_RANGES = 128
_MAX_BYTES = 16 << 20
_MAX_STEPS = 64
# How far ahead to look if the spool is never full, as with a corpus that it holds whole.
_MAX_DEPTH_SECONDS = 3600.0
_MIN_DEPTH_STEPS = 1000
_SECONDS_AT_END = 1.0
_SECONDS_WHEN_FULL = 0.25
_SECONDS_AFTER_ERROR = 60.0
_CLOSE_SECONDS = 10.0
# How long the end of the process may have to wait for the thread.
_SECONDS_BETWEEN_LOOKS = 0.2
# A file of the spool is completed at this age, so that other processes can read it.
_FLUSH_SECONDS = 1.0


class SpoolFiller:
  """Keeps the spool filled with the ranges of coming steps, in a thread.

  Args:
    storage: The storage of the files, which reads through the spool.
    dataset: The steps; this thread stays ahead of their read-ahead.
    step: The step that the trainer takes next.
    read_by_workers: Number of coming steps that worker processes read by themselves.
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
    self._coming = copy.copy(dataset)  # It caches the parts of a few steps around the last one.
    self._files = dataset.files
    self._read_by_workers = read_by_workers
    self._step = step
    self._next = step  # All steps before this one are in the spool, or have been read.
    self._seconds_per_step = 0.0
    self._advanced_at: float | None = None
    self._closed = False
    self._changed = threading.Condition()
    # Not a daemon: the interpreter would end it in the middle of compiled code, which may abort.
    self._thread = threading.Thread(target=self._run, name="olmo-spool", daemon=False)
    self._thread.start()

  @classmethod
  def start(
      cls, dataset: steps_lib.StepDataset, step: int, read_by_workers: int = 0
  ) -> SpoolFiller | None:
    """Starts the thread, if the files of a dataset are read through a spool."""
    storages = [files.storage for files in dataset.files]
    if not storages or not isinstance(storages[0], spooled_lib.SpooledStorage):
      return None
    return cls(storages[0], dataset, step, read_by_workers)

  def advance(self, step: int) -> None:
    """Says which step the trainer takes next."""
    now = time.monotonic()
    with self._changed:
      if self._advanced_at is not None and step > self._step:
        seconds = (now - self._advanced_at) / (step - self._step)
        # A mean over about 20 steps, so that a pause for a checkpoint does not distort it.
        share = 0.05 if self._seconds_per_step else 1.0
        self._seconds_per_step += share * (seconds - self._seconds_per_step)
      self._step, self._advanced_at = step, now
      self._changed.notify_all()

  @property
  def depth_steps(self) -> int:
    """The number of coming steps that need no request."""
    return max(0, self._next - self._step)

  @property
  def depth_seconds(self) -> float:
    """The time that these steps last at the trainer's present pace."""
    return self.depth_steps * self._seconds_per_step

  def close(self, *, wait: bool = True) -> None:
    """Stops the thread and, by default, waits a while for the requests that it has sent."""
    with self._changed:
      self._closed = True
      self._changed.notify_all()
    if wait and self._thread is not threading.current_thread():
      self._thread.join(_CLOSE_SECONDS)

  def _run(self) -> None:
    prefetch.use_batch_scheduling()
    spool = self._storage.spool
    spool.release()  # What an earlier thread wanted to keep.
    while not self._ends() and not spool.off:
      try:
        seconds = self._fill_next_steps()
      except MaxtextOlmoError as error:
        logging.warning(
            "The spool cannot be filled with step %d: %s It is tried again in a minute.",
            self._next,
            error,
        )
        seconds = _SECONDS_AFTER_ERROR
      except Exception:
        if not self._ends():  # Closing the storage, and the end of the process, cancel requests.
          logging.exception("The spool is not filled any more.")
        return
      self._maintain(seconds)

  def _fill_next_steps(self) -> float:
    """Puts the ranges of some steps into the spool; returns how many seconds to wait after that."""
    first = self._next = max(self._next, self._frontier() + 1)
    if self.depth_steps > max(_MIN_DEPTH_STEPS, _MAX_DEPTH_SECONDS / (self._seconds_per_step or 1)):
      return _SECONDS_WHEN_FULL
    end, tables = first, list[parts_lib.Parts]()
    while sum(len(parts.source) for parts in tables) < _MAX_RANGES and end < first + _MAX_STEPS:
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
        if self._ends() or first <= self._frontier():  # The trainer reads these steps now.
          return 0.0
        if not self._storage.stage(
            files.paths, source[some], offsets[some], sizes[some], step=end - 1
        ):
          return _SECONDS_WHEN_FULL
    self._next = end
    return 0.0

  def _ends(self) -> bool:
    """Returns whether the thread should end: it was closed, or the main thread has ended."""
    return self._closed or not threading.main_thread().is_alive()

  def _frontier(self) -> int:
    """Returns the last step that the trainer or its read-ahead reads by itself."""
    return max(self._dataset.frontier, self._step - 1 + self._read_by_workers)

  def _maintain(self, seconds: float) -> None:
    """Tells the spool what is done and what is still needed, and waits for a while."""
    spool = self._storage.spool
    spool.release(self._step)
    until = time.monotonic() + seconds
    while True:
      spool.renew()
      spool.flush(older_than=_FLUSH_SECONDS)
      left = until - time.monotonic()
      if left <= 0 or self._ends():
        return
      with self._changed:
        if not self._closed:
          self._changed.wait(min(left, _SECONDS_BETWEEN_LOOKS))


def _pieces(sizes: np.ndarray, max_bytes: int) -> Iterator[slice]:
  """Divides ranges into pieces of at most `_MAX_RANGES` ranges and `max_bytes`."""
  first = 0
  while first < len(sizes):
    total = np.cumsum(sizes[first : first + _MAX_RANGES])
    count = max(1, int(np.searchsorted(total, max_bytes, side="right")))
    yield slice(first, first + count)
    first += count
