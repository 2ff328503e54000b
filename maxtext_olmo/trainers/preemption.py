"""Stops a run on SIGTERM so that it can be started again: all processes save after the same step.

When a scheduler reclaims a host, it sends SIGTERM to one process of the run or to all of them.
After the save, each process exits with `RESTART_CODE`, which means "start me again".

    process 0                              process 1
    SIGTERM: requests a stop               sees the request, at most two seconds later
    "I have passed step 7"                 "I have passed step 8"
    stops after step 9                     stops after step 9

A thread does all of this. It reads signals from a pipe, because Python's own handlers wait until
the main thread returns from compilation or from a collective. While the processes exchange their
steps, none of them passes another step, so the highest step plus one is still ahead of all. In a
healthy run this costs one poll every two seconds, and no step waits for it.

What SIGTERM does depends on when it arrives:

    before the first step is done    ends at once: nothing has been trained since the last save
    while training                   stops as above, after evaluations that are running or due
    a second time, later             ends at once: the checkpoint being written is not committed
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from typing import Any

from absl import logging

from maxtext_olmo.trainers import RESTART_CODE
from maxtext_olmo.trainers import cluster
from maxtext_olmo.trainers import failure

# Schedulers and launchers may both signal the same process, so a second signal soon after the first
# is not a request to hurry.
REPEAT_SECONDS = 5.0
_ASK_SECONDS = 2.0
_EXCHANGE_SECONDS = 0.05
_REQUESTS = "maxtext_olmo/stop/"
_PASSED = "maxtext_olmo/passed/"
# Bytes in the pipe that are not signal numbers.
_CLOSE, _WAKE = b"\0", b"\xff"


class Preemption:
  """Handles SIGTERM for the main thread of a trainer, inside a `with` block.

  The trainer calls `connected` after it has connected its processes, `begin` before its first step
  and `should_stop` after each step.
  """

  def __init__(self) -> None:
    self._run: cluster.Coordinator | None = None
    self._lock = threading.Lock()  # Held while the processes exchange their steps.
    self._passed: int | None = None  # The last step for which `should_stop` returned.
    self._has_trained = False
    self._stop_after: int | None = None
    self._first_signal: float | None = None
    self._closing = threading.Event()
    self._reader, self._writer = os.pipe()
    os.set_blocking(self._writer, False)
    self._thread = threading.Thread(target=self._watch, name="olmo-preemption", daemon=True)
    self._old: tuple[Any, int] | None = None

  def __enter__(self) -> Preemption:
    wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
    # The handler only makes Python write the signal to the pipe; the thread acts on it.
    self._old = signal.signal(signal.SIGTERM, lambda number, frame: None), wakeup
    self._thread.start()
    return self

  def __exit__(self, *error: Any) -> None:
    handler, wakeup = self._old or (signal.SIG_DFL, -1)
    self._closing.set()
    os.write(self._writer, _CLOSE)
    self._thread.join()
    signal.signal(signal.SIGTERM, handler)
    signal.set_wakeup_fd(wakeup)
    os.close(self._reader)
    os.close(self._writer)

  def connected(self) -> None:
    """Notes that the processes of the run, if there are several, are connected."""
    self._run = cluster.coordinator()
    os.write(self._writer, _WAKE)

  def begin(self, first_step: int) -> None:
    """Notes that training begins, and with which step."""
    with self._lock:
      self._passed = first_step - 1

  def should_stop(self, step: int) -> bool:
    """Returns whether to save after a step and stop; all processes get the same answer."""
    with self._lock:
      self._passed = step
      self._has_trained = True
      return self._stop_after is not None and step >= self._stop_after

  def finish(self) -> None:
    """Tells the other processes that this one has passed its last step, so they need not wait."""
    with self._lock, contextlib.suppress(Exception):
      if self._run is not None and self._stop_after is None:
        self._publish(self._run)

  def _watch(self) -> None:
    """Reads signals, and asks the coordinator whether another process has received one."""
    while True:
      ready, _, _ = select.select([self._reader], [], [], _ASK_SECONDS if self._run else None)
      numbers = os.read(self._reader, 1024) if ready else b""
      if _CLOSE in numbers:
        return
      if signal.SIGTERM in numbers:
        self._on_signal()
      self._agree()

  def _on_signal(self) -> None:
    now = time.monotonic()
    if self._first_signal is None:
      self._first_signal = now
      if not self._has_trained:
        _end_at_once(self._run, "SIGTERM before the first step was done")
      logging.warning(
          "SIGTERM: this run will save a checkpoint after one of the next steps, and stop."
      )
    elif now - self._first_signal > REPEAT_SECONDS:
      _end_at_once(self._run, "a second SIGTERM; the last step is not saved")

  def _agree(self) -> None:
    """Chooses the last step if a stop has been requested, together with the other processes."""
    if self._stop_after is not None or self._passed is None:
      return
    run = self._run
    if run is None:
      if self._first_signal is not None:
        with self._lock:
          self._stop_after = self._passed + 1
      return
    try:
      if self._first_signal is not None:
        run.client.key_value_set(f"{_REQUESTS}{run.process}", "", allow_overwrite=True)
      elif not run.client.key_value_dir_get(_REQUESTS):
        return
    except Exception as error:  # If the coordinator is gone, JAX ends this process.
      logging.warning("Could not ask the coordinator whether to stop: %s", error)
      return
    # No step begins before all processes have agreed: another one may already have counted on the
    # step that this one has published.
    with self._lock:
      while (last := self._last_step(run)) is None:
        if self._closing.wait(_EXCHANGE_SECONDS):
          return
      self._stop_after = last
    logging.info("all processes stop after step %d", last)

  def _last_step(self, run: cluster.Coordinator) -> int | None:
    """Returns the step after which all processes stop; None if it is not known yet."""
    try:
      self._publish(run)
      found = run.client.key_value_dir_get(_PASSED)
    except Exception as error:
      logging.warning("The processes could not agree on a last step yet: %s", error)
      return None
    if len(found) < run.processes:
      return None
    return max(int(step) for _, step in found) + 1

  def _publish(self, run: cluster.Coordinator) -> None:
    run.client.key_value_set(f"{_PASSED}{run.process}", str(self._passed), allow_overwrite=True)


def _end_at_once(run: cluster.Coordinator | None, reason: str) -> None:
  message = f"{reason}. Start this run again (exit code {RESTART_CODE})."
  logging.error("%s", message)
  if run is not None:
    failure.end(message, RESTART_CODE)
  failure.exit_now(RESTART_CODE)
