"""Tests of the compiled search, and of how it takes over from NumPy."""

import importlib.util
import multiprocessing
import pathlib
import subprocess
import sys

import hypothesis
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import strategies as st

from maxtext_olmo.rows import repetition
from tests import distributed
from tests.rows import repetition_test

STARTS_PROCESSES = True

_HAS_NUMBA = importlib.util.find_spec("numba") is not None

# A batch of which every third row is rejected, enough to have the search compiled.
_ROWS = """
import numpy as np
from maxtext_olmo.rows import repetition
rows = np.arange(1 << 21, dtype=np.uint32).reshape(-1, 4096)
rows[::3, 1000:1064:2] = 7
rows[::3, 1001:1064:2] = 8
def right():
  return repetition.clean_rows(rows).tolist() == [r % 3 != 0 for r in range(len(rows))]
"""


def _run(script, **environment):
  """What a Python process of its own prints."""
  return subprocess.run(
      [sys.executable, "-W", "ignore", "-c", _ROWS + script],
      env=distributed.child_environment(environment),
      check=True,
      stdout=subprocess.PIPE,
      text=True,
      timeout=300,
  ).stdout.split()


def _both(rows, min_period, max_period, repeats):
  """The verdicts of NumPy and of the compiled search."""
  compiled = repetition._compiled(rows.dtype.itemsize).ready
  searches = (repetition._search_with_numpy, compiled)
  return [search(rows, min_period, max_period, repeats).tolist() for search in searches]


