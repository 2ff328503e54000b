"""Tests of maxtext_olmo.trainers.preemption: real runs that get SIGTERM, with a ledger."""

from __future__ import annotations

import io
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

from absl.testing import absltest

from maxtext_olmo.cli import demo
from maxtext_olmo.loader import resume
from maxtext_olmo.trainers import RESTART_CODE
from maxtext_olmo.trainers import launch
from maxtext_olmo.trainers import preemption
from tests import distributed
from tests.trainers import launched
from tests.trainers.tiny import ledger

STARTS_PROCESSES = True


class SignalTest(absltest.TestCase):
  """What one process does, in this process."""

  def test_the_trainer_stops_after_a_step_that_follows_the_signal(self):
    with preemption.Preemption() as found:
      found.begin(7)
      self.assertFalse(found.should_stop(7))
      os.kill(os.getpid(), signal.SIGTERM)
      step = 8
      while not found.should_stop(step):
        step += 1
      self.assertTrue(found.should_stop(step + 1))
      found.finish()

  def test_without_a_signal_nothing_stops_and_the_old_handler_comes_back(self):
    before = signal.getsignal(signal.SIGTERM)
    with preemption.Preemption() as found:
      found.begin(0)
      self.assertFalse(any(map(found.should_stop, range(100))))
    self.assertEqual(signal.getsignal(signal.SIGTERM), before)

  def test_other_signals_are_left_alone(self):
    received = []
    old = signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
    self.addCleanup(signal.signal, signal.SIGUSR1, old)
    with preemption.Preemption() as found:
      found.begin(0)
      os.kill(os.getpid(), signal.SIGUSR1)
      self.assertFalse(any(map(found.should_stop, range(100))))
    self.assertEqual(received, [signal.SIGUSR1])


