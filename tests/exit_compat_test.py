"""Tests of the hook for the interpreter's exit, and of what breaks without it."""

import threading

from absl.testing import absltest

from tests import distributed

STARTS_PROCESSES = True

# A thread of a pool that ends when it is told that the interpreter exits, or after a pause.
_WAIT_IN_A_POOL = """
import concurrent.futures, sys, threading
pool = concurrent.futures.ThreadPoolExecutor(1)
if sys.argv[1] == "without":
  del threading._register_atexit
from maxtext_olmo import exit_compat
exiting = threading.Event()
def tell():
  print("told", flush=True)
  exiting.set()
exit_compat.call_before_pools_are_joined(tell)
def wait():
  exiting.wait(None if sys.argv[1] == "with" else 0.5)
  print("ended", flush=True)
pool.submit(wait)
"""


class ExitCompatTest(absltest.TestCase):

  def test_python_has_the_hook(self):
    self.assertTrue(
        callable(getattr(threading, "_register_atexit", None)),
        "Without it, a process whose store does not answer exits only after all repetitions of its"
        " requests, which may take an hour: see maxtext_olmo/exit_compat.py.",
    )

  def test_a_thread_of_a_pool_is_told_before_it_is_waited_for(self):
    done = distributed.run_python(_WAIT_IN_A_POOL, "with")
    self.assertEqual((done.returncode, done.stdout), (0, "told\nended\n"), done.stderr)

  def test_without_the_hook_it_is_told_too_late(self):
    done = distributed.run_python(_WAIT_IN_A_POOL, "without")
    self.assertEqual((done.returncode, done.stdout), (0, "ended\ntold\n"), done.stderr)


if __name__ == "__main__":
  absltest.main()
