"""The only module that uses Python's private hook for the beginning of the interpreter's exit.

The interpreter exits in three phases:

    1. It calls the functions of `threading._register_atexit`. One of them joins pool threads.
    2. It joins all other threads that are not daemons.
    3. It calls the functions of `atexit`.

A pool thread that is waiting must be told to stop before phase 1 joins it, but no public hook runs
that early. `tests/exit_compat_test.py` says what fails without the private hook.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - registers its hook; later hooks run before it
import threading
from collections.abc import Callable


def call_before_pools_are_joined(function: Callable[[], object]) -> None:
  """Calls a function when the interpreter begins to exit, before it joins the threads of pools.

  Without Python's private hook, `atexit` calls the function. That is too late for pool threads, so
  the process exits only when these threads end by themselves.
  """
  register = getattr(threading, "_register_atexit", atexit.register)
  register(function)
