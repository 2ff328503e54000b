"""Ends all processes of a run when one of them fails, and tells each of them why.

The others wait for a failed process in a collective or in a barrier of Orbax: for minutes, for
ever, or until the runtime ends them with a message about sockets. So a process that fails gives
the coordinator its error, for which a thread in each of the others asks:

    process 0                          process 1
    cannot write the metrics file      waits for the gradients of process 0
    `end`: gives its error, exits      its thread logs "Process 0 of 2 failed, so ...", and exits

A question every two seconds is all that this costs while all is well; no step waits for it.
`collectives` serves what can fail on one process while all of them are at the same place.
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
# A process that fails at the same time has an error of its own to log, which says more.
_OWN_SECONDS = 0.5
# The process that fails first and process 0 leave last, but do not wait for ever.
_LAST_SECONDS = 10.0

_once = threading.Lock()
_thread: threading.Thread | None = None
_leaving = threading.Event()


def watch() -> None:
  """Lets a failure of another process end this one; once per process, after it has joined them."""
  global _thread
  run = _Run.current()
  if run is not None and _thread is None:
    _thread = threading.Thread(target=run.watch, name="olmo-failure", daemon=True)
    _thread.start()
    atexit.register(_stop_watching)


def _stop_watching() -> None:
  """Ends the thread: one that comes back from JAX while Python exits would abort the process."""
  _leaving.set()
  if _thread is not None:
    _thread.join()


def end(message: str, code: int) -> None:
  """Ends all processes of the run, which log the message; returns if this is the only one.

  The caller has logged it. An ordinary exit would wait for the others, which wait for this process.
  """
  run = _Run.current()
  if run is not None:
    _once.acquire()  # Never released: this thread or that of `watch` ends the process.
    run.leave(message, code)


class _Run:
  """The processes of this run, as the coordinator knows them."""

  def __init__(self, client: Any, process: int, processes: int):
    self._client = client
    self._process = process
    self._processes = processes

  @classmethod
  def current(cls) -> _Run | None:
    """Returns the run of this process; None if it has no other process."""
    from jax._src import distributed  # JAX has no public way to its key-value store.

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
        return  # The coordinator is gone; JAX ends this process.
      if failure["process"] == self._process:
        return
      if not _leaving.wait(_OWN_SECONDS):
        _once.acquire()
        self._log(failure)
        self._exit(failure["code"])

  def leave(self, message: str, code: int) -> None:
    """Gives the others the error, unless another process was first, and exits."""
    mine = {"process": self._process, "message": message, "code": code}
    try:
      self._client.key_value_set(_FAILURE, json.dumps(mine))
    except Exception:  # It has a value, or the coordinator is gone.
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
      # The others learn from the coordinator, in process 0, before they notice a lost connection.
      while (is_first or self._process == 0) and time.monotonic() < deadline:
        if len(self._client.key_value_dir_get(_ENDED)) == self._processes:
          time.sleep(0.2)  # Until the last of them is gone too.
          break
        time.sleep(0.1)
    os._exit(code)
