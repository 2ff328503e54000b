"""Tests of the bitmap of consumed instances."""

import os
import pathlib
import pickle

import hypothesis
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import strategies as st

from maxtext_olmo import errors
from maxtext_olmo.order import consumed as consumed_lib


class ConsumedTest(parameterized.TestCase):

  def _file(self, flags: np.ndarray, fingerprint: str = "sha256:a") -> str:
    path = os.path.join(self.create_tempdir().full_path, "seen.bits")
    consumed_lib.write_consumed(path, flags, fingerprint)
    return path

  def _open(self, path: str, count: int) -> consumed_lib.Consumed:
    return consumed_lib.Consumed(path, fingerprint="sha256:a", num_instances=count)

  @parameterized.parameters(1, 7, 8, 63, 64, 65, 4095, 4096, 4097, 20_011)
  def test_select_finds_every_instance_that_was_not_consumed(self, count):
    for share in (0.0, 0.02, 0.5, 0.99):
      flags = np.random.default_rng(count).random(count) < share
      bitmap = self._open(self._file(flags), count)
      left = np.flatnonzero(~flags)
      self.assertEqual(bitmap.num_remaining, len(left))
      np.testing.assert_array_equal(bitmap.select(np.arange(len(left))), left)

  @hypothesis.settings(max_examples=30, deadline=None)
  @hypothesis.given(st.lists(st.booleans(), min_size=1, max_size=300), st.randoms())
  def test_select_takes_ranks_in_any_order(self, flags, random):
    bitmap = self._open(self._file(np.array(flags)), len(flags))
    left = np.flatnonzero(~np.array(flags))
    ranks = list(range(len(left)))
    random.shuffle(ranks)
    np.testing.assert_array_equal(bitmap.select(np.array(ranks, np.int64)), left[ranks])

  def test_a_rank_beyond_the_rest_is_an_error(self):
    bitmap = self._open(self._file(np.array([True, False, False])), 3)
    with self.assertRaisesRegex(errors.OrderError, "2 instances are left"):
      bitmap.select(np.array([2]))

  def test_all_consumed_leaves_nothing(self):
    bitmap = self._open(self._file(np.ones(100, bool)), 100)
    self.assertEqual(bitmap.num_remaining, 0)
    self.assertEqual(bitmap.select(np.zeros(0, np.int64)).size, 0)

  def test_it_travels_to_a_worker_without_the_bits(self):
    flags = np.random.default_rng(1).random(1_000_000) < 0.5
    bitmap = self._open(self._file(flags), len(flags))
    text = pickle.dumps(bitmap)
    self.assertLess(len(text), 1000)
    ranks = np.array([0, 17, 400_000])
    np.testing.assert_array_equal(pickle.loads(text).select(ranks), bitmap.select(ranks))

  def test_the_bitmap_of_another_corpus_is_refused(self):
    path = self._file(np.zeros(10, bool), "sha256:b")
    with self.assertRaisesRegex(errors.CorpusError, "another corpus"):
      self._open(path, 10)
    with self.assertRaisesRegex(errors.CorpusError, "it has 10 instances, this index has 11"):
      self._open(self._file(np.zeros(10, bool)), 11)

  def test_a_flipped_bit_and_a_cut_file_are_found(self):
    path = pathlib.Path(self._file(np.zeros(10_000, bool)))
    data = bytearray(path.read_bytes())
    data[500] ^= 4
    path.write_bytes(data)
    with self.assertRaisesRegex(errors.CorpusError, "is damaged"):
      self._open(str(path), 10_000)
    path.write_bytes(data[:300])
    with self.assertRaisesRegex(errors.CorpusError, "is damaged"):
      self._open(str(path), 10_000)

  def test_another_kind_of_file_and_another_format_are_named(self):
    path = pathlib.Path(self.create_tempdir().full_path, "index.json")
    path.write_text("{}")
    with self.assertRaisesRegex(errors.CorpusError, "not a bitmap"):
      self._open(str(path), 10)
    path = pathlib.Path(self._file(np.zeros(10, bool)))
    data = bytearray(path.read_bytes())
    data[8] = 9
    path.write_bytes(data)
    with self.assertRaisesRegex(errors.CorpusError, "has format 9"):
      self._open(str(path), 10)


if __name__ == "__main__":
  absltest.main()
