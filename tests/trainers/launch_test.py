"""Tests of maxtext_olmo.trainers.launch: real processes, really killed."""

from __future__ import annotations

import io
import os
import pathlib
import signal
import subprocess
import sys
import time

from absl.testing import absltest

from maxtext_olmo.loader import resume
from maxtext_olmo.trainers import RESTART_CODE
from maxtext_olmo.trainers import launch
from tests import distributed
from tests.trainers import launched
from tests.trainers.tiny import train_cases as cases

STARTS_PROCESSES = True


def _is_alive(pid: int) -> bool:
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  return True


class LaunchTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)
    self.env = distributed.child_environment(
        {
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "JAX_COMPILATION_CACHE_DIR": str(self.dir.parent / "compilation_cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
    )

  def test_a_killed_process_ends_the_run_and_a_single_one_resumes_it(self):
    where = str(self.dir / "checkpoints")
    output = io.StringIO()
    run = launch.LocalRun(
        launched.flags(steps=100_000, checkpoint_dir=where),
        processes=2,
        env=self.env,
        output=output,
    )
    self.addCleanup(run.stop)
    while run.running and resume.latest_committed_step(where) is None:
      time.sleep(0.05)
    os.kill(run.pids[1], signal.SIGKILL)
    outcome = run.wait()
    self.assertEqual(outcome.code, 128 + signal.SIGKILL, output.getvalue())
    self.assertIn(f"process 1 (pid {run.pids[1]}) was ended by SIGKILL", outcome.reason)
    self.assertFalse(any(_is_alive(pid) for pid in run.pids))
    self.assertIn("[0] mesh: data=2 x fsdp=1 over 2 devices of 2 processes", output.getvalue())
    self.assertNotIn("[Gloo]", output.getvalue())

    label = resume.latest_committed_step(where)
    config = cases.make_config(steps=100_000)
    straight = cases.run(config, stop_after=label + 2)
    config.checkpoint_dir = where
    resumed = cases.run(config, stop_after=label + 2)
    self.assertEqual(min(resumed.rows), label + 1)
    for step in (label + 1, label + 2):
      self.assertEqual(resumed.rows[step], straight.rows[step])
      self.assertAlmostEqual(resumed.losses[step], straight.losses[step], delta=1e-3)

  def test_a_second_run_in_the_same_directory_is_refused_and_the_first_continues(self):
    where = str(self.dir / "checkpoints")
    flags = launched.flags(steps=100_000, checkpoint_dir=where)
    first = launched.start(self, flags)
    while first.poll() is None and resume.latest_committed_step(where) is None:
      time.sleep(0.05)
    second = launched.start(self, flags)
    output = second.communicate()[1]
    self.assertEqual(second.returncode, 2, output)
    self.assertRegex(output, rf"ConfigError: .* is in use by process {first.pid} on \S+, started")
    step = resume.latest_committed_step(where)
    while first.poll() is None and resume.latest_committed_step(where) == step:
      time.sleep(0.05)
    self.assertIsNone(first.poll())

  def test_a_successful_run_has_code_0(self):
    done = self.launch("--processes=2", "--", *launched.flags(steps=2))
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertRegex(done.stderr, r"\[0\] step     1  loss ")
    self.assertNotIn("launch:", done.stderr)

  def test_an_error_is_passed_on_with_its_reason(self):
    done = self.launch("--processes=2", "--", "--config.stpes=1")
    self.assertEqual(done.returncode, 2)
    self.assertRegex(done.stderr, r"\[\d\] ERROR: ConfigError: The config has no key 'stpes'")
    self.assertRegex(done.stderr, r"\nlaunch: process \d \(pid \d+\) ended with code 2")

  def test_no_processes_is_an_error(self):
    done = self.launch("--processes=0", "--", "--config.steps=1")
    self.assertEqual(done.returncode, 2)
    self.assertIn("--processes=0 must be at least 1", done.stderr)

  def test_a_negative_grace_period_is_an_error(self):
    done = self.launch("--grace=-1", "--", "--config.steps=1")
    self.assertEqual(done.returncode, 2)
    self.assertIn("--grace=-1 must not be negative", done.stderr)

  def test_python_files_in_the_working_directory_are_never_executed(self):
    hostile = self.dir / "data"
    index = cases.write_counting_corpus(hostile)
    marker = self.dir / "executed"
    for name in ("xxhash", "numpy", "json", "pickle", "signal", "socket", "absl", "grain", "yaml"):
      (hostile / f"{name}.py").write_text(f"open({str(marker)!r}, 'a').write({name!r})\n")
    flags = launched.flags(
        dataset_type="olmo_grain", olmo_index_path=index, grain_worker_count=1, steps=2
    )
    done = subprocess.run(
        [sys.executable, "-P", "-m", launch.__name__, "--processes=1", "--", *flags],
        cwd=hostile,
        env=self.env,
        capture_output=True,
        text=True,
        check=False,
    )
    self.assertFalse(marker.exists(), done.stderr)
    self.assertEqual(done.returncode, 0, done.stderr)

  def test_ending_the_launcher_ends_its_processes(self):
    command = [sys.executable, "-m", "maxtext_olmo.trainers.launch", "--processes=2", "--"]
    flags = launched.flags(steps=100_000, metrics_file=str(self.dir / "metrics.jsonl"))
    launcher = subprocess.Popen([*command, *flags], env=self.env, stderr=subprocess.PIPE, text=True)
    self.addCleanup(launcher.stderr.close)
    while launcher.poll() is None and not (self.dir / "metrics.jsonl").exists():
      time.sleep(0.05)
    children = launched.children(launcher.pid)
    self.assertLen(children, 2)
    launcher.terminate()
    self.assertEqual(launcher.wait(), 128 + signal.SIGTERM)
    self.assertFalse(any(_is_alive(pid) for pid in children))

  def test_ending_the_launcher_saves_a_run_with_checkpoints_and_asks_for_a_restart(self):
    where = self.dir / "checkpoints"
    flags = launched.flags(steps=100_000, checkpoint_dir=str(where), checkpoint_period=100_000)
    launcher = self.start("--processes=2", "--", *flags)
    lines = self.read_until(launcher, "compiled and ran the first step")
    children = launched.children(launcher.pid)
    launcher.terminate()
    output = "".join(lines) + launcher.stderr.read()
    self.assertEqual(launcher.wait(), RESTART_CODE, output)
    self.assertRegex(output, r"\nlaunch: process \d \(pid \d+\) ended with code 75: start this run")
    self.assertFalse(any(_is_alive(pid) for pid in children))
    self.assertIsNotNone(resume.latest_committed_step(where))

  def test_processes_that_take_longer_than_the_grace_period_are_killed(self):
    where = self.dir / "checkpoints"
    flags = launched.flags(steps=100_000, checkpoint_dir=str(where))
    launcher = self.start("--processes=2", "--grace=0", "--", *flags)
    self.read_until(launcher, "compiled and ran the first step")
    children = launched.children(launcher.pid)
    for pid in children:
      os.kill(pid, signal.SIGSTOP)
    launcher.terminate()
    output = launcher.stderr.read()
    self.assertEqual(launcher.wait(), 128 + signal.SIGKILL, output)
    self.assertIn("launch: killed 2 processes that had not ended 0 s after SIGTERM", output)
    self.assertFalse(any(_is_alive(pid) for pid in children))

  def start(self, *args: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "maxtext_olmo.trainers.launch", *args]
    launcher = subprocess.Popen(command, env=self.env, stderr=subprocess.PIPE, text=True)
    self.addCleanup(launcher.stderr.close)
    self.addCleanup(launcher.terminate)
    return launcher

  def read_until(self, process: subprocess.Popen[str], text: str) -> list[str]:
    lines = [""]
    while text not in lines[-1]:
      lines.append(process.stderr.readline())
      self.assertNotEqual(lines[-1], "", lines)
    return lines

  def launch(self, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "maxtext_olmo.trainers.launch", *args],
        env=self.env,
        capture_output=True,
        text=True,
        check=False,
    )


if __name__ == "__main__":
  absltest.main()
