"""Ends all processes of a run when one of them fails, and logs the reason on each.

Without this module, the other processes would wait for the failed one in a collective or in an
Orbax barrier: for minutes, forever, or until the runtime ends them with a message about sockets. So
a failing process sends its error to the coordinator, and a thread in every other process polls the
coordinator:

    process 0                          process 1
    cannot write the metrics file      waits for the gradients of process 0
    `end`: sends its error, exits      its thread logs "Process 0 of 2 failed, so ...", and exits

In a healthy run this costs one poll every two seconds, and no step waits for it. For code that all
processes run together and that may fail on one of them, use `collectives` instead.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from absl import logging

from maxtext_olmo.trainers import cluster

_FAILURE = "maxtext_olmo/failure"
_ENDED = "maxtext_olmo/ended/"
_ASK_SECONDS = 2.0
# Time for a process that fails at the same time to log its own, more specific error.
_OWN_SECONDS = 0.5
# The process that failed first and process 0 exit last, but do not wait forever.
_LAST_SECONDS = 10.0

_once = threading.Lock()
_thread: threading.Thread | None = None
_leaving = threading.Event()
_cleanups: list[Callable[[], None]] = []


def watch() -> None:
  """Ends this process when another one fails; call it once, after the processes are connected."""
  global _thread
  run = _Run.current()
  if run is not None and _thread is None:
    _thread = threading.Thread(target=run.watch, name="olmo-failure", daemon=True)
    _thread.start()
    atexit.register(_stop_watching)


def _stop_watching() -> None:
  """Stops the thread, which would abort the process if it returned from JAX while Python exits."""
  _leaving.set()
  if _thread is not None:
    _thread.join()


def add_cleanup(act: Callable[[], None]) -> None:
  """Registers a function for an immediate exit to call, which skips `atexit` and `finally`."""
  _cleanups.append(act)


def remove_cleanup(act: Callable[[], None]) -> None:
  """Removes what `add_cleanup` has registered."""
  with contextlib.suppress(ValueError):
    _cleanups.remove(act)


def exit_now(code: int) -> NoReturn:
  """Ends this process immediately, from any thread, after the registered cleanups."""
  for act in reversed(_cleanups):
    with contextlib.suppress(Exception):
      act()
  logging.flush()
  os._exit(code)


def end(message: str, code: int) -> None:
  """Ends all processes of the run; returns if this is the only process.

  The other processes log the message; the caller must have logged it already. An ordinary exit
  would wait for the other processes, which wait for this one.
  """
  run = _Run.current()
  if run is not None:
    _once.acquire()  # Never released: only one thread may end the process.
    run.leave(message, code)


class _Run:
  """A connection to the coordinator of this run's processes."""

  def __init__(self, coordinator: cluster.Coordinator):
    self._client, self._process, self._processes = coordinator

  @classmethod
  def current(cls) -> _Run | None:
    """Returns the run of this process; None if this is its only process."""
    coordinator = cluster.coordinator()
    return None if coordinator is None else cls(coordinator)

  def watch(self) -> None:
    """Waits until another process fails, and then ends this one."""
    while not _leaving.wait(_ASK_SECONDS):
      try:
        failure = json.loads(self._client.key_value_try_get(_FAILURE))
      except Exception as error:
        if "NOT_FOUND" in str(error):
          continue
        # If the coordinator is gone, JAX ends this process.
        logging.warning(
            "Process %d of %d no longer watches for failures of the others, because the"
            " coordinator could not be asked for them: %s",
            self._process,
            self._processes,
            error,
        )
        return
      if failure["process"] == self._process:
        return
      if not _leaving.wait(_OWN_SECONDS):
        _once.acquire()
        self._log(failure)
        self._exit(failure["code"])

  def leave(self, message: str, code: int) -> None:
    """Sends the error to the others, unless another process failed first, and exits."""
    mine = {"process": self._process, "message": message, "code": code}
    try:
      self._client.key_value_set(_FAILURE, json.dumps(mine))
    except Exception:  # Another process was first, or the coordinator is gone.
      with contextlib.suppress(Exception):
        first = json.loads(self._client.key_value_try_get(_FAILURE))
        self._log(first)
        code = first["code"]
      self._exit(code)
    self._exit(code, is_first=True)

  def _log(self, failure: dict[str, Any]) -> None:
    logging.error(
        "Process %d of %d failed, so all processes stop: %s",
        failure["process"],
        self._processes,
        failure["message"],
    )

  def _exit(self, code: int, *, is_first: bool = False) -> NoReturn:
    """Exits, after the processes that must still read the error; process 0 exits last."""
    logging.flush()
    is_coordinator = self._process == 0
    with contextlib.suppress(Exception):
      if is_first and not is_coordinator:
        self._wait_for(self._processes - 1)  # If this process left now, JAX would end the others.
      self._client.key_value_set(f"{_ENDED}{self._process}", "")
      if is_coordinator:
        self._wait_for(self._processes)
        time.sleep(0.5)  # Lets the last process exit.
    exit_now(code)

  def _wait_for(self, count: int) -> None:
    """Waits until a number of processes have read the error and are about to exit."""
    deadline = time.monotonic() + _LAST_SECONDS
    while len(self._client.key_value_dir_get(_ENDED)) < count and time.monotonic() < deadline:
      time.sleep(0.1)
