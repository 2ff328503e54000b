"""Tests of compiling in the background."""

import threading

from absl.testing import absltest

from maxtext_olmo import compiled
from tests import distributed

STARTS_PROCESSES = True

_FORK = """
import os, sys, threading
from maxtext_olmo import compiled
began, go_on = threading.Event(), threading.Event()
def build():
  began.set()
  go_on.wait()
  return "code"
first = compiled.Background(build, after=1, what="First")
second = compiled.Background(lambda: "more", after=1, what="Second")
if {ready}:
  go_on.set()
  first.wait()
else:
  first.get(1)
  first.get(1)
  began.wait()
child = os.fork()
if child == 0:
  print(first.wait(), second.wait(), flush=True)
  os._exit(0)
os.waitpid(child, 0)
go_on.set()
print(first.wait(), second.wait())
"""


class BackgroundTest(absltest.TestCase):

  def test_it_compiles_once_there_is_enough_work(self):
    made = []
    background = compiled.Background(lambda: made.append(1) or "code", after=10, what="It")
    for _ in range(4):
      self.assertIsNone(background.get(3))
    self.assertEmpty(made)
    background.get(3)
    self.assertTrue(background.wait())
    self.assertEqual(background.get(3), "code")
    self.assertEqual(made, [1])

  def test_a_single_task_does_not_start_compiling(self):
    go_on = threading.Event()
    background = compiled.Background(lambda: go_on.wait() and "code", after=1, what="A task")

    def compiling():
      return "compile A task" in {thread.name for thread in threading.enumerate()}

    self.assertIsNone(background.get(1_000_000))
    self.assertFalse(compiling())
    self.assertIsNone(background.get(1))
    self.assertTrue(compiling())
    go_on.set()
    self.assertTrue(background.wait())

  def test_callers_do_not_wait_while_it_compiles(self):
    go_on = threading.Event()
    background = compiled.Background(lambda: go_on.wait() and "code", after=1, what="It")
    self.assertIsNone(background.get(1))
    self.assertIsNone(background.get(1))
    self.assertIsNone(background.get(1))
    go_on.set()
    self.assertTrue(background.wait())

  def test_a_failed_compilation_is_logged_and_tried_once(self):
    tried = []

    def build():
      tried.append(1)
      raise ValueError("no such thing")

    background = compiled.Background(build, after=1, what="It")
    with self.assertLogs(level="WARNING") as logs:
      self.assertFalse(background.wait())
    self.assertIn(
        "It continues to use NumPy: numba failed: ValueError('no such thing')", logs.output[0]
    )
    self.assertIsNone(background.get(5))
    self.assertEqual(tried, [1])

  def test_an_unavailable_compilation_is_not_a_failure(self):
    with self.assertNoLogs(level="WARNING"):
      self.assertFalse(compiled.Background(lambda: None, after=1, what="It").wait())

  def test_a_child_has_what_was_ready_and_compiles_the_rest(self):
    done = distributed.run_python(_FORK.format(ready=True))
    self.assertEqual(done.stdout, "True True\nTrue True\n", done.stderr)

  def test_a_child_forked_while_something_compiles_begins_nothing(self):
    done = distributed.run_python(_FORK.format(ready=False))
    self.assertEqual(done.stdout, "False False\nTrue True\n", done.stderr)


if __name__ == "__main__":
  absltest.main()
