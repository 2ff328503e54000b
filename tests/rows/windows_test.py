"""Tests of fixed windows as rows."""

import pickle

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.corpus import token_files
from maxtext_olmo.rows import reader as reader_lib
from maxtext_olmo.rows import windows
from tests import corpora


class WindowRowsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    path, self.rows = corpora.write_corpus(self.create_tempdir().full_path)
    self.index = index_lib.load_index(path)
    self.source = windows.WindowRows(self.index)

  def test_row_i_is_instance_i(self):
    numbers = np.random.default_rng(0).permutation(len(self.rows))
    parts = self.source.parts(3, numbers)
    self.assertEqual(parts.num_rows, len(numbers))
    self.assertEqual(set(parts.count.tolist()), {8})
    out = np.zeros((len(numbers), 8), np.uint16)
    reader = reader_lib.FileReader(token_files.TokenFiles.of_index(self.index))
    reader.read(parts, out, reader_lib.Checks())
    np.testing.assert_array_equal(out, self.rows[numbers])

  def test_firsts_are_counted_in_tokens_from_the_first_one_of_the_file(self):
    directory = self.create_tempdir().full_path
    np.save(f"{directory}/a.npy", np.arange(40, dtype=np.uint16))  # With a header.
    index = index_lib.build_index(
        [(f"{directory}/a.npy", "a")], 8, tokenizer="t", dtype="uint16", base=directory
    )
    self.assertGreater(index.files[0].data_offset, 0)
    parts = windows.WindowRows(index).parts(0, np.array([4, 0, 2]))
    self.assertEqual(parts.first.tolist(), [32, 0, 16])

  def test_every_epoch_has_all_instances(self):
    self.assertEqual([self.source.num_rows(epoch) for epoch in (0, 7)], [len(self.rows)] * 2)
    self.assertEqual(self.source.row_length, 8)
    self.assertEqual(self.source.fingerprint, self.index.fingerprint)

  def test_a_row_that_does_not_exist_is_an_error(self):
    with self.assertRaisesRegex(errors.OrderError, f"Instance {len(self.rows)} does not exist"):
      self.source.parts(0, np.array([0, len(self.rows)]))

  def test_no_rows_have_no_parts(self):
    self.assertEqual(self.source.parts(0, np.zeros(0, np.int64)).num_rows, 0)

  def test_it_survives_pickling(self):
    again = pickle.loads(pickle.dumps(self.source))
    self.assertEqual(again.parts(0, np.array([5])).first.tolist(), [40])


if __name__ == "__main__":
  absltest.main()
