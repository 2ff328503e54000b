"""Ends all processes of a run when one of them fails, and logs the reason on each.

Without this, the others would wait for a failed process in a collective or in a barrier of Orbax:
for minutes, forever, or until the runtime ends them with a message about sockets. So a failing
process sends its error to the coordinator, which a thread in each of the other processes polls:

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
from typing import Any

from absl import logging

_FAILURE = "maxtext_olmo/failure"
_ENDED = "maxtext_olmo/ended/"
_ASK_SECONDS = 2.0
# Time for a process that fails at the same time to log its own error, which says more.
_OWN_SECONDS = 0.5
# The process that failed first and process 0 exit last, but do not wait forever.
_LAST_SECONDS = 10.0

_once = threading.Lock()
_thread: threading.Thread | None = None
_leaving = threading.Event()


def watch() -> None:
  """Ends this process when another one fails; call it once, after the processes are connected."""
  global _thread
  run = _Run.current()
  if run is not None and _thread is None:
    _thread = threading.Thread(target=run.watch, name="olmo-failure", daemon=True)
    _thread.start()
    atexit.register(_stop_watching)


def _stop_watching() -> None:
  """Stops the thread: if it returned from JAX while Python exits, it would abort the process."""
  _leaving.set()
  if _thread is not None:
    _thread.join()


def end(message: str, code: int) -> None:
  """Ends all processes of the run, which log the message; returns if this is the only process.

  The caller must have logged the message already. An ordinary exit would wait for the others, which
  wait for this process.
  """
  run = _Run.current()
  if run is not None:
    _once.acquire()  # Never released: either this thread or that of `watch` ends the process.
    run.leave(message, code)


class _Run:
  """A connection to the coordinator of this run's processes."""

  def __init__(self, client: Any, process: int, processes: int):
    self._client = client
    self._process = process
    self._processes = processes

  @classmethod
  def current(cls) -> _Run | None:
    """Returns the run of this process; None if it has no other process."""
    from jax._src import distributed  # JAX has no public access to its key-value store.

    state = distributed.global_state
    if state.client is None or state.num_processes < 2:
      return None
    return cls(state.client, state.process_id, state.num_processes)

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
            "Process %d of %d no longer watches for failures of the others, because asking the"
            " coordinator for them failed: %s",
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

  def _exit(self, code: int, *, is_first: bool = False) -> None:
    logging.flush()
    with contextlib.suppress(Exception):
      self._client.key_value_set(f"{_ENDED}{self._process}", "")
      deadline = time.monotonic() + _LAST_SECONDS
      # The others must read the error from the coordinator, in process 0, before it exits.
      while (is_first or self._process == 0) and time.monotonic() < deadline:
        if len(self._client.key_value_dir_get(_ENDED)) == self._processes:
          time.sleep(0.2)  # Until the last of them has exited.
          break
        time.sleep(0.1)
    os._exit(code)
