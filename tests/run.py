"""Runs test files under the absl test runner.

python tests/run.py                     all of them, a process each
python tests/run.py tests/order -j 4    those below a folder, four at a time
python tests/run.py --share             all; those that start no process share a few interpreters
python tests/run.py --fast              only those that start no process, in shared interpreters

A test file that starts processes (subprocesses, Grain's workers, `tests.distributed`) has a line
`STARTS_PROCESSES = True`, and always runs in a process of its own. A file without that line fails
in a shared interpreter if it starts a process. Files share an interpreter if they set the same
number of CPU devices with `jax.config.update("jax_num_cpu_devices", …)`; a file that sets none gets
one device.

A file that does not end within `--hang-seconds` is stopped with a traceback of all its threads, and
fails, so that one hang neither hides the other results nor uses up the time of CI.

With `--retries 1` or TEST_RETRIES=1, as in CI, files that fail run once more when all others are
done, each alone on the machine. One that then passes does not fail the run, but its failure is
printed, and the summary lists it as unstable: it is a defect of the test or of the product.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_SHARED_INTERPRETER = _ROOT / "tests" / "shared_interpreter.py"
_STARTS_PROCESSES = re.compile(r"^STARTS_PROCESSES = True$", re.MULTILINE)
_DEVICES = re.compile(r"""jax\.config\.update\(["']jax_num_cpu_devices["'], (\d+)\)""")
_NUM_SLOWEST = 10
_RUNNING: set[int] = set()  # The process groups of the test files that run alone.
# With JAX_COMPILATION_CACHE_DIR set, JAX keeps programs of any size for later runs.
_KEEP_ALL_PROGRAMS = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


@dataclasses.dataclass(frozen=True)
class Outcome:
  """The result of one test file."""

  path: pathlib.Path
  ran: int
  failed: int
  skipped: int
  output: str
  seconds: float

  @property
  def num_failed(self) -> int:
    """At least 1 for a file that runs nothing."""
    return self.failed or int(self.ran == 0)

  @property
  def num_passed(self) -> int:
    """Tests that neither failed nor were skipped."""
    return max(0, self.ran - self.num_failed - self.skipped)


def _environment() -> dict[str, str]:
  return {**os.environ, "PYTHONPATH": str(_ROOT), "JAX_PLATFORMS": "cpu"}


def _run_alone(path: pathlib.Path, hang_seconds: float) -> Outcome:
  """Runs a test file in a process of its own."""
  began = time.monotonic()
  with tempfile.TemporaryFile() as file:
    # A file instead of a pipe: a child that a test leaves running would keep the pipe open.
    process = subprocess.Popen(
        [sys.executable, str(path)],
        cwd=_ROOT,
        env={**_environment(), "PYTHONFAULTHANDLER": "1"},
        stdout=file,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    _RUNNING.add(process.pid)
    try:
      code = process.wait(hang_seconds)
      ending = ""
    except subprocess.TimeoutExpired:
      process.send_signal(signal.SIGABRT)  # Prints the tracebacks.
      code = process.wait()
      ending = f"\n{path} was stopped, because it had not ended after {hang_seconds:g} s.\n"
    finally:
      _RUNNING.discard(process.pid)
      _end_group(process.pid)
    file.seek(0)
    output = file.read().decode(errors="replace") + ending
  ran, failed, skipped = _counts(output)
  # A file that dies has failed even where no test says so.
  failed = failed or int(code != 0)
  return Outcome(path, ran, failed, skipped, output, time.monotonic() - began)


def _end_group(group: int) -> None:
  """Kills all processes that a test file has left running."""
  with contextlib.suppress(ProcessLookupError):
    os.killpg(group, signal.SIGKILL)


def _counts(output: str) -> tuple[int, int, int]:
  """Returns the number of tests that ran, that failed, and that were skipped."""
  ran = re.findall(r"^Ran (\d+) tests?", output, re.MULTILINE)
  summary = re.findall(r"^(?:OK|FAILED)(?: \((.*)\))?$", output, re.MULTILINE)
  numbers = dict(re.findall(r"(\w+)=(\d+)", summary[-1] if summary else ""))
  failed = sum(int(numbers.get(kind, 0)) for kind in ("failures", "errors"))
  return int(ran[-1]) if ran else 0, failed, int(numbers.get("skipped", 0))


class _Interpreter:
  """A process that runs test files one after another (see `shared_interpreter`)."""

  def __init__(self, devices: int):
    self.devices = devices
    self._process = subprocess.Popen(
        [sys.executable, str(_SHARED_INTERPRETER)],
        cwd=_ROOT,
        env={
            **_environment(),
            **_KEEP_ALL_PROGRAMS,
            "JAX_NUM_CPU_DEVICES": str(devices),
            "PYTHONFAULTHANDLER": "1",
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert self._process.stdout is not None
    self._process.stdout.readline()  # Its imports are not part of the first file's time.

  def run(self, path: pathlib.Path, hang_seconds: float) -> tuple[Outcome, bool]:
    """Runs a file; returns its outcome, and whether the interpreter survived it."""
    assert self._process.stdin is not None and self._process.stdout is not None
    began = time.monotonic()
    # SIGABRT prints the tracebacks of all threads.
    stop = threading.Timer(hang_seconds, self._process.send_signal, (signal.SIGABRT,))
    stop.start()
    with tempfile.TemporaryDirectory(prefix="test_output_") as folder:
      output = pathlib.Path(folder, "output")
      request = {"path": str(path.resolve()), "output": str(output)}
      try:
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
      except BrokenPipeError:
        answer = ""
      finally:
        stop.cancel()
      text = output.read_text(errors="replace") if output.exists() else ""
    seconds = time.monotonic() - began
    if not answer:
      code = self._process.wait()
      text += f"\nThe interpreter that ran {path} ended with code {code}."
      if seconds >= hang_seconds:
        text += f"\n{path} was stopped, because it had not ended after {hang_seconds:g} s."
      return Outcome(path, 0, 1, 0, text, seconds), False
    found = json.loads(answer)
    return Outcome(path, found["ran"], found["failed"], found["skipped"], text, seconds), True

  def close(self) -> None:
    """Ends the process."""
    assert self._process.stdin is not None and self._process.stdout is not None
    self._process.stdin.close()
    self._process.stdout.close()
    self._process.wait()


class _SharedRun:
  """Test files that interpreters take one by one, each those of its own number of devices first."""

  def __init__(self, files: Sequence[pathlib.Path], hang_seconds: float):
    self._hang_seconds = hang_seconds
    self._lock = threading.Lock()
    self._pending: dict[int, collections.deque[pathlib.Path]] = collections.defaultdict(
        collections.deque
    )
    for path in files:
      found = _DEVICES.search(path.read_text())
      self._pending[int(found[1]) if found else 1].append(path)
    # How many interpreters run the files of each number of devices.
    self._serving: collections.Counter[int] = collections.Counter()
    self._outcomes: queue.Queue[Outcome | BaseException] = queue.Queue()
    self._num_files = len(files)

  def outcomes(self, jobs: int) -> Iterator[Outcome]:
    """Yields the outcome of each file as it is known."""
    for _ in range(jobs):
      threading.Thread(target=self._serve, daemon=True).start()
    for _ in range(self._num_files):
      outcome = self._outcomes.get()
      if isinstance(outcome, BaseException):
        raise outcome
      yield outcome

  def _serve(self) -> None:
    try:
      interpreter: _Interpreter | None = None
      devices: int | None = None
      while (taken := self._take(devices)) is not None:
        devices, path = taken
        if interpreter is not None and interpreter.devices != devices:
          interpreter.close()
          interpreter = None
        interpreter = interpreter or _Interpreter(devices)
        outcome, alive = interpreter.run(path, self._hang_seconds)
        if not alive:
          interpreter = None
        self._outcomes.put(outcome)
      if interpreter is not None:
        interpreter.close()
    except BaseException as error:
      self._outcomes.put(error)

  def _take(self, devices: int | None) -> tuple[int, pathlib.Path] | None:
    """Returns a pending file and its number of devices, if possible the number given."""
    with self._lock:
      pending = {n: files for n, files in self._pending.items() if files}
      if not pending:
        return None
      if devices not in pending:
        if devices is not None:
          self._serving[devices] -= 1
        # Interpreters begin with different groups, so that no group is left for one of them alone.
        devices = min(pending, key=lambda n: (self._serving[n], -len(pending[n])))
        self._serving[devices] += 1
      return devices, pending[devices].popleft()


def _run_each_alone(
    files: Sequence[pathlib.Path], jobs: int, hang_seconds: float
) -> Iterator[Outcome]:
  with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
    running = [pool.submit(_run_alone, path, hang_seconds) for path in files]
    try:
      for done in concurrent.futures.as_completed(running):
        yield done.result()
    except BaseException:  # An interrupt does not reach the files: each leads a group of its own.
      pool.shutdown(wait=False, cancel_futures=True)
      for group in tuple(_RUNNING):
        _end_group(group)
      raise


def main() -> int:
  """Runs the files that the command line names; returns the exit code."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("paths", nargs="*", default=["tests"], help="test files or folders")
  parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count() or 1, help="files at a time")
  parser.add_argument(
      "--share",
      action="store_true",
      help="first run the files that start no process, in as many shared interpreters as jobs",
  )
  parser.add_argument(
      "--fast", action="store_true", help="like --share, but leave out files that start processes"
  )
  parser.add_argument(
      "--leave-out", action="append", default=[], help="folder of files not to run; may be repeated"
  )
  parser.add_argument(
      "--hang-seconds",
      type=float,
      default=900,
      help="stop a file after this many seconds (default: %(default)s)",
  )
  parser.add_argument(
      "--retries",
      type=int,
      default=int(os.environ.get("TEST_RETRIES", 0)),
      help="how often to run a file again that failed (default: TEST_RETRIES, or %(default)s)",
  )
  args = parser.parse_args()
  files: list[pathlib.Path] = []
  for path in map(pathlib.Path, args.paths):
    files += sorted(path.rglob("*_test.py")) if path.is_dir() else [path]
  left_out = [pathlib.Path(path) for path in args.leave_out]
  files = [path for path in files if not any(path.is_relative_to(folder) for folder in left_out)]
  shared: list[pathlib.Path] = []
  alone = files
  if args.fast or args.share:
    alone = [path for path in files if _STARTS_PROCESSES.search(path.read_text())]
    shared = [path for path in files if path not in alone]
  if args.fast:
    print(f"{len(alone)} of {len(files)} test files start processes: left out.")
    alone = []
  outcomes = itertools.chain(
      _SharedRun(shared, args.hang_seconds).outcomes(args.jobs),
      _run_each_alone(alone, args.jobs, args.hang_seconds),
  )
  done = {outcome.path: outcome for outcome in map(_show, outcomes)}
  unstable: list[pathlib.Path] = []
  for path in [path for path, outcome in done.items() if outcome.num_failed]:
    for _ in range(args.retries):
      print(f"Running {path} again, alone.", flush=True)
      done[path] = _show(_run_alone(path, args.hang_seconds))
      if not done[path].num_failed:
        unstable.append(path)
        break
  _summarize(list(done.values()), unstable)
  passed = sum(outcome.num_passed for outcome in done.values())
  failed = sum(outcome.num_failed for outcome in done.values())
  skipped = sum(outcome.skipped for outcome in done.values())
  print(f"\n{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
  return 1 if failed or not passed else 0


def _show(outcome: Outcome) -> Outcome:
  """Prints the outcome of a file, with its output if it failed."""
  word = "FAILED" if outcome.num_failed else "ok"
  print(f"{word:>6}  {outcome.ran:4d} tests {outcome.seconds:6.1f} s  {outcome.path}", flush=True)
  if outcome.num_failed:
    print(outcome.output, flush=True)
  return outcome


def _summarize(done: Sequence[Outcome], unstable: Sequence[pathlib.Path]) -> None:
  slowest = sorted(done, key=lambda outcome: -outcome.seconds)[:_NUM_SLOWEST]
  print(f"\nThe {len(slowest)} slowest files:")
  for outcome in slowest:
    print(f"{outcome.seconds:8.1f} s  {outcome.path}")
  if unstable:
    print("\nUNSTABLE, as they failed once and then passed alone:")
    for path in unstable:
      print(f"  {path}")


if __name__ == "__main__":
  sys.exit(main())
