"""Functions compiled in the background after enough work; a slower version serves until then."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

from absl import logging

F = TypeVar("F")


class Background(Generic[F]):
  """Compiles a function in a separate thread; safe to use with threads and forks.

  Args:
    build: Compiles the function or loads it from a cache; returns None where that is impossible.
    after: Amount of work after which compiling is worth a second of another core.
    what: Name of the function in messages: "<what> stays with NumPy: ...".
  """

  def __init__(self, build: Callable[[], F | None], *, after: int, what: str):
    self._build = build
    self._after = after
    self._what = what
    self._work = 0
    self._began = False
    self._is_compiling = False
    self._thread: threading.Thread | None = None
    self._lock = threading.Lock()
    self.ready: F | None = None
    _ALL.add(self)

  def get(self, work: int) -> F | None:
    """Returns the compiled function if it is ready; starts compiling after enough work.

    The first call never starts it: a process with a single task, such as showing one step, ends
    before the compiled function is ready.

    Args:
      work: Amount of work about to be done, in the unit of `after`.
    """
    if self.ready is None and not self._began:
      if self._work >= self._after:
        self._start()
      self._work += work
    return self.ready

  def wait(self) -> bool:
    """Compiles now and waits for the result; returns False where compiling is impossible."""
    self._start()
    if self._thread is not None:
      self._thread.join()
    return self.ready is not None

  def _start(self) -> None:
    with self._lock:
      if self._began:
        return
      self._began = True
      # Not a daemon thread: a process that exits while LLVM is running may crash.
      thread = threading.Thread(target=self._compile, name=f"compile {self._what}")
      try:
        thread.start()
      except RuntimeError as error:
        logging.warning("%s stays with NumPy: no thread to compile in: %s", self._what, error)
      else:
        self._thread = thread

  def _compile(self) -> None:
    self._is_compiling = True
    try:
      self.ready = self._build()
    except ModuleNotFoundError as error:
      logging.info(
          "%s stays with NumPy: %s; `pip install numba` makes it several times faster",
          self._what,
          error,
      )
    except Exception as error:  # Whatever fails in numba, NumPy gives the same results.
      logging.warning("%s stays with NumPy: numba failed: %r", self._what, error)
    finally:
      self._is_compiling = False

  def _after_fork(self, *, may_begin: bool) -> None:
    self._lock = threading.Lock()
    self._thread = None
    self._is_compiling = False
    self._began = self._began or not may_begin


_ALL: weakref.WeakSet[Background] = weakref.WeakSet()


def _after_fork() -> None:
  # The child inherits code that is compiled, but not a thread that is still compiling. That thread
  # may have held locks in numba, and compiling anything would wait for them forever.
  backgrounds = list(_ALL)
  is_compiling = any(background._is_compiling for background in backgrounds)
  for background in backgrounds:
    background._after_fork(may_begin=not is_compiling)


os.register_at_fork(after_in_child=_after_fork)
