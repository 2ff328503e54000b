"""Measured processes: each opens one loader, under the interpreter that it needs.

Requests and answers are JSON, one per line:

    → {"open": {"loader": "torch", "files": [...], "length": 8192, "batch": 64, "workers": 2}}
    ← {"shape": [64, 8192]}
    → {"run": {"seconds": 1.0, "least": 4}}
    ← {"batches": 310, "tokens": 162529280, "seconds": 1.001, "cpu_seconds": 1.0}

Other loaders' environments lack this package, so this module imports nothing of it.
"""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import IO, Any, cast

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
_PATIENCE_SECONDS = 300
# Buffers fill before the process is stopped: a read that is stopped half-way looks like a slow
# disk.
_SETTLING_SECONDS = 0.2


@dataclasses.dataclass(frozen=True)
class Loader:
  """An open loader.

  Attributes:
    take: Returns the tokens of the next batch.
    buffered: Batches that may be ready before they are asked for. They are not counted.
    epoch: Batches until `restart` must be called; 0 for no end.
    restart: Starts a new epoch, outside the clock.
    counters: Returns numbers that grow with each batch.
  """

  take: Callable[[], Any]
  buffered: int = 0
  epoch: int = 0
  restart: Callable[[], None] = lambda: None
  counters: Callable[[], dict[str, float]] = dict


def run(loader: Loader, *, seconds: float, least: int) -> dict[str, float]:
  """Takes batches for some seconds, and at least `least` of them."""
  margin = loader.buffered + 2
  # At the end of an epoch, buffers empty while nothing new is made.
  per_epoch = max(1, loader.epoch - 2 * margin) if loader.epoch else math.inf
  found: dict[str, float] = {"batches": 0, "seconds": 0.0}
  while found["seconds"] < seconds or found["batches"] < least:
    loader.restart()
    for _ in range(margin):
      loader.take()
    taken = tokens = 0
    before, cpu, began = loader.counters(), time.process_time(), time.perf_counter()
    end = began + seconds - found["seconds"]
    while taken < per_epoch and (time.perf_counter() < end or found["batches"] + taken < least):
      tokens += math.prod(loader.take().shape)
      taken += 1
    spent = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}
    counted = {name: value - before[name] for name, value in loader.counters().items()}
    for name, value in {"batches": taken, "tokens": tokens, **spent, **counted}.items():
      found[name] = found.get(name, 0) + value
  return found


def serve(module: Any) -> None:
  """Answers requests until there are no more; `module.open_NAME` opens the loader NAME."""
  # Libraries print what they like; their output must not mix with the answers.
  answers = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)
  loader = Loader(lambda: None)
  for line in sys.stdin:
    request = json.loads(line)
    try:
      if "open" in request:
        loader = getattr(module, f"open_{request['open']['loader']}")(request["open"])
        answer: dict[str, Any] = {"shape": list(loader.take().shape)}
      else:
        answer = run(loader, **request["run"])
        time.sleep(_SETTLING_SECONDS)
    except BaseException as error:  # Whatever goes wrong in a loader is the answer.
      answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), file=answers, flush=True)


class Unavailable(RuntimeError):
  """A loader cannot be measured here; the message says why."""


class Child:
  """A measured process, as the driver sees it. It is stopped except while it answers.

  Args:
    environment: "peers" or "maxtext" for the one in `.venv-peers` or `.venv-maxtext`; "" for ours.
  """

  def __init__(self, environment: str):
    python, module = pathlib.Path(sys.executable), "ours"
    if environment:
      python, module = ROOT / f".venv-{environment}" / "bin" / "python", "peers"
    if not python.exists():
      raise Unavailable(f"there is no {python}; `make bench-peers` installs it")
    self._errors = tempfile.TemporaryFile()  # noqa: SIM115
    settings = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore"}
    settings |= {"DECOUPLE_GCLOUD": "TRUE", "HF_HUB_OFFLINE": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    code = f"from tests.benchmarks import child, {module}; child.serve({module})"
    self._process = subprocess.Popen(
        [python, "-P", "-c", code],
        env={**os.environ, **settings},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=self._errors,
        start_new_session=True,  # so that signals reach its workers as well
    )

  def ask(self, **request: Any) -> dict[str, Any]:
    """Sends a request and returns the answer."""
    requests, answers = cast(IO[bytes], self._process.stdin), cast(IO[bytes], self._process.stdout)
    try:
      os.killpg(self._process.pid, signal.SIGCONT)
      requests.write(json.dumps(request).encode() + b"\n")
      requests.flush()
      if not select.select([answers], [], [], _PATIENCE_SECONDS)[0]:
        raise Unavailable(f"no answer within {_PATIENCE_SECONDS} s")
      answer = json.loads(answers.readline())
      os.killpg(self._process.pid, signal.SIGSTOP)
    except (OSError, ValueError) as error:
      self._errors.seek(0)
      lines = self._errors.read().decode(errors="replace").splitlines()
      raise Unavailable(f"the process ended: {lines[-1] if lines else error}") from error
    if "error" in answer:
      raise Unavailable(answer["error"].splitlines()[0][:200])
    return answer

  def close(self) -> None:
    """Ends the process and its workers."""
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self._process.pid, signal.SIGKILL)
    self._process.communicate()
    self._errors.close()
