"""Writes that fail in the middle of a run end all of its processes, and a restart is exact."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import subprocess
import sys
import unittest
from typing import Any

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.loader import resume
from tests import distributed
from tests.hostile import faults
from tests.trainers import launched
from tests.trainers.tiny import failing_writes
from tests.trainers.tiny import train_cases

STARTS_PROCESSES = True

_STEPS = 12
_FAULT_STEP = 4  # Checkpoints are saved after every third step.
_ENDLESS = 1_000_000


class FailingWritesTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.shared = pathlib.Path(absltest.TEST_TMPDIR.value) / "failing_writes"
    cls.index = train_cases.write_counting_corpus(cls.shared / "corpus")
    library = faults.build(cls.shared)
    if library is None:
      raise unittest.SkipTest("faults need a C compiler")
    cls.library = library
    train_cases.compile_fast(str(cls.shared / "programs"))
    cls.reference = train_cases.run(cls.changes_of(steps=_STEPS))

  @classmethod
  def changes_of(cls, **changes: Any):
    return train_cases.make_config(
        dataset_type="olmo_grain",
        olmo_index_path=cls.index,
        mesh_shape=(-1, 1),
        **changes,
    )

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)
    self.options = {
        "checkpoint_dir": str(self.dir / "checkpoints"),
        "metrics_file": str(self.dir / "metrics.jsonl"),
    }

  def train(self, fault: dict[str, Any], **changes: Any) -> list[tuple[int, str]]:
    """Runs two processes to their end; returns the exit code and the log of each."""
    flags = launched.flags(**self.changes_of(**self.options, **changes))
    port = distributed.free_port()
    children = []
    for process in range(2):
      variables = {
          "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
          "JAX_COMPILATION_CACHE_DIR": str(self.shared / "programs"),
          "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
          "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
          "JAX_NUM_PROCESSES": "2",
          "JAX_PROCESS_ID": str(process),
          "LD_PRELOAD": str(self.library),
          failing_writes.FAULT: json.dumps(fault),
      }
      child = subprocess.Popen(
          [sys.executable, "-P", "-m", failing_writes.__name__, *flags],
          env=distributed.child_environment(variables),
          stdin=subprocess.DEVNULL,
          stdout=subprocess.DEVNULL,
          stderr=subprocess.PIPE,
          text=True,
      )
      self.addCleanup(child.kill)
      children.append(child)
    logs = [child.communicate()[1] for child in children]
    return [(child.returncode, log) for child, log in zip(children, logs)]

  def expect_restart_to_be_exact(self) -> None:
    recorder = train_cases.run(self.changes_of(**self.options, steps=_STEPS))
    first = min(recorder.rows)
    self.assertEqual(recorder.rows, {s: self.reference.rows[s] for s in range(first, _STEPS)})
    for step, loss in recorder.losses.items():
      self.assertAlmostEqual(loss, self.reference.losses[step], places=4)
    lines = pathlib.Path(self.options["metrics_file"]).read_text().splitlines()
    self.assertEqual([json.loads(line)["step"] for line in lines], list(range(_STEPS)))

  @parameterized.parameters(
      ("metrics.jsonl", 0, faults.WRITE, errno.ENOSPC, True, "metrics.jsonl"),
      ("checkpoints/*/state*", 1, faults.WRITE, errno.EDQUOT, True, "checkpoints"),
      ("checkpoints/*/state*", 0, faults.WRITE, errno.ENOSPC, False, "checkpoints"),
      ("checkpoints/*/data*", 0, faults.WRITE, errno.EDQUOT, True, "checkpoints"),
      ("checkpoints/[0-9]*", 0, faults.CREATE, errno.EROFS, True, "checkpoints"),
      ("checkpoints/.lease", 0, faults.OPEN, errno.EACCES, True, "checkpoints/.lease"),
  )
  def test_a_write_that_fails_ends_all_processes_with_its_error(
      self, pattern: str, process: int, operations: int, error: int, asynchronous: bool, named: str
  ):
    fault = {
        "step": _FAULT_STEP,
        "process": process,
        "operations": operations,
        "error": error,
        "pattern": str(self.dir / pattern),
    }
    ends = self.train(fault, steps=_ENDLESS, async_checkpointing=asynchronous)
    for code, log in ends:
      self.assertEqual(code, 2, log)
      self.assertIn(os.strerror(error), log)
      self.assertIn(str(self.dir / named), log)
    own, other = ends[process][1], ends[1 - process][1]
    self.assertRegex(own, "ERROR: (WriteError|ConfigError): ")
    self.assertRegex(other, rf"Process {process}( of 2)? failed.*so all processes stop: ")
    # The save after step 2 may still have been running.
    self.assertIn(resume.committed_steps(self.options["checkpoint_dir"]), ([], [2]))
    self.expect_restart_to_be_exact()

  def test_a_copy_of_the_index_that_cannot_be_written_stops_all_at_the_start(self):
    fault = {
        "step": failing_writes.AT_START,
        "process": 0,
        "operations": faults.CREATE,
        "error": errno.EACCES,
        "pattern": str(self.dir / "checkpoints/olmo_corpus*"),
    }
    for code, log in self.train(fault, steps=_STEPS):
      self.assertEqual(code, 2, log)
      self.assertRegex(log, "WriteError: Cannot write .*olmo_corpus.*Permission denied")
    self.expect_restart_to_be_exact()

  def test_a_history_and_a_config_that_cannot_be_written_are_only_a_warning(self):
    fault = {
        "step": failing_writes.AT_START,
        "process": 0,
        "operations": faults.CREATE,
        "error": errno.EROFS,
        "pattern": str(self.dir / "checkpoints/olmo_[hr]*"),
    }
    ends = self.train(fault, steps=_STEPS)
    self.assertEqual([code for code, _ in ends], [0, 0], ends)
    self.assertIn("The history of the run cannot be written", ends[0][1])
    self.assertIn("The config of this run cannot be kept", ends[0][1])
    self.assertEqual(resume.latest_committed_step(self.options["checkpoint_dir"]), _STEPS - 1)


if __name__ == "__main__":
  absltest.main()
