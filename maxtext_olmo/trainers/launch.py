"""Starts the trainer in several processes on this machine, like a multi-host job.

    python -m maxtext_olmo.trainers.launch --processes=2 -- --config=configs/tiny.py

The processes of a run depend on each other: if one dies, the others would wait for it. So the first
process that fails ends the run: the launcher stops the others, and its last line says why.
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

TRAINER = "maxtext_olmo.trainers.tiny"
# The seconds that a terminated process may take to exit before it is killed.
_GRACE_SECONDS = 3.0
# The collectives library writes lines like this to stdout at every connection.
_CHATTER = "[Gloo] Rank "


@dataclasses.dataclass(frozen=True)
class Outcome:
  """The outcome of a run."""

  code: int  # 0 if every process succeeded.
  reason: str


class LocalRun:
  """A trainer in `processes` processes, whose output lines begin with the process's number.

  Args:
    trainer_args: The trainer's command line, the same for each process.
    devices: CPU devices per process; 0 leaves the choice to JAX.
    module: The module that `python -P -m` runs; it must connect as the environment says.
    env: Environment variables of each process, in addition to those of this one.
    output: The file for all output; by default, stdout and stderr stay separate.
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
  ):
    self._ends: queue.Queue[tuple[int, int]] = queue.Queue()
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
    """Waits for the end of the run; if a process fails, stops the others."""
    for _ in self._children:
      process, code = self._ends.get()
      if code != 0:
        others = self.stop()
        self._drain()
        reason = f"process {process} (pid {self._children[process].pid}) {_how(code)}"
        if others:
          reason += f"; ended the other {others if others > 1 else 'one'}, which waited for it"
        return Outcome(code if code > 0 else 128 - code, reason)
    self._drain()
    return Outcome(0, "all processes ended well")

  def stop(self) -> int:
    """Stops the processes that are still running, by their ids, and returns their number."""
    running = [child for child in self._children if child.poll() is None]
    for child in running:
      child.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_SECONDS
    for child in running:
      try:
        child.wait(max(0.0, deadline - time.monotonic()))
      except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    return len(running)

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
      reader.join(_GRACE_SECONDS)


def main(argv: Sequence[str]) -> int:
  """Runs the launcher with a command line; returns the exit code."""
  parser = argparse.ArgumentParser(
      prog="python -m maxtext_olmo.trainers.launch",
      description="Trains in several processes on this machine.",
      usage="%(prog)s [--processes N] [--devices N] -- TRAINER FLAGS",
  )
  parser.add_argument("--processes", type=int, default=2, help="number of processes (default: 2)")
  parser.add_argument(
      "--devices", type=int, default=0, help="CPU devices per process (default: JAX's choice)"
  )
  parser.add_argument(
      "trainer_flags", nargs="*", help="flags of the trainer, such as --config=configs/tiny.py"
  )
  args = parser.parse_args(argv[1:])
  if args.processes < 1:
    parser.error(f"--processes={args.processes} must be at least 1")
  # SystemExit unwinds through the `finally` below, which a plain SIGTERM would not.
  signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
  run = LocalRun(args.trainer_flags, processes=args.processes, devices=args.devices)
  try:
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


def _how(code: int) -> str:
  return f"ended with code {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"


if __name__ == "__main__":
  sys.exit(main(sys.argv))
