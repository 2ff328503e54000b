"""Runs a function in several real JAX processes and collects what each returned.

    def row_sums(scale):                      # in tests/devices/some_cases.py
      return jax.process_index() * scale

    results = distributed.run("tests.devices.some_cases:row_sums", processes=2, args=(10,))
    # results == [0, 10], in the order of the processes

Each process has CPU devices of its own and speaks to the others over loopback, through
`jax.distributed` with gloo collectives, as a multi-host job does. When one of them fails, the
others (which may be waiting for it) are ended.
"""

import dataclasses
import importlib
import math
import os
import pathlib
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_ENTRY = "tests.distributed"
_SETTLE_SECONDS = 3.0


@dataclasses.dataclass(frozen=True)
class Failure:
  """The failure of a process that did not return a result."""

  process: int
  text: str  # its traceback, or how it ended and what it wrote last
  error: BaseException | None = None  # what it raised, where that survives pickling


class DistributedError(AssertionError):
  """At least one process failed; `failures` has each that did so by itself."""

  def __init__(self, target: str, failures: Sequence[Failure]):
    self.failures = tuple(failures)
    parts = [f"--- process {failure.process}\n{failure.text}" for failure in failures]
    super().__init__(f"{target} failed in {len(failures)} process(es):\n" + "\n".join(parts))


def free_port() -> int:
  """Returns a free loopback port."""
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    return probe.getsockname()[1]


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
  """Returns the environment of a test's child process: CPU only, importing this checkout."""
  env = dict(os.environ, JAX_PLATFORMS="cpu", TF_CPP_MIN_LOG_LEVEL="2", **(extra or {}))
  # A device count meant for the parent would multiply with the child's own.
  env.pop("XLA_FLAGS", None)
  env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), env.get("PYTHONPATH")]))
  return env


def run_python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
  """Runs code in a new Python process; the caller checks its output and exit code."""
  return subprocess.run(
      [sys.executable, "-c", code, *args],
      env=child_environment(),
      capture_output=True,
      text=True,
      check=False,
  )


def run(
    target: str,
    *,
    processes: int = 2,
    devices: int = 1,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 300.0,
) -> list[Any]:
  """Calls `module:function` in several processes; returns their results in order.

  Args:
    target: `package.module:function`; arguments and results travel by pickle.
    devices: CPU devices of each process.
    timeout: guards against a hang, in seconds; it is no statement about speed.
  """
  with tempfile.TemporaryDirectory(prefix="distributed_") as folder:
    call = (target, tuple(args), dict(kwargs or {}), processes, devices, free_port())
    pathlib.Path(folder, "call").write_bytes(pickle.dumps(call))
    children = [_start(folder, process, env) for process in range(processes)]
    try:
      broken = _wait(children, folder, time.monotonic() + timeout)
    finally:
      for child in children:
        if child.poll() is None:
          child.send_signal(signal.SIGKILL)
        child.wait()
    if broken:
      raise DistributedError(target, [_failure(folder, p, note) for p, note in broken])
    return [_outcome(folder, process)[1] for process in range(processes)]


def _start(folder: str, process: int, env: Mapping[str, str] | None) -> subprocess.Popen[bytes]:
  with open(os.path.join(folder, f"{process}.log"), "wb") as log:
    return subprocess.Popen(
        [sys.executable, "-m", _ENTRY, folder, str(process)],
        cwd=_ROOT,
        env=child_environment(env),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
    )


def _wait(
    children: Sequence[subprocess.Popen[bytes]], folder: str, deadline: float
) -> list[tuple[int, str]]:
  """Waits for all, or until a failure has settled; returns who failed, with a note on each."""
  settled = math.inf
  while True:
    broken: dict[int, str] = {}
    for process, child in enumerate(children):
      outcome = _outcome(folder, process)
      if outcome is not None and outcome[0] == "error":
        broken[process] = "raised"
      elif child.poll():
        broken[process] = f"ended with code {child.returncode}"
    waiting = [p for p, child in enumerate(children) if p not in broken and child.poll() is None]
    now = time.monotonic()
    if not waiting or now > settled:
      return list(broken.items())
    if broken and settled == math.inf:
      # The others get a moment, so that an error raised on all is reported for all.
      settled = now + _SETTLE_SECONDS
    if now > deadline:
      return [(process, "was still running at the time limit") for process in waiting]
    time.sleep(0.05)


def _outcome(folder: str, process: int) -> tuple[str, Any] | None:
  path = pathlib.Path(folder, f"{process}.result")
  return pickle.loads(path.read_bytes()) if path.exists() else None


def _failure(folder: str, process: int, note: str) -> Failure:
  outcome = _outcome(folder, process)
  if outcome is not None and outcome[0] == "error":
    text, error = outcome[1]
    return Failure(process, text, error)
  log = pathlib.Path(folder, f"{process}.log").read_text(errors="replace")
  return Failure(process, f"{note}; it wrote last:\n{log[-3000:]}")


def _child(folder: str, process: int) -> None:
  call = pickle.loads(pathlib.Path(folder, "call").read_bytes())
  target, args, kwargs, processes, devices, port = call
  try:
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)
    module, name = target.split(":")
    outcome: tuple[str, Any] = (
        "ok",
        getattr(importlib.import_module(module), name)(*args, **kwargs),
    )
    payload = pickle.dumps(outcome)
  except BaseException as error:  # whatever it is belongs into the parent's report
    payload = _error_payload(error)
  temporary = pathlib.Path(folder, f"{process}.tmp")
  temporary.write_bytes(payload)
  temporary.rename(temporary.with_suffix(".result"))
  if pickle.loads(payload)[0] == "error":
    # An ordinary exit waits for processes that may never come, and an instant one ends the
    # coordinator under those that are about to report the same error. The parent ends this process
    # before the pause is over.
    time.sleep(3 * _SETTLE_SECONDS)
    os._exit(1)
  jax.distributed.shutdown()


def _error_payload(error: BaseException) -> bytes:
  text = "".join(traceback.format_exception(error))
  try:
    payload = pickle.dumps(("error", (text, error)))
    pickle.loads(payload)
    return payload
  except Exception:
    return pickle.dumps(("error", (text, None)))


if __name__ == "__main__":
  _child(sys.argv[1], int(sys.argv[2]))
