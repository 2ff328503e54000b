"""Tests of the threads that help to read a batch."""

import ctypes
import importlib.util
import os
import threading
import time
from unittest import mock

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.rows import crew
from maxtext_olmo.rows import inspection
from tests import distributed

STARTS_PROCESSES = True

_LENGTH = 100
_ROWS = 200

_IN_A_PROCESS = """
import os, sys
import numpy as np
from maxtext_olmo.rows import crew, inspection
crew._FEWEST_BYTES = 0
inspection.compile_reads(np.uint32)
kernel = inspection._compiled(4).ready
file = os.memfd_create("rows")
rows = np.arange(6400, dtype=np.uint32).reshape(64, 100)
os.pwrite(file, rows.tobytes(), 0)
def right(threads=3):
  found, highest, clean = np.zeros_like(rows), np.zeros(64, np.uint64), np.zeros(64, bool)
  helpers = kernel.crew.take_on(rows.nbytes, threads)
  post = kernel.crew.post(helpers)
  outcome = kernel.read(np.full(64, file, np.int32), np.arange(64) * 400, found, 1, 0, 1, highest, clean, post, helpers)
  kernel.crew.let_go(helpers)
  return outcome < 0 and helpers == threads - 1 and np.array_equal(found, rows)
"""


def _words():
  """The module that knows the words of a post; it needs numba."""
  from maxtext_olmo.rows import inspection_numba

  return inspection_numba


@absltest.skipUnless(importlib.util.find_spec("numba"), "numba is not installed")
class CrewTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    if not inspection.compile_reads(np.uint16):
      raise AssertionError("The compiled reads are not to be had.")
    cls.kernel = inspection._compiled(2).ready

  def setUp(self):
    super().setUp()
    self.enter_context(mock.patch.object(crew, "_FEWEST_BYTES", 0))
    self.crew = crew.Crew(self.kernel.crew._helped, np.dtype(np.uint16))
    self.addCleanup(self.crew._dismiss)
    rng = np.random.default_rng(0)
    self.rows = rng.integers(0, 5000, (_ROWS, _LENGTH)).astype(np.uint16)
    self.rows[::4, 20:80] = np.tile([3, 9], 30)
    self.file = os.memfd_create("rows")
    self.addCleanup(os.close, self.file)
    os.pwrite(self.file, self.rows.tobytes(), 0)

  def _read(self, ids, threads):
    """What a job gives: its outcome, the tokens, the highest ids, the verdicts, and how many helped."""
    tokens = np.zeros((len(ids), _LENGTH), np.uint16)
    highest, clean = np.zeros(len(ids), np.uint64), np.zeros(len(ids), np.bool_)
    descriptors = np.full(len(ids), self.file, np.int32)
    offsets = np.asarray(ids, np.int64) * _LENGTH * 2
    helpers = self.crew.take_on(tokens.nbytes, threads)
    post = self.crew.post(helpers)
    outcome = self.kernel.read(
        descriptors, offsets, tokens, 1, 13, 20, highest, clean, post, helpers
    )
    outcome = max(outcome, -1)  # Naps aside.
    self.crew.let_go(helpers)
    return outcome, tokens, highest, clean, helpers

  def _check(self, ids, threads):
    outcome, tokens, highest, clean, _ = self._read(ids, threads)
    expected = self.rows[ids]
    return (
        outcome == -1
        and np.array_equal(tokens, expected)
        and np.array_equal(highest, expected.max(axis=1))
        and np.array_equal(clean, ids % 4 != 0)
    )

  @parameterized.parameters(1, 2, 3, 5)
  def test_what_threads_read_together_is_what_one_reads(self, threads):
    rng = np.random.default_rng(threads)
    for _ in range(300):
      self.assertTrue(self._check(rng.integers(0, _ROWS, rng.integers(1, 150)), threads))

  def test_several_may_ask_at_once(self):
    right = []

    def ask(seed):
      rng = np.random.default_rng(seed)
      for _ in range(200):
        right.append(self._check(rng.integers(0, _ROWS, 64), int(rng.integers(1, 5))))

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    self.assertEqual(right, [True] * 800)

  def test_a_helper_reads_rows_by_itself(self):
    self.assertEqual(self.crew.take_on(1, 2), 1)
    post = self.crew.post(1)
    self.addCleanup(self.crew.let_go, 1)
    tokens = np.zeros((_ROWS, _LENGTH), np.uint16)
    highest, clean = np.zeros(_ROWS, np.uint64), np.zeros(_ROWS, np.bool_)
    descriptors = np.full(_ROWS, self.file, np.int32)
    offsets = np.arange(_ROWS) * _LENGTH * 2
    words_of = _words()
    words = {
        words_of._DESCRIPTORS: descriptors.ctypes.data,
        words_of._OFFSETS: offsets.ctypes.data,
        words_of._ROWS: tokens.ctypes.data,
        words_of._HIGHEST: highest.ctypes.data,
        words_of._CLEAN: clean.ctypes.data,
        words_of._COUNT: _ROWS,
        words_of._LENGTH: _LENGTH,
        words_of._MIN_PERIOD: 1,
        words_of._MAX_PERIOD: 13,
        words_of._REPEATS: 20,
        words_of._ROWS_AT_ONCE: 3,
        words_of._HELPERS: 1,
        words_of._FAILED: -1,
    }
    for word, value in words.items():
      post[word] = value
    post[words_of._NEXT] = 0
    ctypes.CDLL(None).sem_post(ctypes.c_void_p(post.ctypes.data))
    while post[words_of._NEXT] < _ROWS or post[words_of._BUSY]:
      time.sleep(0.001)
    post[words_of._NEXT] = words_of._CLOSED
    np.testing.assert_array_equal(tokens, self.rows)
    np.testing.assert_array_equal(highest, self.rows.max(axis=1))
    np.testing.assert_array_equal(clean, np.arange(_ROWS) % 4 != 0)
    self.assertEqual(post[words_of._FAILED], -1)

  def test_a_row_that_ends_early_is_named_whoever_read_it(self):
    os.ftruncate(self.file, 120 * _LENGTH * 2 - 1)
    for _ in range(50):
      outcome, tokens, *_ = self._read(np.arange(_ROWS), 3)
      self.assertBetween(outcome, 119, _ROWS - 1)
      np.testing.assert_array_equal(tokens[:119], self.rows[:119])
    os.pwrite(self.file, self.rows.tobytes(), 0)
    self.assertTrue(self._check(np.arange(_ROWS), 3))

  def test_whoever_asks_while_others_are_helped_reads_alone(self):
    self.assertEqual(self.crew.take_on(1, 3), 2)
    self.assertEqual(self.crew.take_on(1, 3), 0)
    self.assertEmpty(self.crew.post(0))
    self.crew.let_go(0)
    self.assertEqual(self.crew.take_on(1, 3), 0)
    self.crew.let_go(2)
    self.assertEqual(self.crew.take_on(1, 3), 2)
    self.crew.let_go(2)

  def test_little_is_read_alone(self):
    with mock.patch.object(crew, "_FEWEST_BYTES", 1000):
      self.assertEqual(self.crew.take_on(999, 3), 0)
      self.assertEqual(self.crew.take_on(1000, 3), 2)
      self.crew.let_go(2)

  def test_there_are_as_many_helpers_as_the_largest_job_wanted(self):
    others = set(threading.enumerate())  # Those of an earlier test may have their last moment too.

    def count():
      return sum(
          thread.name.startswith("olmo-help") for thread in {*threading.enumerate()} - others
      )

    for threads, helped, hired in ((1, 0, 0), (3, 2, 2), (2, 1, 2), (5, 4, 4)):
      self.assertEqual(self.crew.take_on(1, threads), helped)
      self.crew.let_go(helped)
      while count() != hired:  # Those who were let go have their last moment.
        time.sleep(0.001)
    self.crew._dismiss()
    while count():
      time.sleep(0.001)
    self.assertTrue(self._check(np.arange(_ROWS), 3))

  def test_where_no_thread_is_to_be_had_one_reads_alone(self):
    with (
        mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("no more")),
        self.assertLogs(level="WARNING") as logged,
    ):
      for _ in range(3):
        outcome, tokens, *_, helpers = self._read(np.arange(_ROWS), 3)
        self.assertEqual((outcome, helpers), (-1, 0))
        np.testing.assert_array_equal(tokens, self.rows)
    self.assertLen(logged.output, 1)


