"""Tests of how the failure of one process ends the others, with real processes."""

from __future__ import annotations

import subprocess
import sys

from absl.testing import absltest

from maxtext_olmo.trainers import failure
from tests import distributed

STARTS_PROCESSES = True

# One of two processes; without `failure`, the other would wait forever for one that fails.
_PROCESS = """
import sys, threading, time
from absl import logging
from jax._src import distributed
from maxtext_olmo.trainers import cluster, failure
cluster.connect(sys.argv[1], 2, int(sys.argv[2]))
failure.watch()
failure.watch()
removed = lambda: sys.stderr.write("not any more\\n")
failure.add_cleanup(removed)
failure.add_cleanup(lambda: sys.stderr.write("cleaned up\\n"))
failure.add_cleanup(lambda: 1 / 0)
failure.remove_cleanup(removed)
failure.remove_cleanup(removed)
if sys.argv[2] in sys.argv[3]:
  failure.end(f"WriteError: no space for process {sys.argv[2]}", 7)
if sys.argv[3] == "unreadable":
  if sys.argv[2] == "0":
    distributed.global_state.client.key_value_set("maxtext_olmo/failure", "not JSON")
  [thread.join() for thread in threading.enumerate() if thread.name == "olmo-failure"]
  sys.exit()
time.sleep(0.5 if sys.argv[3] == "none" else 3600)
"""


def _run(failing: str) -> list[tuple[int, str]]:
  """Returns the exit code and the log of each process."""
  address = f"127.0.0.1:{distributed.free_port()}"
  children = [
      subprocess.Popen(
          [sys.executable, "-c", _PROCESS, address, str(process), failing],
          env=distributed.child_environment(),
          stdin=subprocess.DEVNULL,
          stderr=subprocess.PIPE,
          text=True,
      )
      for process in range(2)
  ]
  logs = [child.communicate()[1] for child in children]
  return [(child.returncode, log) for child, log in zip(children, logs)]


class FailureTest(absltest.TestCase):

  def test_a_failing_process_ends_the_others_which_log_the_reason(self):
    for process in ("0", "1"):
      ends = _run(process)
      self.assertEqual([code for code, _ in ends], [7, 7], ends)
      other = ends[1 - int(process)][1]
      self.assertIn(
          f"Process {process} of 2 failed, so all processes stop: WriteError: no space for process"
          f" {process}",
          other,
      )

  def test_a_process_that_can_no_longer_watch_says_so_once(self):
    for process, (code, log) in enumerate(_run("unreadable")):
      self.assertEqual(code, 0, log)
      self.assertEqual(log.count(f"Process {process} of 2 no longer watches for failures"), 1, log)

  def test_processes_that_fail_together_all_end(self):
    ends = _run("01")
    self.assertEqual([code for code, _ in ends], [7, 7], ends)

  def test_all_processes_clean_up_before_an_immediate_exit(self):
    for code, log in _run("1"):
      self.assertEqual(code, 7)
      self.assertIn("cleaned up\n", log)
      self.assertNotIn("not any more", log)

  def test_an_ordinary_end_is_not_disturbed(self):
    self.assertEqual([code for code, _ in _run("none")], [0, 0])

  def test_a_single_process_continues(self):
    failure.watch()
    failure.end("there is no other process", 7)


if __name__ == "__main__":
  absltest.main()
