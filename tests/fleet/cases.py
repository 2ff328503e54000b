"""The parts of the fleet tests: a corpus, drivers in processes of their own, and clusters."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from typing import Any
from unittest import mock

from absl.testing import parameterized

from tests.corpus.work import sample_work
from tests.fleet import driver

ROOT = pathlib.Path(__file__).resolve().parents[2]
HAS_DASK = importlib.util.find_spec("distributed") is not None
HAS_RAY = importlib.util.find_spec("ray") is not None
# Small and large files, one of which is empty: 22 pieces.
SIZES = (1000, 0, 6000, 7, 3000)
_RAY_TOKEN = uuid.uuid4().hex


def environment() -> dict[str, str]:
  """Returns the environment of all processes that tests start."""
  found = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "RAY_DEDUP_LOGS": "0"}
  # With the first setting, Ray listens on loopback only. Without the others, its clusters would use
  # a token in the home directory, and write one there.
  ray = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}
  return {**found, **ray, "RAY_AUTH_TOKEN": _RAY_TOKEN}


class FleetTestCase(parameterized.TestCase):
  """A corpus, and drivers that work on it."""

  def setUp(self):
    super().setUp()
    self.directory = self.create_tempdir().full_path
    self.trace = self.create_tempdir().full_path
    self.index = sample_work.write_corpus(self.directory, SIZES)
    self.pieces = sample_work.pieces(self.index)
    self.results = os.path.join(self.create_tempdir().full_path, "shared")
    self._numbers = itertools.count()

  def job(self, work: str | list[str], options: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Returns a job for the driver."""
    return {
        "index": os.path.join(self.directory, "index.json"),
        "work": work,
        "options": {"results": self.results, **options},
        "settings": {"trace": self.trace} | settings,
        "output": os.path.join(self.directory, f"output-{next(self._numbers)}.json"),
    }

  def expected(self, work: str | list[str]) -> dict[str, Any]:
    """Returns what one thread of this process finds, as a driver would write it."""
    job = self.job(work, {"workers": 1, "results": self.results + ".expected"}, trace="")
    found: dict[str, Any] = json.loads(json.dumps(driver.do_job(job)))
    return found

  def start(self, job: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Starts a driver in a process group of its own."""
    path = pathlib.Path(job["output"] + ".job")
    path.write_text(json.dumps(job))
    with open(job["output"] + ".log", "wb") as log:
      process = subprocess.Popen(
          [sys.executable, "-m", "tests.fleet.driver", str(path)],
          cwd=ROOT,
          env=environment(),
          stdout=log,
          stderr=log,
          start_new_session=True,
      )
    self.addCleanup(kill_group, process)
    return process

  def finish(self, process: subprocess.Popen[bytes], job: dict[str, Any]) -> dict[str, Any]:
    """Waits for a driver, and returns what it found."""
    process.wait()
    log = pathlib.Path(job["output"] + ".log").read_text()
    self.assertEqual(process.returncode, 0, log)
    found: dict[str, Any] = json.loads(pathlib.Path(job["output"]).read_text())
    return found

  def run_job(self, job: dict[str, Any]) -> dict[str, Any]:
    """Runs a driver to its end."""
    return self.finish(self.start(job), job)

  def wait_for_item(self, key: str) -> int:
    """Waits until a worker has begun an item, and returns its process id."""
    return sample_work.wait_for(
        lambda: sample_work.processes(self.trace, key), f"the start of item {key}"
    )[0]

  def let_items_end(self) -> None:
    """Lets waiting items finish."""
    pathlib.Path(self.trace, "open").touch()

  def finished(self) -> set[str]:
    """Returns the keys of the items that have results."""
    found = pathlib.Path(self.results).glob("*/*.ok")
    return {path.name.partition("@")[0] for path in found}

  def dask_cluster(self, workers: int = 2) -> DaskCluster:
    """Starts a scheduler and workers, and stops them at the end of the test."""
    return self.enter_context(DaskCluster.start(self.create_tempdir().full_path, workers))


class DaskCluster:
  """A Dask scheduler and workers in processes of their own.

  Attributes:
    address: Address of the scheduler.
    processes: The scheduler and the workers' parent.
  """

  def __init__(self, address: str, processes: list[subprocess.Popen[bytes]]):
    self.address = address
    self.processes = processes

  @classmethod
  @contextlib.contextmanager
  def start(cls, directory: str, workers: int) -> Iterator[DaskCluster]:
    """Starts a cluster in a directory, and kills all of it at the end."""
    file = os.path.join(directory, "scheduler.json")
    dask = [sys.executable, "-m", "dask"]
    scheduler = ["scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard"]
    started = []
    with open(os.path.join(directory, "log"), "wb") as log:
      settings = {"env": environment(), "cwd": directory, "start_new_session": True}
      settings |= {"stdout": log, "stderr": log}
      try:
        started.append(subprocess.Popen([*dask, *scheduler, "--scheduler-file", file], **settings))
        sample_work.wait_for(lambda: _address(file), "the start of the scheduler")
        worker = ["worker", "--scheduler-file", file, "--nworkers", str(workers)]
        worker += ["--nthreads", "1", "--no-dashboard", "--local-directory", directory]
        started.append(subprocess.Popen([*dask, *worker], **settings))
        yield cls(_address(file), started)
      finally:
        for process in started:
          kill_group(process)

  def kill(self) -> None:
    """Kills the scheduler and all workers at once."""
    for process in self.processes:
      kill_group(process)


@contextlib.contextmanager
def ray_head() -> Iterator[str]:
  """Starts the head of a Ray cluster with two CPUs, which `auto` finds; yields its address."""
  # A short path, because Ray adds 80 characters to get the names of its sockets.
  with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as directory:
    command = (
        *(os.path.join(os.path.dirname(sys.executable), "ray"), "start", "--head", "--block"),
        *("--node-ip-address", "127.0.0.1", "--port", "0", "--dashboard-agent-listen-port", "0"),
        *("--num-cpus", "2", "--include-dashboard", "false", "--disable-usage-stats"),
    )
    with (
        mock.patch.dict(os.environ, {"RAY_TMPDIR": directory}),
        open(os.path.join(directory, "log"), "wb") as log,
    ):
      head = subprocess.Popen(
          command, env=environment(), stdout=log, stderr=log, start_new_session=True
      )
      try:
        file = pathlib.Path(directory, "ray", "ray_current_cluster")
        yield sample_work.wait_for(
            lambda: file.exists() and file.read_text().strip(), "the start of Ray"
        )
      finally:
        kill_group(head)


def _address(file: str) -> str:
  try:
    return json.loads(pathlib.Path(file).read_text())["address"]
  except (OSError, ValueError):
    return ""


def kill_group(process: subprocess.Popen[bytes]) -> None:
  """Kills a process and all others of its group."""
  with contextlib.suppress(ProcessLookupError):
    os.killpg(process.pid, signal.SIGKILL)
  process.wait()


def is_running(pid: int) -> bool:
  """Returns whether a process exists and is not a zombie."""
  try:
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
  except FileNotFoundError:
    return False