@absltest.skipUnless(_HAS_NUMBA, "numba is not installed")
class SearchTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    for dtype in (np.uint8, np.uint16, np.uint32, np.uint64):
      assert repetition.compile_filter(dtype)

  @hypothesis.given(
      seed=st.integers(0, 2**32 - 1),
      length=st.integers(0, 400),
      ids=st.integers(1, 4),
      min_period=st.integers(1, 3),
      max_period=st.integers(1, 14),
      max_count=st.integers(3, 12),
      itemsize=st.sampled_from([1, 2, 4, 8]),
  )
  @hypothesis.settings(max_examples=300, deadline=None)
  def test_verdicts_are_those_of_the_definition_and_of_numpy(
      self, seed, length, ids, min_period, max_period, max_count, itemsize
  ):
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, ids, (4, length)).astype(f"u{itemsize}")
    for row in rows[:3] if length else ():
      period, start = rng.integers(1, 14), rng.integers(0, length)
      row[start:] = np.resize(rng.integers(0, ids, period), length - start)
      row[rng.integers(0, length)] = 9
    slow = [
        not repetition_test.comes_in_a_row(row, min_period, max_period, max_count)
        for row in rows.tolist()
    ]
    verdicts = _both(rows, min_period, min(max_period, length // 3), max_count - 1)
    self.assertEqual(verdicts, [slow, slow])

  @parameterized.parameters(*range(4))
  def test_one_repetition_is_found_among_many_that_fall_short(self, seed):
    rng = np.random.default_rng(seed)
    hard = repetition_test.hard_rows(rng, length=int(rng.integers(1000, 4000)))
    for itemsize in (2, 4, 8):
      rows = hard.astype(f"u{itemsize}")
      self.assertEqual(_both(rows, 1, 13, 31), [[True] * len(rows)] * 2)
      planted = repetition_test.plant(rows, 32, rng)
      self.assertEqual(_both(planted, 1, 13, 31), [[False] * len(rows)] * 2)
      short = repetition_test.plant(rows, 31.99, rng)
      self.assertEqual(_both(short, 1, 13, 31), [[True] * len(rows)] * 2)

  def test_every_verdict_is_olmo_cores(self):
    golden = np.load(repetition_test.GOLDEN)
    sequences = np.split(golden["flat_tokens"], golden["offsets"][1:-1])
    periods = golden["config_max_period"], golden["config_min_period"]
    for c, (max_period, min_period, count) in enumerate(zip(*periods, golden["config_max_count"])):
      for sequence, keep in zip(sequences, golden["verdict_keep"][c]):
        longest = min(int(max_period), sequence.size // 3)
        verdicts = _both(sequence[None], int(min_period), longest, max(int(count), 3) - 1)
        self.assertEqual(verdicts, [[keep], [keep]])

  @parameterized.parameters(*repetition_test.DTYPES)
  def test_every_dtype_and_layout_goes_through_the_compiled_search(self, dtype):
    rows = np.arange(100 * 6).reshape(6, 100).astype(dtype)
    rows[::2, 30:70] = 5
    expected = np.arange(6) % 2 == 1
    read_only = rows.view()
    read_only.flags.writeable = False
    unaligned = np.frombuffer(b"\0" + rows.tobytes(), dtype, offset=1).reshape(rows.shape)
    for layout in (rows, read_only, unaligned, np.asfortranarray(rows)):
      np.testing.assert_array_equal(repetition.clean_rows(layout), expected)

  def test_settings_beyond_the_row_find_nothing(self):
    rows = np.zeros((1, 100), np.uint32)
    self.assertTrue(repetition.clean_rows(rows, max_count=10**30).all())
    self.assertTrue(repetition.clean_rows(rows, min_period=10**30, max_period=10**31).all())
    self.assertFalse(repetition.clean_rows(rows, max_period=10**30).any())

  def test_no_rows_give_no_verdicts(self):
    for shape in ((0, 100), (4, 0)):
      keep = repetition.clean_rows(np.zeros(shape, np.uint32))
      np.testing.assert_array_equal(keep, np.ones(shape[0], bool))


@absltest.skipUnless(_HAS_NUMBA, "numba is not installed")
class TakingOverTest(parameterized.TestCase):

  def test_numpy_serves_until_the_compiled_search_is_ready(self):
    script = """
print(repetition._compiled(4).ready is not None, right())
print(repetition.compile_filter(), repetition._compiled(4).ready is not None, right())
"""
    cache = self.create_tempdir().full_path
    self.assertEqual(_run(script, NUMBA_CACHE_DIR=cache), ["False", "True", "True", "True", "True"])

  def test_the_compiled_search_comes_from_the_cache_the_next_time(self):
    script = """
print(repetition.compile_filter(), right())
"""
    cache = pathlib.Path(self.create_tempdir().full_path)
    self.assertEqual(_run(script, NUMBA_CACHE_DIR=str(cache)), ["True", "True"])
    files = {path: path.stat().st_mtime_ns for path in cache.rglob("*.nb*")}
    self.assertNotEmpty(files)
    self.assertEqual(_run(script, NUMBA_CACHE_DIR=str(cache)), ["True", "True"])
    self.assertEqual({path: path.stat().st_mtime_ns for path in cache.rglob("*.nb*")}, files)

  def test_a_damaged_cache_is_survived(self):
    script = """
print(repetition.compile_filter(), right())
"""
    cache = pathlib.Path(self.create_tempdir().full_path)
    _run(script, NUMBA_CACHE_DIR=str(cache))
    for path in cache.rglob("*.nb*"):
      path.write_bytes(path.read_bytes()[:-40])
    self.assertEqual(_run(script, NUMBA_CACHE_DIR=str(cache)), ["True", "True"])

  def test_a_cache_that_cannot_be_written_is_survived(self):
    script = """
print(repetition.compile_filter(), right())
"""
    environment = {
        "NUMBA_CACHE_DIR": "/dev/null/nowhere",
        "NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator",
    }
    self.assertEqual(_run(script, **environment), ["True", "True"])

  def test_a_numba_that_does_not_compile_leaves_numpy(self):
    script = """
print(right(), repetition.compile_filter(), right())
"""
    self.assertEqual(_run(script, NUMBA_DISABLE_JIT="1"), ["True", "False", "True"])

  @parameterized.named_parameters(("ready", True), ("under_way", False))
  def test_a_forked_child_gives_the_same_verdicts(self, ready):
    script = f"""
import os
if {ready}:
  repetition.compile_filter()
else:
  right()  # begins to compile
child = os.fork()
if child == 0:
  compiled = repetition._compiled(4).ready is not None
  os._exit(0 if right() and repetition.compile_filter() == compiled and right() else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(repetition.compile_filter(), right())
"""
    cache = self.create_tempdir().full_path
    self.assertEqual(_run(script, NUMBA_CACHE_DIR=cache), ["0", "True", "True"])

  def test_a_forked_child_compiles_what_its_parent_did_not_begin(self):
    script = """
import os
child = os.fork()
if child == 0:
  os._exit(0 if repetition.compile_filter() and right() else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    self.assertEqual(_run(script), ["0"])

  def test_a_spawned_child_gives_the_same_verdicts(self):
    rng = np.random.default_rng(0)
    rows = repetition_test.hard_rows(rng).astype(np.uint16)
    rows[::2] = repetition_test.plant(rows, 32, rng)[::2]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
      keep = pool.apply(repetition.clean_rows, (rows,))
    np.testing.assert_array_equal(keep, np.arange(len(rows)) % 2 == 1)

  def test_a_process_may_end_while_the_search_is_compiled(self):
    script = """
print(right())
"""
    cache = self.create_tempdir().full_path
    self.assertEqual(_run(script, NUMBA_CACHE_DIR=cache), ["True"])


if __name__ == "__main__":
  absltest.main()