class RunTest(ledger.LedgerTestCase):

  def steps_in_ledger(self) -> int:
    return max(demo.read_ledger(self.attempts[-1][2]), default=-1) + 1

  def test_all_processes_save_after_the_same_step_and_the_ledger_is_exact(self):
    rng = random.Random(3)
    for who in ("one", "with workers"):
      run, output = self.start(rng, 1_000_000, workers=1 if who == "with workers" else None)
      count = rng.randrange(8, 60)
      self.wait_until(lambda count=count: self.lines() >= count, run, output)
      self.wait_until(lambda log=output: "compiled and ran" in log.getvalue(), run, output)
      chosen = [rng.choice(run.pids)] if who == "one" else run.pids
      if who == "with workers":  # As a scheduler does, which signals all processes of a task.
        workers = [pid for parent in chosen for pid in launched.children(parent)]
        self.assertNotEmpty(workers)
        chosen = workers + chosen
      for pid in chosen:
        os.kill(pid, signal.SIGTERM)
      outcome = run.wait()
      self.assertEqual(outcome.code, RESTART_CODE, output.getvalue())
      self.assertIn("start this run again", outcome.reason)
      # Nothing was trained that is not saved, and nothing saved that was not trained.
      self.assertEqual(self.steps_done(), self.steps_in_ledger(), output.getvalue())
      self.assertFalse(any(map(ledger.is_alive, run.pids)))
      self.assertIn(f"to continue with step {self.steps_done()}", output.getvalue())
    run, output = self.start(rng, steps=self.steps_done() + 60)
    self.assertEqual(run.wait().code, 0, output.getvalue())
    self.check_ledger()

  def test_a_signal_during_a_save_or_an_evaluation_loses_nothing(self):
    flags, env = self.prepare(
        1_000_000, size=8, eval_interval=2, eval_steps=0, olmo_eval_instances=40
    )
    output = io.StringIO()
    run = launch.LocalRun(flags, processes=2, module=demo.__name__, env=env, output=output)
    self.addCleanup(run.stop)
    self.wait_until(self.is_saving, run, output)
    os.kill(run.pids[1], signal.SIGTERM)
    self.assertEqual(run.wait().code, RESTART_CODE, output.getvalue())
    self.assertEqual(self.steps_done(), self.steps_in_ledger(), output.getvalue())

  def test_an_evaluation_after_the_last_step_is_neither_lost_nor_repeated(self):
    metrics = self.dir / "metrics.jsonl"
    keys = {"size": 8, "eval_interval": 1, "eval_steps": 2, "olmo_eval_instances": 40}
    for steps in (1_000_000, None):
      flags, env = self.prepare(steps or self.steps_done() + 3, metrics_file=str(metrics), **keys)
      output = io.StringIO()
      run = launch.LocalRun(flags, processes=2, module=demo.__name__, env=env, output=output)
      self.addCleanup(run.stop)
      if steps:
        self.wait_until(lambda: self.lines() >= 20, run, output)
        os.kill(run.pids[1], signal.SIGTERM)
      self.assertEqual(run.wait().code, RESTART_CODE if steps else 0, output.getvalue())
      lines = [json.loads(line) for line in metrics.read_text().splitlines()]
      self.assertEqual([line["step"] for line in lines], list(range(self.steps_done())))
      self.assertEqual([line["step"] for line in lines if "eval_loss" not in line], [])

  def test_a_second_signal_ends_a_run_that_does_not_get_to_its_next_step(self):
    flags, env = self.prepare(1_000_000, size=4)
    output = io.StringIO()
    at = 5
    run = launch.LocalRun(
        flags,
        processes=2,
        module=demo.__name__,
        env={**env, demo.PAUSE_VARIABLE: str(at)},  # It does not leave this step.
        output=output,
    )
    self.addCleanup(run.stop)
    self.wait_until(lambda: self.steps_in_ledger() > at, run, output)
    while run.running:
      os.kill(run.pids[0], signal.SIGTERM)
      time.sleep(0.5)
    self.assertEqual(run.wait().code, RESTART_CODE, output.getvalue())
    self.assertIn("a second SIGTERM", output.getvalue())
    self.assertLessEqual(self.steps_done(), at)

  def test_a_signal_before_the_first_step_ends_all_processes_at_once(self):
    flags, env = self.prepare(1_000_000, size=4)
    output = io.StringIO()
    run = launch.LocalRun(flags, processes=2, module=demo.__name__, env=env, output=output)
    self.addCleanup(run.stop)
    self.wait_until(lambda: "[0] mesh: " in output.getvalue(), run, output)
    os.kill(run.pids[1], signal.SIGTERM)
    self.assertEqual(run.wait().code, RESTART_CODE, output.getvalue())
    self.assertFalse((self.checkpoints / ".lease").exists())

  def test_a_signal_while_it_waits_for_other_processes_ends_the_process_at_once(self):
    flags, _ = self.prepare(10, size=4)
    address = f"127.0.0.1:{distributed.free_port()}"
    env = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}
    alone = launched.start(self, flags, env)
    read = []
    while "waiting for the others" not in "".join(read[-1:]):
      read.append(alone.stderr.readline())
      self.assertNotEqual(read[-1], "", read)
    alone.send_signal(signal.SIGTERM)
    self.assertEqual(alone.wait(), RESTART_CODE, alone.stderr.read())

  def test_without_checkpoints_the_process_ends_as_usual(self):
    metrics = self.dir / "metrics.jsonl"
    flags = launched.flags(steps=1_000_000, metrics_file=str(metrics))
    run = launched.start(self, flags)
    while run.poll() is None and not metrics.exists():
      time.sleep(0.05)
    run.send_signal(signal.SIGTERM)
    self.assertEqual(run.wait(), -signal.SIGTERM)

  def test_a_signal_after_the_last_step_does_not_change_the_exit_code(self):
    where = str(self.checkpoints)
    program = (
        "import os, signal, sys\n"
        "from maxtext_olmo.trainers.tiny import trainer\n"
        "def on_step(step, metrics):\n"
        "  if step == 3: os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.exit(trainer.main_from_argv(sys.argv, on_step=on_step))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *launched.flags(steps=4, checkpoint_dir=where)],
        env=self.env,
        capture_output=True,
        text=True,
        check=False,
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertEqual(resume.latest_committed_step(where), 3)
    self.assertNotIn("to continue with step", done.stderr)
    self.assertTrue(pathlib.Path(where, "3").is_dir())


if __name__ == "__main__":
  absltest.main()
