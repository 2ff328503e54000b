"""Starts the trainer in several processes on this machine, like a multi-host job.

    python -m maxtext_olmo.trainers.launch --processes=2 -- --config=configs/tiny.py

The processes of a run depend on each other: if one dies, the others would wait for it. So the first
process that fails ends the run: the launcher kills the others, and its last output line says why.

SIGTERM is passed on to all processes. A trainer with a checkpoint_dir then saves and exits with
`RESTART_CODE`, and so does the launcher. A process that takes longer than `--grace` is
killed.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO

from maxtext_olmo.trainers import RESTART_CODE

TRAINER = "maxtext_olmo.trainers.tiny"
# The seconds that a terminated process may take to save and exit before it is killed.
GRACE_SECONDS = 300.0
_DRAIN_SECONDS = 3.0
# A signal handler may set a deadline while `wait` is waiting.
_LOOK_SECONDS = 1.0
# Gloo, the collectives library, writes lines with this prefix to stdout at every connection.
_CHATTER = "[Gloo] Rank "


@dataclasses.dataclass(frozen=True)
class Outcome:
  """The outcome of a run."""

  code: int  # 0 if every process succeeded.
  reason: str


class LocalRun:
  """A trainer in several local processes; each output line begins with its process number.

  Args:
    trainer_args: The trainer's command line, the same for each process.
    devices: CPU devices per process; 0 leaves the choice to JAX.
    module: The module that `python -P -m` runs. It must connect with the environment variables
      `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`.
    env: Environment variables of each process, in addition to those of the launcher.
    output: The file for all output; by default, stdout and stderr stay separate.
    grace_seconds: How long the processes may take to exit after `terminate`, or after one of them
      has exited with `RESTART_CODE`.
  """

  def __init__(
      self,
      trainer_args: Sequence[str],
      *,
      processes: int,
      devices: int = 0,
      module: str = TRAINER,
      env: Mapping[str, str] | None = None,
      output: IO[str] | None = None,
      grace_seconds: float = GRACE_SECONDS,
  ):
    self._ends: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    self._grace = grace_seconds
    self._deadline: float | None = None
    self._lock = threading.Lock()
    self._readers: list[threading.Thread] = []
    self._children: list[subprocess.Popen[str]] = []
    address = f"127.0.0.1:{_free_port()}"
    for process in range(processes):
      environment = {**os.environ, **(env or {})}
      environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # Hides info lines of the runtime.
      environment |= {
          "JAX_COORDINATOR_ADDRESS": address,
          "JAX_NUM_PROCESSES": str(processes),
          "JAX_PROCESS_ID": str(process),
          "PYTHONUNBUFFERED": "1",
      }
      if devices:
        environment["JAX_NUM_CPU_DEVICES"] = str(devices)
      self._start(process, [module, *trainer_args], environment, output)

  @property
  def pids(self) -> list[int]:
    """The process ids, by process number."""
    return [child.pid for child in self._children]

  @property
  def running(self) -> bool:
    """Whether every process is still running."""
    return all(child.poll() is None for child in self._children)

  def wait(self) -> Outcome:
    """Waits for the end of the run; if a process fails, kills the others."""
    outcome = Outcome(0, "all processes succeeded")
    for _ in self._children:
      end = self._next_end()
      if end is None:
        killed = self.stop()
        outcome = Outcome(
            128 + signal.SIGKILL,
            f"killed {_some(killed)} that had not ended {self._grace:g} s after SIGTERM",
        )
        break
      process, code = end
      if code == 0:
        continue
      reason = f"process {process} (pid {self._children[process].pid}) {_how(code)}"
      if code == RESTART_CODE:
        # All processes stop after the same step, and may still be writing.
        outcome = Outcome(code, f"{reason}: start this run again")
        self._begin_grace()
      else:
        others = self.stop()
        if others:
          reason += f"; ended the other {others if others > 1 else 'one'}, which waited for it"
        outcome = Outcome(code if code > 0 else 128 - code, reason)
        break
    self._drain()
    return outcome

  def terminate(self) -> None:
    """Sends SIGTERM to the processes that are still running, and starts the grace period."""
    for child in self._children:
      if child.poll() is None:
        child.send_signal(signal.SIGTERM)
    self._begin_grace()

  def stop(self) -> int:
    """Kills the processes that are still running, by their ids, and returns their number."""
    running = [child for child in self._children if child.poll() is None]
    for child in running:
      child.kill()
    for child in running:
      child.wait()
    return len(running)

  def _begin_grace(self) -> None:
    self._deadline = self._deadline or time.monotonic() + self._grace

  def _next_end(self) -> tuple[int, int] | None:
    """Returns the next process that ends and its code; None if the grace period is over first."""
    while True:
      seconds = _LOOK_SECONDS
      if self._deadline is not None:
        seconds = min(seconds, max(0.0, self._deadline - time.monotonic()))
      try:
        return self._ends.get(timeout=seconds)
      except queue.Empty:
        if self._deadline is not None and time.monotonic() >= self._deadline:
          return None

  def _start(
      self,
      process: int,
      command: Sequence[str],
      environment: Mapping[str, str],
      output: IO[str] | None,
  ) -> None:
    child = subprocess.Popen(
        # Without -P, files in the working directory, which may hold data, could shadow modules.
        [sys.executable, "-P", "-m", *command],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    self._children.append(child)
    for source, target in ((child.stdout, sys.stdout), (child.stderr, sys.stderr)):
      reader = threading.Thread(
          target=self._copy, args=(process, source, output or target), daemon=True
      )
      reader.start()
      self._readers.append(reader)
    threading.Thread(target=lambda: self._ends.put((process, child.wait())), daemon=True).start()

  def _copy(self, process: int, source: IO[str], target: IO[str]) -> None:
    with source:
      for line in source:
        if line.startswith(_CHATTER):
          continue
        with self._lock:
          target.write(f"[{process}] {line.rstrip()}\n")
          target.flush()

  def _drain(self) -> None:
    # A worker that outlives its trainer may hold a pipe open; do not wait for its output.
    for reader in self._readers:
      reader.join(_DRAIN_SECONDS)


def main(argv: Sequence[str]) -> int:
  """Runs the launcher with a command line; returns the exit code."""
  parser = argparse.ArgumentParser(
      prog="python -m maxtext_olmo.trainers.launch",
      description="Trains in several processes on this machine.",
      usage="%(prog)s [--processes N] [--devices N] [--grace SECONDS] -- TRAINER FLAGS",
  )
  parser.add_argument("--processes", type=int, default=2, help="number of processes (default: 2)")
  parser.add_argument(
      "--devices", type=int, default=0, help="CPU devices per process (default: JAX's choice)"
  )
  parser.add_argument(
      "--grace",
      type=float,
      default=GRACE_SECONDS,
      metavar="SECONDS",
      help="how long the processes may take to save after SIGTERM (default: %(default)g)",
  )
  parser.add_argument(
      "trainer_flags", nargs="*", help="flags of the trainer, such as --config=configs/tiny.py"
  )
  args = parser.parse_args(argv[1:])
  if args.processes < 1:
    parser.error(f"--processes={args.processes} must be at least 1")
  if args.grace < 0:
    parser.error(f"--grace={args.grace:g} must not be negative")
  signals: list[int] = []
  signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
  run = LocalRun(
      args.trainer_flags,
      processes=args.processes,
      devices=args.devices,
      grace_seconds=args.grace,
  )
  signal.signal(signal.SIGTERM, lambda number, frame: run.terminate())
  try:
    if signals:  # It came before all processes had been started.
      run.terminate()
    outcome = run.wait()
  except KeyboardInterrupt:
    outcome = Outcome(130, "interrupted")
  finally:
    run.stop()
  if outcome.code:
    sys.stderr.write(f"launch: {outcome.reason}\n")
  return outcome.code


def _free_port() -> int:
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    return probe.getsockname()[1]


def _some(number: int) -> str:
  return f"{number} process{'es' if number > 1 else ''}"


def _how(code: int) -> str:
  return f"ended with code {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"


if __name__ == "__main__":
  sys.exit(main(sys.argv))
