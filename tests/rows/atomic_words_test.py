"""Tests of the words that threads share in compiled code."""

import importlib.util
import threading

import numpy as np
from absl.testing import absltest

if importlib.util.find_spec("numba"):
  import numba

  from maxtext_olmo.rows import atomic_words

  @numba.njit(nogil=True)
  def _add_many(words, count):
    for _ in range(count):
      atomic_words.add(words, 2, 1)
      atomic_words.breathe()

  @numba.njit(nogil=True)
  def _exchange(words):
    atomic_words.set(words, 1, 40)
    before = atomic_words.add(words, 1, 2)
    return before, atomic_words.get(words, 1)

  @numba.njit(nogil=True)
  def _pass_on(words, count):
    # Whoever sees the number of a turn must see what was written before it.
    wrong = 0
    for turn in range(1, count + 1):
      while atomic_words.get(words, 0) != turn:
        atomic_words.breathe()
      wrong += words[8] != 3 * turn
      atomic_words.set(words, 1, turn)
    return wrong

  @numba.njit(nogil=True)
  def _write(words, count):
    for turn in range(1, count + 1):
      words[8] = 3 * turn
      atomic_words.set(words, 0, turn)
      while atomic_words.get(words, 1) != turn:
        atomic_words.breathe()

  @numba.njit(nogil=True)
  def _sum_at(address, like, count):
    values = numba.carray(atomic_words.pointer(address, like), count)
    return values.sum()


@absltest.skipUnless(importlib.util.find_spec("numba"), "numba is not installed")
class AtomicWordsTest(absltest.TestCase):

  def test_a_word_is_set_added_to_and_read(self):
    self.assertEqual(_exchange(np.zeros(4, np.int64)), (40, 42))

  def test_no_addition_is_lost_between_threads(self):
    words = np.zeros(4, np.int64)
    threads = [threading.Thread(target=_add_many, args=(words, 50_000)) for _ in range(4)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    self.assertEqual(words.tolist(), [0, 0, 200_000, 0])

  def test_what_was_written_before_a_word_is_there_with_it(self):
    words = np.zeros(16, np.int64)
    writer = threading.Thread(target=_write, args=(words, 3000))
    writer.start()
    self.assertEqual(_pass_on(words, 3000), 0)
    writer.join()

  def test_memory_is_found_by_its_address_and_type(self):
    for dtype in (np.uint16, np.int64, np.uint32):
      values = np.arange(10, dtype=dtype)
      self.assertEqual(_sum_at(values.ctypes.data, np.zeros(0, dtype), 10), 45)


if __name__ == "__main__":
  absltest.main()
