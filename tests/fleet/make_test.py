"""Tests of making a corpus while workers and drivers are killed, and on every engine."""

import importlib.util
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from absl.testing import absltest

from tests import distributed
from tests import texts

STARTS_PROCESSES = True

_CHARACTERS = 16_000_000  # Eight units at least, each of which takes a while to tokenize.


def _children(pid: int) -> list[int]:
  """Returns the worker processes of a driver."""
  found = []
  for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
    try:
      parent = int(stat.read_text().rpartition(")")[2].split()[1])
      command = (stat.parent / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
      continue  # It ended meanwhile.
    if parent == pid and b"spawn_main" in command:
      found.append(int(stat.parent.name))
  return found


class MakeTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="fleet_make_"))
    cls.addClassCleanup(shutil.rmtree, cls.folder)
    cls.tokenizer = texts.save_tokenizer(cls.folder / "words")
    texts.write_texts(cls.folder / "text", _CHARACTERS)
    cls().run_command(cls.folder / "reference", "--workers", 1)
    cls.expected = texts.read_tree(cls.folder / "reference")

  def setUp(self):
    super().setUp()
    self.out = pathlib.Path(self.create_tempdir().full_path) / "out"

  def start(self, out, *options):
    command = (
        *(sys.executable, "-m", "maxtext_olmo", "corpus", "make", "--output", out),
        *("--tokenizer", self.tokenizer, "--tokens-per-file", 200_000, "--separator", "##"),
        *(f"web={self.folder}/text/*.jsonl*", f"books={self.folder}/text/*.txt"),
    )
    return subprocess.Popen(
        [str(word) for word in (*command, *options)],
        env=distributed.child_environment({}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # A shell may have made this process ignore interrupts, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )

  def run_command(self, out, *options):
    process = self.start(out, *options)
    output, _ = process.communicate()
    self.assertEqual(process.returncode, 0, output)
    return output

  def finished(self):
    """Returns the results of the units that were tokenized."""
    return {path.name for path in self.out.with_name("out.work").glob("tokenize-*/*.ok")}

  def wait_for_units(self, process, count):
    """Waits until a number of units are tokenized; fails if the command ends before."""
    while len(self.finished()) < count:
      self.assertIsNone(process.poll(), "The command ended before it could be killed.")
      time.sleep(0.005)

  def check_corpus(self):
    self.assertEqual(texts.read_tree(self.out), self.expected)
    self.assertFalse(self.out.with_name("out.work").exists())

  def test_a_killed_driver_costs_only_the_units_in_hand(self):
    done = set()
    for workers in (2, 1):
      process = self.start(self.out, "--workers", workers)
      self.wait_for_units(process, len(done) + 1)
      os.killpg(process.pid, signal.SIGKILL)
      process.communicate()
      self.assertLessEqual(done, self.finished())
      done = self.finished()
      self.assertFalse((self.out / "mix.txt").exists())
    times = self._times()
    process = self.start(self.out, "--workers", 3)
    # While it runs, the results from before the kill stay as they were.
    self.wait_for_units(process, len(done) + 1)
    self.assertLessEqual(times.items(), self._times().items())
    output, _ = process.communicate()
    self.assertEqual(process.returncode, 0, output)
    self.check_corpus()

  def _times(self):
    folder = self.out.with_name("out.work")
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("tokenize-*/*.ok")}

  def test_a_killed_worker_costs_only_the_units_in_hand(self):
    process = self.start(self.out, "--workers", 2)
    self.wait_for_units(process, 1)
    workers = _children(process.pid)
    self.assertNotEmpty(workers)
    os.kill(workers[0], signal.SIGKILL)
    output, _ = process.communicate()
    self.assertEqual(process.returncode, 0, output)
    self.check_corpus()

  def test_a_command_killed_while_it_writes_continues(self):
    complete = True
    while complete:  # On a busy machine, the kill may come too late.
      shutil.rmtree(self.out, ignore_errors=True)
      process = self.start(self.out, "--workers", 2)
      while process.poll() is None and not list(self.out.rglob("part-00001.npy")):
        time.sleep(0.001)
      os.killpg(process.pid, signal.SIGKILL)
      process.communicate()
      complete = (self.out / "mix.txt").exists()
    self.run_command(self.out, "--workers", 3)
    self.check_corpus()
    self.assertEmpty(list(self.out.glob(".*")))

  def test_an_interrupt_keeps_the_tokenized_units(self):
    process = self.start(self.out, "--workers", 2)
    self.wait_for_units(process, 2)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate()
    self.assertEqual(process.returncode, 130, output)
    self.assertNotIn("Traceback", output)
    self.assertFalse(self.out.exists())
    self.assertGreaterEqual(len(self.finished()), 2)
    self.run_command(self.out)
    self.check_corpus()

  @absltest.skipIf(importlib.util.find_spec("distributed") is None, "Dask is not installed")
  def test_dask_makes_the_same_corpus(self):
    self.run_command(self.out, "--dask", "local", "--workers", 2)
    self.check_corpus()


if __name__ == "__main__":
  absltest.main()
