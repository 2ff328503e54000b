"""Tables sorted on disk, and lookups in them."""

import os
import tracemalloc

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from maxtext_olmo.corpus import file_array
from maxtext_olmo.corpus import sorted_table
from maxtext_olmo.corpus.storage import LocalStorage

# Few different keys, which differ in high and in low bytes.
_KEYS = st.sampled_from([0, 1, 2, 255, 256, 1 << 56, (1 << 56) + 1, (1 << 64) - 1])


class SortedTableTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = self.create_tempdir().full_path

  def sort(self, blocks, in_memory):
    found = list(sorted_table.sort_records(iter(blocks), self.folder, in_memory))
    self.assertEmpty(os.listdir(self.folder))
    return np.concatenate([np.zeros((0, 2), np.uint64), *found])

  def table(self, records):
    path = os.path.join(self.folder, "table")
    with open(path, "wb") as file:
      file.write(b"head" + records.astype("<u8").tobytes())
    numbers = file_array.FileArray(
        LocalStorage(), path, "<u8", 4, records.size, block_bytes=64, load_up_to=0
    )
    return sorted_table.SortedTable(numbers, records.shape[1])

  @settings(deadline=None, max_examples=60)
  @given(st.lists(st.lists(_KEYS, max_size=20), max_size=5), st.sampled_from([0, 48, 160, 1 << 20]))
  def test_records_are_sorted_and_equal_keys_keep_their_order(self, keys, in_memory):
    numbers = iter(range(1000))
    blocks = [
        np.array([(key, next(numbers)) for key in block], np.uint64).reshape(-1, 2)
        for block in keys
    ]
    expected = sorted(tuple(row) for block in blocks for row in block.tolist())
    self.assertEqual([tuple(row) for row in self.sort(blocks, in_memory).tolist()], expected)

  @settings(deadline=None, max_examples=60)
  @given(st.lists(_KEYS, max_size=40), st.lists(_KEYS, max_size=8))
  def test_a_lookup_finds_all_records_of_a_key(self, keys, wanted):
    records = np.array([(key, i, 7) for i, key in enumerate(sorted(keys))], np.uint64)
    table = self.table(records.reshape(-1, 3))
    self.assertLen(table, len(keys))
    firsts, ends = table.find(np.array(wanted, np.uint64))
    for key, first, end in zip(wanted, firsts.tolist(), ends.tolist()):
      self.assertEqual(end - first, keys.count(key))
      found = np.arange(first, end)
      self.assertEqual(table.column(found, 0).tolist(), [key] * len(found))
      self.assertEqual(table.column(found, 1).tolist(), found.tolist())
    which, records = table.find_all(np.array(wanted, np.uint64))
    split = sorted_table.split_by(which, records, len(wanted))
    expected = [list(range(first, end)) for first, end in zip(firsts.tolist(), ends.tolist())]
    self.assertEqual([one.tolist() for one in split], expected)
    os.unlink(os.path.join(self.folder, "table"))

  @parameterized.named_parameters(("different", 1 << 64), ("all_equal", 1))
  def test_memory_does_not_grow_with_the_number_of_records(self, keys):
    generator = np.random.default_rng(0)

    def blocks():
      for _ in range(100):
        yield generator.integers(0, keys, (10_000, 2), dtype=np.uint64, endpoint=False)

    tracemalloc.start()
    self.addCleanup(tracemalloc.stop)
    last, count = 0, 0
    for block in sorted_table.sort_records(blocks(), self.folder, 1 << 20):
      self.assertGreaterEqual(int(block[0, 0]), last)
      self.assertTrue((block[1:, 0] >= block[:-1, 0]).all())
      last, count = int(block[-1, 0]), count + len(block)
    self.assertEqual(count, 1_000_000)
    self.assertLess(tracemalloc.get_traced_memory()[1], 9 << 20)  # All records have 16 MB.


if __name__ == "__main__":
  absltest.main()
