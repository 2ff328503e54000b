"""Tests of locating instances, and of describing the changes of a corpus."""

import dataclasses
import pickle

import hypothesis
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import strategies as st

from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.corpus import index_changes
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.errors import OrderError


def _index(
    token_counts, sequence_length=4, *, dtype="uint16", offsets=None, longest=None
) -> index_lib.OlmoNpyIndex:
  itemsize = np.dtype(dtype).itemsize
  offsets = offsets or [0] * len(token_counts)
  entries = [
      index_lib.OlmoNpyFileEntry(f"{i}.npy", "l", count, 0, 0, offset + count * itemsize, offset)
      for i, (count, offset) in enumerate(zip(token_counts, offsets))
  ]
  return index_lib.make_index(
      entries,
      sequence_length,
      dtype=dtype,
      tokenizer="t",
      base="/d",
      max_target_sequence_length=longest,
  )


def _walk(index: index_lib.OlmoNpyIndex) -> list[tuple[int, int]]:
  """Returns (file, token offset) of each instance, by a walk through the files."""
  window = index.max_target_sequence_length or index.sequence_length
  found = []
  for file_id, entry in enumerate(index.files):
    for token in range(0, entry.n_tokens // window * window, index.sequence_length):
      found.append((file_id, token))
  return found


class LocateTest(parameterized.TestCase):

  @hypothesis.given(
      files=st.lists(
          st.tuples(st.integers(0, 40), st.sampled_from([0, 80, 128])), min_size=1, max_size=12
      ),
      sequence_length=st.integers(1, 9),
      chunk=st.sampled_from([None, 1, 2, 3]),
      dtype=st.sampled_from(["uint8", "uint16", "uint32", "uint64"]),
      id_dtype=st.sampled_from(["int64", "uint64", "int32", "uint32"]),
  )
  @hypothesis.settings(max_examples=200, deadline=None)
  def test_locate_agrees_with_a_walk_through_the_files(
      self, files, sequence_length, chunk, dtype, id_dtype
  ):
    counts, offsets = zip(*files)
    index = _index(
        counts,
        sequence_length,
        dtype=dtype,
        offsets=offsets,
        longest=chunk and chunk * sequence_length,
    )
    walk = _walk(index)
    self.assertLen(walk, index.total_instances)
    self.assertEqual(index.num_windows * index.chunk_size, index.total_instances)
    file_ids, byte_offsets = index.locate(np.arange(index.total_instances).astype(id_dtype))
    self.assertEqual((file_ids.dtype, byte_offsets.dtype), (np.int64, np.int64))
    itemsize = np.dtype(dtype).itemsize
    self.assertEqual(
        list(zip(file_ids.tolist(), byte_offsets.tolist())),
        [(i, index.files[i].data_offset + token * itemsize) for i, token in walk],
    )
    self.assertEqual(
        [index_lib.global_to_local(index, i) for i in range(index.total_instances)], walk
    )

  def test_ids_may_come_in_any_order_and_shape(self):
    index = _index([8, 2, 12])
    files, offsets = index.locate(np.array([[4, 0], [2, 2]]))
    np.testing.assert_array_equal(files, [[2, 0], [2, 2]])
    np.testing.assert_array_equal(offsets, [[16, 0], [0, 0]])
    files, offsets = index.locate(np.array([]))
    self.assertEqual((files.shape, offsets.dtype), ((0,), np.int64))

  def test_offsets_beyond_32_bits(self):
    index = _index([1 << 40, 1 << 40], 8192, dtype="uint64")
    files, offsets = index.locate(np.array([index.total_instances - 1], np.uint32))
    self.assertEqual((files[0], offsets[0]), (1, ((1 << 40) - 8192) * 8))

  @parameterized.parameters(-1, 5, 1 << 63)
  def test_an_id_out_of_range_is_an_order_error(self, bad):
    index = _index([8, 2, 12])
    message = (
        f"^Instance {bad} does not exist: the corpus has 5 instances of 4 tokens, counted from 0"
    )
    with self.assertRaisesRegex(OrderError, message):
      index.locate(np.array([0, bad], np.uint64 if bad > 0 else np.int64))
    with self.assertRaisesRegex(OrderError, message):
      index_lib.global_to_local(index, bad)

  def test_ids_must_be_integers(self):
    with self.assertRaisesRegex(OrderError, "must be integers, found an array of float64"):
      _index([8]).locate(np.array([0.0]))


class IndexTest(parameterized.TestCase):

  def test_another_sequence_length_sees_the_same_tokens(self):
    index = _index([70, 3, 33], 8, longest=16)
    other = index.with_sequence_length(4)
    self.assertEqual(other.fingerprint, index.fingerprint)
    self.assertEqual((other.split_key, other.split_windows), (index.split_key, index.split_windows))
    self.assertEqual(other.num_windows, index.num_windows)
    self.assertEqual((index.chunk_size, other.chunk_size), (2, 4))
    bytes_of = lambda i: {  # noqa: E731
        (int(f), int(o) + b)
        for f, o in zip(*i.locate(np.arange(i.total_instances)))
        for b in range(0, 2 * i.sequence_length, 2)
    }
    self.assertEqual(bytes_of(index), bytes_of(other))
    self.assertEqual(other.with_sequence_length(8), index)

  def test_the_same_sequence_length_is_the_same_index(self):
    index = _index([8])
    self.assertIs(index.with_sequence_length(4), index)

  def test_another_sequence_length_needs_windows(self):
    with self.assertRaisesRegex(
        CorpusError, r"sequence length of 4, but 2 was requested\..*--max-target-sequence-length"
    ):
      _index([8]).with_sequence_length(2)

  @parameterized.parameters(3, 32, 0)
  def test_another_sequence_length_must_divide_the_windows(self, length):
    with self.assertRaises(ConfigError):
      _index([70], 8, longest=16).with_sequence_length(length)

  def test_an_index_survives_pickling_without_its_caches(self):
    index = _index([70, 3], 8, longest=16)
    size = len(pickle.dumps(index))
    index.locate(np.arange(index.total_instances))
    self.assertLen(pickle.dumps(index), size)
    again = pickle.loads(pickle.dumps(index))
    self.assertEqual(again, index)
    self.assertEqual(hash(again), hash(index))
    np.testing.assert_array_equal(again.locate(np.arange(3)), index.locate(np.arange(3)))

  def test_an_index_cannot_be_changed(self):
    with self.assertRaises(dataclasses.FrozenInstanceError):
      _index([8]).sequence_length = 3  # type: ignore[misc]
    with self.assertRaises(dataclasses.FrozenInstanceError):
      _index([8]).files[0].path = "x"  # type: ignore[misc]

  def test_sizes_follow_from_tokens_if_none_are_recorded(self):
    index = _index([8], offsets=[128])
    bare = dataclasses.replace(index.files[0], size_bytes=0)
    self.assertEqual(dataclasses.replace(index, files=(bare,)).expected_size(0), 144)

  def test_a_split_belongs_to_a_corpus_or_to_one_that_it_extends(self):
    index, longer = _index([8, 9], longest=4), _index([8, 9, 30, 0], longest=4)
    kept = index_changes.keep_split(longer, index)
    for good in (index, longer, kept, _index([70], 8, longest=16).with_sequence_length(4)):
      self.assertTrue(index_lib.split_belongs(good))
    for changed in ({"split_key": longer.split_key}, {"split_windows": 3}, {"split_key": ""}):
      self.assertFalse(index_lib.split_belongs(dataclasses.replace(kept, **changed)))

  def test_the_split_key_is_hex_and_differs_between_corpora(self):
    self.assertRegex(_index([8]).split_key, r"^[0-9a-f]{64}$")
    self.assertNotEqual(_index([8]).split_key, _index([9]).split_key)
    self.assertEqual(_index([8, 9]).split_windows, 4)


class PrefixTest(absltest.TestCase):

  def test_a_prefix_is_found_by_its_fingerprint(self):
    index = _index([40, 30, 20])
    for count in range(1, 4):
      prefix = _index([40, 30, 20][:count])
      self.assertEqual(index_lib.find_prefix(index, prefix.fingerprint), count)
      self.assertEqual(index_lib.windows_of_prefix(index, count), prefix.num_windows)
    self.assertEqual(index_lib.windows_of_prefix(index, 0), 0)
    self.assertIsNone(index_lib.find_prefix(index, _index([30]).fingerprint))


if __name__ == "__main__":
  absltest.main()
