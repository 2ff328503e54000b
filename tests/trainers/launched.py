"""Starts the tiny trainer in processes of its own, for tests of what happens between processes."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence

from absl.testing import absltest

from tests import distributed
from tests.trainers.tiny import train_cases

TRAINER = "maxtext_olmo.trainers.tiny"


def flags(**changes: object) -> list[str]:
  """Returns the command line of a short run."""
  values = train_cases.make_config(**changes).items()
  return [f"--config.{name}={value}" for name, value in values if value is not None]


def start(
    test: absltest.TestCase,
    arguments: Sequence[str],
    env: Mapping[str, str] | None = None,
    module: str = TRAINER,
    stdout: int | None = None,
) -> subprocess.Popen[str]:
  """Starts a trainer, whose stderr can be read; the end of the test ends it."""
  variables = {
      "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
      "JAX_COMPILATION_CACHE_DIR": absltest.TEST_TMPDIR.value + "/compilation_cache",
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
      **(env or {}),
  }
  process = subprocess.Popen(
      [sys.executable, "-P", "-m", module, *arguments],
      env=distributed.child_environment(variables),
      stdin=subprocess.DEVNULL,
      stdout=stdout,
      stderr=subprocess.PIPE,
      text=True,
  )

  def stop() -> None:
    process.kill()
    process.wait()
    process.stderr.close()

  test.addCleanup(stop)
  return process


def children(pid: int) -> list[int]:
  """Returns the ids of the processes that a process has started and that still run."""
  found = []
  for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
    try:
      fields = re.sub(r"\(.*\)", "", path.read_text()).split()
    except OSError:
      continue
    if int(fields[2]) == pid:
      found.append(int(fields[0]))
  return found