@absltest.skipUnless(importlib.util.find_spec("numba"), "numba is not installed")
class ProcessTest(absltest.TestCase):

  def _run(self, code):
    done = distributed.run_python(_IN_A_PROCESS + code)
    self.assertEqual(done.returncode, 0, done.stderr)
    return done.stdout.split()

  def test_a_process_ends_with_helpers_asleep(self):
    self.assertEqual(self._run("print(right(), right())"), ["True", "True"])

  def test_a_forked_child_has_helpers_of_its_own(self):
    code = """
print(right())
child = os.fork()
if child == 0:
  os._exit(0 if right() and right(4) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), right())
"""
    self.assertEqual(self._run(code), ["True", "0", "True"])

  def test_a_child_that_is_forked_in_the_middle_of_a_job_reads_too(self):
    code = """
helpers = kernel.crew.take_on(1, 3)
child = os.fork()
if child == 0:
  os._exit(0 if right() else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
kernel.crew.let_go(helpers)
print(right())
"""
    self.assertEqual(self._run(code), ["0", "True"])


class ThreadsBesideTest(absltest.TestCase):

  def test_there_is_always_one_and_never_more_than_four(self):
    for cores, others, expected in (
        (1, 0, 1),
        (1, 1, 1),
        (2, 0, 2),
        (2, 1, 1),
        (3, 1, 2),
        (64, 1, 4),
    ):
      with mock.patch.object(crew, "cores", return_value=cores):
        self.assertEqual(crew.threads_beside(others), expected)


if __name__ == "__main__":
  absltest.main()
