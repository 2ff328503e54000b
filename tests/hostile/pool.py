"""Runs cases in a few long-lived interpreters; one that dies or does not answer is replaced."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import queue
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence

from tests.hostile import cases
from tests.hostile import faults

_ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
_START_SECONDS = 120.0
_PROGRESS = 250

Outcome = tuple[cases.Verdict, str]


class _Interpreter:
  """A child process (see `child`) in a process group of its own."""

  def __init__(self, scratch: pathlib.Path, library: pathlib.Path | None, verbose: bool):
    self._log = tempfile.NamedTemporaryFile(dir=scratch, suffix=".log")  # noqa: SIM115
    environment = {
        **os.environ,
        "PYTHONPATH": str(_ROOT),
        "JAX_PLATFORMS": "cpu",
        "XDG_CACHE_HOME": str(scratch / "cache"),
        # Nothing here may go to the network.
        "HF_ENDPOINT": "http://127.0.0.1:9",
        **({"LD_PRELOAD": str(library), faults.VARIABLE: str(library)} if library else {}),
    }
    self._process = subprocess.Popen(
        [sys.executable, "-m", "tests.hostile.child"],
        cwd=scratch,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None if verbose else self._log,
        text=True,
        start_new_session=True,
    )
    self._answered = False

  def run(self, case: cases.Case, folder: pathlib.Path) -> Outcome:
    """Returns the outcome; afterwards, `alive` says whether there still is an interpreter."""
    assert self._process.stdin is not None and self._process.stdout is not None
    try:
      request = {"name": case.name, "folder": str(folder)}
      print(json.dumps(request), file=self._process.stdin, flush=True)
    except BrokenPipeError:
      return self._died()
    limit = case.seconds if self._answered else max(case.seconds, _START_SECONDS)
    ready, _, _ = select.select([self._process.stdout], [], [], limit)
    if not ready:
      self.kill()
      return cases.Verdict.HANGS, f"no answer within {limit:.0f} s"
    answer = self._process.stdout.readline()
    if not answer:
      return self._died()
    self._answered = True
    found = json.loads(answer)
    return cases.Verdict(found["verdict"]), found["detail"]

  @property
  def alive(self) -> bool:
    """Whether the process is still running."""
    return self._process.poll() is None

  def kill(self) -> None:
    """Ends the process and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self._process.pid, signal.SIGKILL)
    self._process.wait()

  def _died(self) -> Outcome:
    code = self._process.wait()
    self.kill()
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    self._log.seek(0)
    tail = self._log.read()[-500:].decode(errors="replace")
    return cases.Verdict.FOREIGN, f"the interpreter died: {how}\n{tail}"


def run(chosen: Sequence[cases.Case], jobs: int, *, verbose: bool) -> dict[str, Outcome]:
  """Returns the outcome of each case by its name."""
  scratch = pathlib.Path(tempfile.mkdtemp(prefix="hostile_"))
  waiting: queue.SimpleQueue[tuple[int, cases.Case]] = queue.SimpleQueue()
  # The slow ones first, so that none is left for one interpreter alone.
  for numbered in enumerate(sorted(chosen, key=lambda case: -case.seconds)):
    waiting.put(numbered)
  outcomes: dict[str, Outcome] = {}
  library = faults.build(scratch)
  began = time.monotonic()

  def serve() -> None:
    interpreter: _Interpreter | None = None
    while True:
      try:
        number, case = waiting.get_nowait()
      except queue.Empty:
        break
      if interpreter is None or not interpreter.alive:
        interpreter = _Interpreter(scratch, library, verbose)
      started = time.monotonic()
      folder = scratch / f"case-{number}"
      outcome = interpreter.run(case, folder)
      shutil.rmtree(folder, ignore_errors=True)
      outcomes[case.name] = outcome
      if verbose:
        print(f"{time.monotonic() - started:6.2f} s  {outcome[0]:>9}  {case.name}  {outcome[1]}")
      elif len(outcomes) % _PROGRESS == 0:
        print(f"{len(outcomes)} of {len(chosen)}, {time.monotonic() - began:.0f} s", flush=True)
    if interpreter is not None:
      interpreter.kill()

  threads = [threading.Thread(target=serve) for _ in range(max(1, jobs))]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  shutil.rmtree(scratch, ignore_errors=True)
  print(f"{len(chosen)} cases in {time.monotonic() - began:.0f} s\n")
  return outcomes
