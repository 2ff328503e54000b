"""Tests of `maxtext-olmo inspect --serve` as a process, which prints its address."""

import os
import signal
import subprocess
import sys
import tempfile
import urllib.request

from absl.testing import absltest

from tests.cli import runner
from tests.inspection import small_run
from tests.loader import cases

STARTS_PROCESSES = True


class InspectServeTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cases.compile_fast()
    directory = cls.enterClassContext(tempfile.TemporaryDirectory(prefix="inspect_serve_test_"))
    cls.run_of = small_run.write(directory)

  def test_it_prints_its_address_and_ends_on_ctrl_c(self):
    command = [sys.executable, "-m", "maxtext_olmo", "inspect", self.run_of.checkpoints, "--serve"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    # A shell may have made this process ignore interrupts, which the child would inherit.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    self.addCleanup(signal.signal, signal.SIGINT, before)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
      try:
        self.assertIn("press Ctrl-C to stop", process.stdout.readline())
        address = process.stdout.readline().rstrip("\n")
        self.assertRegex(address, r"^http://127\.0\.0\.1:\d+/\S+/$")
        with urllib.request.urlopen(address + "step?n=3") as answer:
          self.assertIn("Step 3", answer.read().decode())
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.stdout.read(), "")
        self.assertEqual(process.wait(), 0)
      finally:
        process.kill()

  def test_it_shows_one_run_and_all_of_it(self):
    for other in (["--step", "3"], ["--json"], ["--find", "a"], [self.run_of.checkpoints]):
      code, _, err = runner.run("inspect", self.run_of.checkpoints, *other, "--serve")
      self.assertEqual(code, 2)
      self.assertIn("--serve shows everything about one run", err)


if __name__ == "__main__":
  absltest.main()
