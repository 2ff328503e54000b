"""The driver's side of a measured process: starts it, asks it, and gives up on it."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import tempfile
import time
from typing import IO, Any, cast

import maxtext_olmo
from maxtext_olmo import errors

_SCRIPT = pathlib.Path(__file__).with_name("bench_loaders.py")
_ROOT = pathlib.Path(maxtext_olmo.__file__).resolve().parent.parent
_POLL_SECONDS = 0.1


class Unavailable(errors.MaxtextOlmoError):
  """A loader cannot be measured here; the message says why."""


def interpreter(kind: str) -> str:
  """The Python that a kind of loader runs under; Unavailable where it is missing.

  Args:
    kind: `own`, `peers` or `maxtext`; the environment variable `BENCH_PEERS_PYTHON` or `BENCH_MAXTEXT_PYTHON` says
      where, else it is looked for in `.venv-peers` or `.venv-maxtext` beside the package.
  """
  if kind == "own":
    return sys.executable
  told = os.environ.get(f"BENCH_{kind.upper()}_PYTHON")
  path = pathlib.Path(told) if told else _ROOT / f".venv-{kind}" / "bin" / "python"
  if not path.exists():
    raise Unavailable(f"no {path}" + ("" if told else "; `make bench-peers` installs it"))
  return str(path)


class Child:
  """A process that opens loaders and takes batches from them.

  Args:
    kind: Which interpreter it needs.
    patience: Seconds after which an answer is not waited for any more.
    most_bytes: Resident memory, with that of the processes below it, at which it is stopped; 0 for no limit.
  """

  def __init__(self, kind: str = "own", *, patience: float = 120.0, most_bytes: int = 0):
    self._patience = patience
    self._most_bytes = most_bytes
    self._said = tempfile.TemporaryFile()  # noqa: SIM115
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "DECOUPLE_GCLOUD": "TRUE"}
    environment.update(TF_CPP_MIN_LOG_LEVEL="3", HF_HUB_OFFLINE="1", PYTHONWARNINGS="ignore")
    # The package is what other interpreters lack, not what they need: only "formed" imports it there.
    environment["PYTHONPATH"] = str(_ROOT)
    self._process = subprocess.Popen(
        [interpreter(kind), "-P", str(_SCRIPT)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=self._said,
        start_new_session=True,  # So that its workers can be ended with it.
    )
    # Both are there, since both were asked for.
    self._requests = cast(IO[bytes], self._process.stdin)
    self._answers = cast(IO[bytes], self._process.stdout)

  def ask(self, **request: Any) -> dict[str, Any]:
    """Sends a request and returns the answer; Unavailable where it cannot be fulfilled."""
    try:
      self._requests.write(json.dumps(request).encode() + b"\n")
      self._requests.flush()
      answer = json.loads(self._line() or "{}")
    except (BrokenPipeError, ValueError) as error:
      raise Unavailable(f"the process has ended: {self._last_words()}") from error
    if not isinstance(answer, dict):
      raise Unavailable(f"the process answered {answer!r}")
    if "error" in answer:
      raise Unavailable(answer["error"].splitlines()[0][:200])
    return answer

  def _line(self) -> bytes:
    deadline = time.monotonic() + self._patience
    line = b""
    while not line.endswith(b"\n"):
      ready, _, _ = select.select([self._answers], [], [], _POLL_SECONDS)
      if ready:
        got = os.read(self._answers.fileno(), 1 << 16)
        if not got:
          raise BrokenPipeError
        line += got
      elif time.monotonic() > deadline:
        self.close()
        raise Unavailable(f"stopped after {self._patience:.0f} s")
      elif self._most_bytes and _resident_bytes(self._process.pid) > self._most_bytes:
        self.close()
        raise Unavailable(f"stopped at {self._most_bytes / 1e9:.0f} GB of memory")
    return line

  def _last_words(self) -> str:
    if self._said.closed:
      return "it was stopped"
    self._said.seek(0)
    lines = self._said.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else "it said nothing"

  def close(self) -> None:
    """Ends the process and those below it; idempotent."""
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self._process.pid, signal.SIGKILL)
    self._process.wait()
    for stream in (self._requests, self._answers):
      with contextlib.suppress(BrokenPipeError):
        stream.close()
    self._said.close()

  def __enter__(self) -> Child:
    return self

  def __exit__(self, *exception: Any) -> None:
    self.close()


def _resident_bytes(group: int) -> int:
  """What all processes of a session hold; pages that several share count for each."""
  total = 0
  for name in os.listdir("/proc"):
    if not name.isdigit():
      continue
    with contextlib.suppress(OSError):
      stat = pathlib.Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
      if int(stat[3]) == group:
        total += int(stat[21]) * os.sysconf("SC_PAGE_SIZE")
  return total
