"""Threads that help whoever reads a batch, asleep in compiled code until there is one to share.

A thread of Python's that is woken for a batch has to wait for the interpreter first, which takes longer than reading its share.
These wait on a semaphore of the C library instead, inside a compiled function that never comes back to Python
(`inspection_numba`, which also says how a batch is shared):

    who asks  ──▶  post: a semaphore, and the words of the job  ◀──  helpers

There is one crew in a process for each size of token. Whoever asks while it is busy reads alone: then other cores are at work already.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable

import numpy as np
from absl import logging

# The words of a post. What is written by several threads has a line of the cache for itself; the semaphore has the first.
NEXT, BUSY, ASLEEP, STOPPED = 8, 16, 24, 25
DESCRIPTORS, OFFSETS, ROWS, COUNT, LENGTH, HIGHEST, CLEAN = range(32, 39)
MIN_PERIOD, MAX_PERIOD, REPEATS, ROWS_AT_ONCE, FAILED = range(40, 45)
_WORDS = 48
_LINE_BYTES = 64

# What NEXT is where there is no job, and more than any batch has rows.
CLOSED = 1 << 40

# What the compiled function gets that reads alone.
NOBODY = np.zeros(0, np.int64)

# Below this a share is read sooner than a helper wakes up.
_FEWEST_BYTES = 1 << 18
_MOST_THREADS = 4

Help = Callable[[np.ndarray, np.ndarray], None]


def threads_beside(others: int) -> int:
  """How many threads read a batch together, where `others` are busy meanwhile: up to four, as there are cores."""
  return max(1, min(_MOST_THREADS, cores() - others))


def cores() -> int:
  """That this process may use."""
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


class Crew:
  """Helpers for one compiled function; safe for threads, and without any after a fork.

  Args:
    help_read: What a helper runs; it gets a post and an empty array of `dtype`.
    dtype: Of the tokens.
  """

  def __init__(self, help_read: Help, dtype: np.dtype):
    self._help_read = help_read
    self._dtype = dtype
    self._forget()
    _ALL.add(self)

  def _forget(self) -> None:
    self._lock = threading.Lock()
    self._helpers = 0
    self._post = NOBODY

  def take_on(self, num_bytes: int, threads: int) -> int:
    """How many helpers look at `post` until they are let go; 0 where the job is not shared.

    Args:
      num_bytes: To be read.
      threads: Who read it at most, with the one that asks.
    """
    if threads < 2 or num_bytes < _FEWEST_BYTES or not self._lock.acquire(blocking=False):
      return 0
    try:
      if self._helpers < threads - 1:
        self._hire(threads - 1)
    except BaseException:
      self._lock.release()
      raise
    if not self._helpers:
      self._lock.release()
    return min(self._helpers, threads - 1)

  def post(self, helpers: int) -> np.ndarray:
    """Where a job is written for so many helpers."""
    return self._post if helpers else NOBODY

  def let_go(self, helpers: int) -> None:
    """Says that a job is done, so that others may be helped."""
    if helpers:
      self._lock.release()

  def stop(self) -> None:
    """Ends the helpers; those who share later get new ones."""
    with self._lock:
      self._dismiss()

  def _dismiss(self) -> None:
    self._post[STOPPED : STOPPED + 1] = 1
    for _ in range(self._helpers):
      _LIBC.sem_post(ctypes.c_void_p(self._post.ctypes.data))
    self._helpers, self._post = 0, NOBODY

  def _hire(self, wanted: int) -> None:
    """Starts helpers, with a post of their own, so that nobody knows one that is about to go."""
    self._dismiss()
    post = _make_post()
    for number in range(wanted):
      # A daemon, because it never comes back by itself; it holds nothing that has to be put down.
      helper = threading.Thread(
          target=self._help_read,
          args=(post, np.zeros(0, self._dtype)),
          name=f"olmo-help-{number}",
          daemon=True,
      )
      try:
        helper.start()
      except RuntimeError as error:
        logging.warning("Batches are read by %d threads: no more can be had: %s", number + 1, error)
        break
      self._helpers = number + 1
    self._post = post


def _make_post() -> np.ndarray:
  memory = np.zeros(_WORDS * 8 + _LINE_BYTES, np.uint8)
  start = -memory.ctypes.data % _LINE_BYTES
  post = memory[start : start + _WORDS * 8].view(np.int64)
  post[NEXT] = CLOSED
  if _LIBC.sem_init(ctypes.c_void_p(post.ctypes.data), 0, 0):
    raise OSError(ctypes.get_errno(), "sem_init failed")
  return post


_LIBC = ctypes.CDLL(None, use_errno=True)
_ALL: weakref.WeakSet[Crew] = weakref.WeakSet()


def _forget_after_fork() -> None:
  # The child has none of the threads, and nobody who would give the lock back.
  for crew in list(_ALL):
    crew._forget()


os.register_at_fork(after_in_child=_forget_after_fork)
