"""Compiles functions with numba in the background; callers use NumPy until the code is ready."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from absl import logging

F = TypeVar("F")


class Background(Generic[F]):
  """Compiles a function in a separate thread; safe to use with threads and forks.

  Args:
    build: Compiles the function or loads it from a cache; returns None if that is impossible.
    after: Amount of work after which compiling starts. Compiling occupies another core for about a
      second, which is not worth it for less work.
    what: Name of the function in log messages, such as "The repetition filter".
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

    The first call never starts compiling: a process that calls the function only once, such as a
    command that shows one step, would end before the compiled function is ready.

    Args:
      work: Amount of work about to be done, in the unit of `after`.
    """
    if self.ready is None and not self._began:
      if self._work >= self._after:
        self._start()
      self._work += work
    return self.ready

  def wait(self) -> bool:
    """Compiles now and waits for the result; returns False if compiling is impossible."""
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
        logging.warning("%s continues to use NumPy: cannot start a thread: %s", self._what, error)
      else:
        self._thread = thread

  def _compile(self) -> None:
    self._is_compiling = True
    try:
      self.ready = self._build()
    except ModuleNotFoundError as error:
      logging.info(
          "%s continues to use NumPy: %s; `pip install numba` makes it several times faster",
          self._what,
          error,
      )
    except Exception as error:  # Any failure in numba is harmless: NumPy gives the same results.
      logging.warning("%s continues to use NumPy: numba failed: %r", self._what, error)
    finally:
      self._is_compiling = False

  def _after_fork(self, *, may_begin: bool) -> None:
    self._lock = threading.Lock()
    self._thread = None
    self._is_compiling = False
    self._began = self._began or not may_begin


def jit(function: Callable) -> Any:
  """Compiles a function with numba when it is first called, without the interpreter's lock."""
  import numba

  try:
    return numba.njit(nogil=True, cache=True)(function)
  except RuntimeError:  # The package is installed in a place where numba cannot store its cache.
    return numba.njit(nogil=True)(function)


def declare_pread() -> Any:
  """Returns the C library's `pread`, for functions compiled with `jit`; see `can_pread`."""
  import numba

  types: Any = numba.types  # Type checkers do not understand numba's types.
  return types.ExternalFunction(
      "pread", types.ssize_t(types.intc, types.voidptr, types.size_t, types.int64)
  )


def can_pread() -> bool:
  """Returns whether the C library's `pread` has the signature that `declare_pread` declares."""
  return sys.maxsize > 2**32 and sys.platform.startswith("linux")


_ALL: weakref.WeakSet[Background] = weakref.WeakSet()


def _after_fork() -> None:
  # A forked child inherits compiled functions, but not a thread that is still compiling. If that
  # thread held locks in numba, the child never gets them, and compiling would wait forever.
  backgrounds = list(_ALL)
  is_compiling = any(background._is_compiling for background in backgrounds)
  for background in backgrounds:
    background._after_fork(may_begin=not is_compiling)


os.register_at_fork(after_in_child=_after_fork)
