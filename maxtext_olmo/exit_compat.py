"""The exit of the interpreter, whose hooks have no stable API, in one place.

    1. functions of `threading._register_atexit`: the thread pools' own joins their threads
    2. all other threads that are not daemons are joined
    3. functions of `atexit`

A thread of a pool that waits for something must be told before 1, but Python has no public hook so
early. `tests/exit_compat_test.py` says what stops working without the private one.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - what is registered last runs first
import threading
from collections.abc import Callable


def call_before_pools_are_joined(function: Callable[[], object]) -> None:
  """Calls a function when the interpreter begins to exit, before it joins the threads of pools.

  Without Python's private hook, the function is called by `atexit`: too late for a thread of a
  pool, so the process exits only when such threads end by themselves.
  """
  register = getattr(threading, "_register_atexit", atexit.register)
  register(function)
