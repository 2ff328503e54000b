"""Tests of the repetition filter, and of NumPy's search in particular."""

import pathlib
import pickle
import subprocess
import sys
import threading

import hypothesis
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import strategies as st

from maxtext_olmo import errors
from maxtext_olmo.rows import repetition
from tests import distributed

STARTS_PROCESSES = True

GOLDEN = pathlib.Path(__file__).parents[1] / "testdata" / "repetition_filter.npz"
DTYPES = (np.uint8, np.uint16, np.uint32, np.uint64, np.int8, np.int16, np.int32, np.int64, ">u4")


def comes_in_a_row(tokens, min_period, max_period, count):
  """Returns whether an n-gram occurs `count` times in a row, by trying every place."""
  tokens = list(tokens)
  count = max(count, 3)
  for p in range(min_period, min(max_period, len(tokens) // 3) + 1):
    for s in range(len(tokens) - count * p + 1):
      if tokens[s : s + p] * count == tokens[s : s + count * p]:
        return True
  return False


def repetitions_by_rows(tokens, min_period, max_period):
  """Finds repetitions in a matrix whose rows are one period long, by comparing adjacent rows.

  A mask, which equals no token, fills the rest of the last row, or an extra row if there is none.
  The first row is compared with the last.
  """
  found = []
  for p in range(min_period, min(max_period, len(tokens) // 3) + 1):
    cells = list(tokens) + [None] * (p - len(tokens) % p)
    rows = [cells[r : r + p] for r in range(0, len(cells), p)]
    same = [[a == b for a, b in zip(row, rows[r - 1])] for r, row in enumerate(rows)]
    whole = [r for r in range(len(rows)) if all(same[r])]
    for first in (r for r in whole if r - 1 not in whole):
      last = first
      while last + 1 in whole:
        last += 1
      before = same[first - 1][::-1].index(False)
      after = same[last + 1].index(False)
      start, end = (first - 1) * p - before, (last + 1) * p + after
      if (end - start) // p >= 3:
        found.append((start, end, p, (end - start) // p))
  return found


def runs(n, length, size, rng):
  """Returns rows of runs of `size` equal tokens."""
  ids = np.cumsum(rng.integers(1, 1000, (n, -(-length // size))), axis=1) % 50000
  return np.repeat(ids, size, axis=1)[:, :length]


def almost(n, length, count, periods, rng):
  """Returns rows of runs that are each one token short of `count` times an n-gram."""
  rows = []
  for _ in range(n):
    parts = []
    while sum(map(len, parts)) < length:
      p = int(rng.choice(periods))
      ids = rng.permutation(25000)[:p] + len(parts) % 2 * 25000  # neighbours share none
      parts.append(np.resize(ids, count * p - 1))
    rows.append(np.concatenate(parts)[:length])
  return np.array(rows)


def hard_rows(rng, length=3000):
  """Returns rows with many equal tokens but no n-gram of up to 13 tokens 32 times in a row."""
  few = [rng.integers(0, ids, (1, length)) for ids in (2, 3, 4, 9)]
  return np.concatenate(
      [
          *(runs(1, length, size, rng) for size in (2, 7, 13, 28, 29, 30, 31)),
          *(almost(1, length, 32, [p], rng) for p in range(1, 14)),
          almost(3, length, 32, range(1, 14), rng),
          *few,
          np.floor(50000 * rng.power(0.1, (3, length))).astype(np.int64),
      ]
  )


def plant(rows, times, rng):
  """Writes an n-gram exactly `times` times in a row, at a random place of each row."""
  rows = rows.copy()
  for row in rows:
    p = int(rng.integers(1, 14))
    size = int(times * p)
    start = int(rng.choice([0, len(row) - size, rng.integers(0, len(row) - size)]))
    row[start : start + size] = np.resize(60000 + rng.permutation(99)[:p], size)
    row[max(0, start - 1) : start] = 60100
    row[start + size : start + size + 1] = 60100
  return rows


class VerdictTest(parameterized.TestCase):

  def test_every_result_is_that_of_olmo_core(self):
    golden = np.load(GOLDEN)
    sequences = np.split(golden["flat_tokens"], golden["offsets"][1:-1])
    configs = zip(
        golden["config_max_period"].tolist(),
        golden["config_min_period"].tolist(),
        golden["config_max_count"].tolist(),
    )
    self.assertEqual(golden["verdict_keep"].shape, (5, 200))
    for c, (max_period, min_period, max_count) in enumerate(configs):
      settings = {
          "repetition_max_period": max_period,
          "repetition_min_period": min_period,
          "repetition_max_count": max_count,
      }
      for dtype in (np.uint32, np.int64):
        keep = [repetition.is_clean_instance(s.astype(dtype), **settings) for s in sequences]
        np.testing.assert_array_equal(keep, golden["verdict_keep"][c])
      for s, keep in zip(sequences, golden["verdict_keep"][c]):
        found = repetition.find_periodic_sequences(s, max_period, min_period)
        self.assertEqual(keep, all(r.times < max_count for r in found))

  @hypothesis.given(
      tokens=st.lists(st.integers(0, 2), max_size=60),
      ngram=st.lists(st.integers(0, 2), min_size=1, max_size=5),
      times=st.integers(0, 12),
      at=st.integers(0, 60),
      min_period=st.integers(1, 4),
      max_period=st.integers(1, 14),
      max_count=st.integers(0, 12),
      dtype=st.sampled_from(DTYPES),
  )
  @hypothesis.settings(max_examples=300, deadline=None)
  def test_a_window_is_rejected_if_an_ngram_repeats_too_often(
      self, tokens, ngram, times, at, min_period, max_period, max_count, dtype
  ):
    tokens = tokens[:at] + ngram * times + tokens[at:]
    rejected = comes_in_a_row(tokens, min_period, max_period, max_count)
    keep = repetition.is_clean_instance(
        np.array(tokens, dtype),
        repetition_max_period=max_period,
        repetition_min_period=min_period,
        repetition_max_count=max_count,
    )
    self.assertIs(keep, not rejected)

  @parameterized.parameters(*range(1, 14))
  def test_thirty_two_times_is_rejected_and_a_token_less_is_not(self, period):
    ngram = np.arange(period) + 7
    window = np.arange(1000, 2000, dtype=np.uint32)
    for start in (0, 1, 100, len(window) - 32 * period):
      row = window.copy()
      row[start : start + 32 * period] = np.resize(ngram, 32 * period)
      self.assertFalse(repetition.is_clean_instance(row))
      row[start + 32 * period - 1] = 5
      self.assertTrue(repetition.is_clean_instance(row))

  @parameterized.parameters(1, 2, 3)
  def test_counts_below_three_act_as_three(self, max_count):
    keep = [
        repetition.is_clean_instance(np.array(w, np.uint16), repetition_max_count=max_count)
        for w in ([4, 5, 4, 5, 9], [4, 5, 4, 5, 4, 9], [4, 5, 4, 5, 4, 5])
    ]
    self.assertEqual(keep, [True, True, False])

  @parameterized.parameters(0, 1, 2)
  def test_a_window_shorter_than_three_tokens_is_kept(self, length):
    self.assertTrue(repetition.is_clean_instance(np.zeros(length, int), repetition_max_count=1))

  def test_settings_beyond_the_window_find_nothing(self):
    window = np.zeros(100, np.uint32)
    self.assertTrue(repetition.is_clean_instance(window, repetition_max_count=10**30))
    self.assertTrue(repetition.is_clean_instance(window, repetition_min_period=50))
    self.assertTrue(repetition.is_clean_instance(window, repetition_min_period=10**30))
    self.assertFalse(repetition.is_clean_instance(window, repetition_max_period=10**30))


class FindTest(parameterized.TestCase):

  def test_a_worked_example(self):
    tokens = np.array([7, 1, 2, 1, 2, 1, 2, 1, 2, 5], np.uint32)
    self.assertEqual(list(repetition.find_periodic_sequences(tokens, 13)), [(1, 9, 2, 4)])
    (found,) = repetition.find_periodic_sequences(tokens, 13)
    self.assertEqual((found.start, found.end, found.period, found.times), (1, 9, 2, 4))

  @parameterized.named_parameters(
      ("all_equal", [3] * 9, [(0, 9, 1, 9), (0, 9, 2, 4), (0, 9, 3, 3)]),
      ("a_part_of_the_ngram_follows", [1, 2, 3] * 3 + [1, 2], [(0, 11, 3, 3)]),
      ("a_part_of_the_ngram_precedes", [9, 3] + [1, 2, 3] * 3, [(1, 11, 3, 3)]),
      ("twice_is_none", [1, 2, 3, 1, 2, 3, 1, 2], []),
      ("two_of_them", [5, 5, 5, 6, 5, 5, 5], [(0, 3, 1, 3), (4, 7, 1, 3)]),
      ("nothing", [], []),
  )
  def test_known_repetitions(self, tokens, expected):
    found = repetition.find_periodic_sequences(np.array(tokens, np.int64), 13)
    self.assertEqual(list(found), expected)

  @hypothesis.given(
      tokens=st.lists(st.integers(0, 2), max_size=50),
      ngram=st.lists(st.integers(0, 2), min_size=1, max_size=6),
      times=st.integers(0, 6),
      at=st.integers(0, 50),
      min_period=st.integers(1, 4),
      max_period=st.integers(1, 14),
      dtype=st.sampled_from(DTYPES),
  )
  @hypothesis.settings(max_examples=300, deadline=None)
  def test_repetitions_are_those_of_the_padded_matrix(
      self, tokens, ngram, times, at, min_period, max_period, dtype
  ):
    tokens = tokens[:at] + ngram * times + tokens[at:]
    found = repetition.find_periodic_sequences(np.array(tokens, dtype), max_period, min_period)
    self.assertEqual(list(found), repetitions_by_rows(tokens, min_period, max_period))

  def test_the_largest_unsigned_id_is_a_token_like_any_other(self):
    tokens = np.array([1, 2] + [2**32 - 1] * 40, np.uint32)
    self.assertIn((2, 42, 1, 40), list(repetition.find_periodic_sequences(tokens, 1)))
    self.assertFalse(repetition.is_clean_instance(tokens))

  def test_a_mask_value_among_the_tokens_is_an_error(self):
    tokens = np.array([4, 5, -1, 6, -1])
    with self.assertRaisesRegex(errors.CorpusError, "Token 2 of the window is -1.* 2 times"):
      list(repetition.find_periodic_sequences(tokens, 13))
    with self.assertRaisesRegex(ValueError, "Token 2 of the window is -1, the mask_value"):
      repetition.is_clean_instance(tokens)
    self.assertTrue(repetition.is_clean_instance(tokens, mask_value=-2))
    with self.assertRaisesRegex(ValueError, "Token 0 of the window is 4"):
      repetition.is_clean_instance(tokens[:2].astype(np.uint8), mask_value=4)

  def test_a_period_of_zero_is_an_error(self):
    with self.assertRaisesRegex(errors.ConfigError, "min_period must be 1 or more, found 0"):
      repetition.is_clean_instance(np.zeros(9, np.uint8), repetition_min_period=0)
    with self.assertRaisesRegex(errors.ConfigError, "found -3"):
      list(repetition.find_periodic_sequences(np.zeros(9, np.uint8), 3, min_period=-3))
    with self.assertRaises(errors.ConfigError):
      repetition.NgramFilterTransform(min_period=0)

  def test_an_array_that_is_not_a_window_of_ids_is_an_error(self):
    with self.assertRaisesRegex(
        errors.CorpusError, r"1-D integer array, found float64 of shape \(9,\)"
    ):
      repetition.is_clean_instance(np.zeros(9))
    with self.assertRaisesRegex(errors.CorpusError, r"found uint8 of shape \(3, 3\)"):
      list(repetition.find_periodic_sequences(np.zeros((3, 3), np.uint8), 3))
    with self.assertRaisesRegex(
        errors.CorpusError, r"\(rows, tokens\), found uint8 of shape \(9,\)"
    ):
      repetition.clean_rows(np.zeros(9, np.uint8))


class RowsTest(parameterized.TestCase):

  @hypothesis.given(
      seed=st.integers(0, 2**32 - 1),
      length=st.integers(0, 260),
      ids=st.integers(1, 4),
      min_period=st.integers(1, 3),
      max_period=st.integers(1, 14),
      max_count=st.integers(1, 12),
      dtype=st.sampled_from(DTYPES),
  )
  @hypothesis.settings(max_examples=200, deadline=None)
  def test_numpy_checks_each_row_separately(
      self, seed, length, ids, min_period, max_period, max_count, dtype
  ):
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, ids, (4, length))
    for row in rows[:3] if length else ():
      period, start = rng.integers(1, 14), rng.integers(0, length)
      row[start:] = np.resize(rng.integers(0, ids, period), length - start)
      row[rng.integers(0, length)] = 9
    before = rows.astype(dtype)
    rows = before.copy()
    keep = repetition.clean_rows(
        rows, max_period=max_period, min_period=min_period, max_count=max_count
    )
    rejected = [comes_in_a_row(row, min_period, max_period, max_count) for row in rows.tolist()]
    self.assertEqual(keep.dtype, np.bool_)
    self.assertEqual(keep.tolist(), [not r for r in rejected])
    np.testing.assert_array_equal(rows, before)

  @parameterized.parameters(*range(4))
  def test_numpy_finds_the_one_repetition_among_many_that_fall_short(self, seed):
    rng = np.random.default_rng(seed)
    hard = hard_rows(rng).astype(np.uint32)
    search = repetition._search_with_numpy
    self.assertTrue(search(hard, 1, 13, 31).all())
    self.assertFalse(search(plant(hard, 32, rng), 1, 13, 31).any())
    np.testing.assert_array_equal(
        search(plant(hard, 31.99, rng), 1, 13, 31), np.ones(len(hard), bool)
    )

  def test_rows_that_are_periodic_throughout_are_rejected(self):
    rows = np.array([np.resize(np.arange(p), 2048) for p in range(1, 17)], np.uint16)
    keep = repetition.clean_rows(rows)
    np.testing.assert_array_equal(keep, np.arange(1, 17) > 13)

  def test_more_rows_than_one_block_holds(self):
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 50000, (300, 4096)).astype(np.uint16)
    bad = rng.random(300) < 0.3
    rows[bad, 1000:1032] = 5
    np.testing.assert_array_equal(repetition._search_with_numpy(rows, 1, 13, 31), ~bad)

  def test_rows_may_have_any_memory_layout(self):
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 50000, (6, 512)).astype(np.uint32)
    rows[::2, 100:140] = 5
    expected = np.arange(6) % 2 == 1
    unaligned = np.frombuffer(b"\0" + rows.tobytes(), np.uint32, offset=1).reshape(rows.shape)
    self.assertFalse(unaligned.flags.aligned)
    read_only = rows.view()
    read_only.flags.writeable = False
    wide = np.zeros((6, 600), np.uint32)
    wide[:, 20:532] = rows
    for layout in (
        np.asfortranarray(rows),
        rows[::-1][::-1],
        wide[:, 20:532],
        read_only,
        unaligned,
    ):
      np.testing.assert_array_equal(repetition.clean_rows(layout), expected)

  @parameterized.parameters((0, 100), (5, 0), (0, 0), (3, 2))
  def test_empty_rows_are_kept(self, n, length):
    keep = repetition.clean_rows(np.zeros((n, length), np.uint32))
    np.testing.assert_array_equal(keep, np.ones(n, bool))


class NgramFilterTransformTest(absltest.TestCase):

  def test_the_result_is_added_and_the_record_is_unchanged(self):
    record = {"tokens": np.full(64, 5, np.uint32), "instance_id": 3}
    result = repetition.NgramFilterTransform().map(record)
    self.assertIs(result["instance_mask"], False)
    self.assertIs(result["tokens"], record["tokens"])
    self.assertEqual(result["instance_id"], 3)
    self.assertCountEqual(record, ["tokens", "instance_id"])
    np.testing.assert_array_equal(record["tokens"], np.full(64, 5))

  def test_settings_count_and_survive_pickling(self):
    record = {"tokens": np.array([1, 2, 3] * 4 + [-1])}
    transform = repetition.NgramFilterTransform(
        max_period=3, min_period=2, max_count=4, mask_value=-2
    )
    for each in (transform, pickle.loads(pickle.dumps(transform))):
      self.assertIs(each.map(record)["instance_mask"], False)
      self.assertEqual(
          repr(each),
          "NgramFilterTransform(repetition_max_period=3, repetition_min_period=2,"
          " repetition_max_count=4, mask_value=-2)",
      )
    less = repetition.NgramFilterTransform(max_period=2, max_count=4, mask_value=-2)
    self.assertIs(less.map(record)["instance_mask"], True)
    with self.assertRaises(ValueError):
      repetition.NgramFilterTransform().map(record)


def _run(script, **environment):
  """Returns the output of a script in a separate Python process."""
  return subprocess.run(
      [sys.executable, "-W", "ignore", "-c", script],
      env=distributed.child_environment(environment),
      check=True,
      stdout=subprocess.PIPE,
      text=True,
      timeout=300,
  ).stdout.split()


class WithoutNumbaTest(parameterized.TestCase):

  def test_numpy_is_used_without_numba(self):
    script = """
import sys
sys.modules["numba"] = None
import numpy as np
from maxtext_olmo.rows import repetition
rows = np.arange(1 << 21, dtype=np.uint32).reshape(-1, 4096)
rows[3, :40] = 1
print(repetition.clean_rows(rows).sum() == len(rows) - 1)
print(repetition.compile_filter(np.uint32))
print(repetition.clean_rows(rows).sum() == len(rows) - 1)
"""
    self.assertEqual(_run(script), ["True", "False", "True"])

  def test_numpy_is_used_without_a_thread_to_compile_in(self):
    script = """
import resource, threading
import numpy as np
from maxtext_olmo.rows import repetition
resource.setrlimit(resource.RLIMIT_AS, (1 << 38, 1 << 38))
threading.stack_size(1 << 39)
rows = np.arange(1 << 21, dtype=np.uint32).reshape(-1, 4096)
rows[3, :40] = 1
print(repetition.clean_rows(rows).sum() == len(rows) - 1)
print(repetition.compile_filter(np.uint32))
"""
    self.assertEqual(_run(script), ["True", "False"])

  def test_a_little_work_compiles_nothing(self):
    script = """
import sys, threading
import numpy as np
from maxtext_olmo.rows import repetition
print(repetition.is_clean_instance(np.zeros(8192, np.uint32)))
print([t.name for t in threading.enumerate() if "repetition" in t.name], "numba" in sys.modules)
"""
    self.assertEqual(_run(script), ["False", "[]", "False"])

  def test_threads_may_share_the_filter(self):
    rng = np.random.default_rng(0)
    rows = plant(hard_rows(rng), 32, rng).astype(np.uint64)
    rows[::2] = hard_rows(rng)[::2]
    expected = np.arange(len(rows)) % 2 == 0
    verdicts = []

    def judge():
      for _ in range(4):
        verdicts.append(repetition.clean_rows(rows))

    threads = [threading.Thread(target=judge) for _ in range(4)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    self.assertLen(verdicts, 16)
    np.testing.assert_array_equal(verdicts, np.broadcast_to(expected, (16, len(rows))))


if __name__ == "__main__":
  absltest.main()
