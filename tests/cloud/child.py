"""A trainer in a process of its own, to be killed: `python -m tests.cloud.child JOB`.

The job is JSON: `config` (keys of the config), `steps` (how many to take), `seconds` (of each step)
and `output`. After each step it appends a line to `output`: the step, a hash of its batch, and the
state after it. It continues from the last complete line, as a trainer does from a checkpoint.
"""

import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from tests import distributed


def hash_of(batch: Mapping[str, Any]) -> str:
  """Returns a hash of all arrays of a batch."""
  import numpy as np

  digest = hashlib.sha256()
  for name in sorted(batch):
    digest.update(np.ascontiguousarray(np.asarray(batch[name])).tobytes())
  return digest.hexdigest()


def start(job: Mapping[str, Any]) -> subprocess.Popen[bytes]:
  """Starts a trainer; what it prints goes to `output` with `.log` after it."""
  with open(f"{job['output']}.log", "ab") as log:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.cloud.child", json.dumps(job)],
        env=distributed.child_environment(),
        stdout=log,
        stderr=log,
    )


def lines_of(output: str) -> list[dict[str, Any]]:
  """Returns the complete lines that a trainer has written so far."""
  path = pathlib.Path(output)
  text = path.read_text() if path.exists() else ""
  return [json.loads(line) for line in text.split("\n")[:-1]]


def wait_for(child: subprocess.Popen[bytes], output: str) -> None:
  """Waits for a trainer to end; raises an error with its log if it failed."""
  if child.wait() != 0:
    raise AssertionError(pathlib.Path(f"{output}.log").read_text(errors="replace")[-5000:])


def kill_after(child: subprocess.Popen[bytes], output: str, lines: int) -> None:
  """Waits until a trainer has taken some steps, and kills it."""
  while len(lines_of(output)) < lines:
    if child.poll() is not None:
      raise AssertionError(pathlib.Path(f"{output}.log").read_text(errors="replace")[-5000:])
    time.sleep(0.02)
  child.send_signal(signal.SIGKILL)
  child.wait()


def main(job: Mapping[str, Any]) -> None:
  """Takes the steps of a job that are left."""
  import jax

  jax.config.update("jax_num_cpu_devices", 1)
  import maxtext_olmo
  from tests.loader import cases

  iterator, _ = maxtext_olmo.create_data_iterator(
      cases.data_config(**job["config"]), cases.device_mesh()
  )
  done = lines_of(job["output"])
  if done:
    iterator.set_state(done[-1]["state"])
  # A killed process may leave half a line.
  kept = "".join(json.dumps(line) + "\n" for line in done)
  pathlib.Path(job["output"]).write_text(kept)
  with open(job["output"], "a", encoding="utf-8") as file:
    for step in range(len(done), job["steps"]):
      time.sleep(job.get("seconds", 0.0))
      line = {"step": step, "hash": hash_of(next(iterator)), "state": iterator.get_state()}
      file.write(json.dumps(line) + "\n")
      file.flush()
      os.fsync(file.fileno())
  iterator.close()


if __name__ == "__main__":
  main(json.loads(sys.argv[1]))
