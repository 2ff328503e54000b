"""Threads that help whoever reads a batch, asleep in compiled code until there is one to share.

A thread of Python's that is woken for a batch has to wait for the interpreter before it can read its share. These wait on a semaphore of the C library instead, inside a compiled function that never comes back to Python
(`inspection_numba`, which also says how a batch is shared):

    who asks  ──▶  post: a semaphore, and the words of the job  ◀──  helpers

There is one crew in a process for each size of token. Whoever asks while it is busy reads alone: then other cores are at work already.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from typing import Protocol

import numpy as np
from absl import logging

# What the compiled function gets that reads alone.
NOBODY = np.zeros(0, np.int64)

# Below this there is little to save, and waking a helper takes time too.
_FEWEST_BYTES = 1 << 18
_MOST_THREADS = 4


class Helped(Protocol):
  """Compiled work that others help with."""

  def help_read(self, post: np.ndarray, none: np.ndarray) -> None:
    """What a helper runs until the post is closed; `none` says of which type the tokens are."""

  def make_post(self) -> np.ndarray:
    """Where jobs are written."""

  def close_post(self, post: np.ndarray, helpers: int) -> None:
    """Lets the helpers of a post go."""


def threads_beside(others: int) -> int:
  """How many threads read a batch together, where `others` are busy meanwhile: up to four, as there are cores."""
  return max(1, min(_MOST_THREADS, cores() - others))


def cores() -> int:
  """That this process may use."""
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


class Crew:
  """Helpers for some compiled work; safe for threads, and without any after a fork.

  Args:
    helped: The work.
    dtype: Of the tokens.
  """

  def __init__(self, helped: Helped, dtype: np.dtype):
    self._helped = helped
    self._dtype = dtype
    self._most = sys.maxsize
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
    wanted = min(threads - 1, self._most)
    if wanted < 1 or num_bytes < _FEWEST_BYTES or not self._lock.acquire(blocking=False):
      return 0
    try:
      if self._helpers < wanted:
        self._hire(wanted)
    except BaseException:
      self._lock.release()
      raise
    helpers = min(self._helpers, wanted)
    if not helpers:
      self._lock.release()
    return helpers

  def post(self, helpers: int) -> np.ndarray:
    """Where a job is written for so many helpers."""
    return self._post if helpers else NOBODY

  def let_go(self, helpers: int) -> None:
    """Says that a job is done, so that others may be helped."""
    if helpers:
      self._lock.release()

  def _dismiss(self) -> None:
    """Lets the helpers go; whoever shares later gets new ones."""
    if self._helpers:
      self._helped.close_post(self._post, self._helpers)
    self._helpers, self._post = 0, NOBODY

  def _hire(self, wanted: int) -> None:
    """Starts helpers, with a post of their own, so that nobody knows one that is about to go."""
    self._dismiss()
    self._post = self._helped.make_post()
    for number in range(wanted):
      # A daemon, because it never comes back by itself; it holds nothing that has to be put down.
      helper = threading.Thread(
          target=self._helped.help_read,
          args=(self._post, np.zeros(0, self._dtype)),
          name=f"olmo-help-{number}",
          daemon=True,
      )
      self._helpers = number + 1
      try:
        helper.start()
      except RuntimeError as error:
        logging.warning("%d threads read a batch, no more are to be had: %s", number + 1, error)
        self._helpers = self._most = number
        return


_ALL: weakref.WeakSet[Crew] = weakref.WeakSet()


def _forget_after_fork() -> None:
  # The child has none of the threads, and nobody who would give the lock back.
  for crew in list(_ALL):
    crew._forget()


os.register_at_fork(after_in_child=_forget_after_fork)
