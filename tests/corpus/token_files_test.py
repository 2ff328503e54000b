"""Tests of the token files of a corpus."""

import pathlib
import pickle

import numpy as np
from absl.testing import absltest

from maxtext_olmo.corpus import index_builder
from maxtext_olmo.corpus import storage as storage_lib
from maxtext_olmo.corpus import token_files
from tests import corpora


class TokenFilesTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)
    path, _ = corpora.write_corpus(self.dir)
    self.index = index_builder.load_index(path)

  def test_paths_are_full_and_remapped(self):
    files = token_files.TokenFiles.of_index(self.index)
    self.assertEqual(files.paths, tuple(map(self.index.resolve, range(len(self.index.files)))))
    moved = token_files.TokenFiles.of_index(self.index, path_remap={str(self.dir): "/mnt"})
    self.assertEqual(moved.paths[0], "/mnt/data/part-000.npy")

  def test_a_storage_is_used_as_given(self):
    storage = storage_lib.LocalStorage(3)
    self.assertIs(token_files.TokenFiles.of_index(self.index, storage=storage).storage, storage)
    files = token_files.TokenFiles.of_index(self.index, max_open_files=5)
    self.assertEqual(files.storage.max_open_files, 5)

  def test_where_counts_from_the_first_token_of_the_file(self):
    np.save(self.dir / "x.npy", np.arange(10, dtype=np.uint32))
    index = index_builder.build_index([(str(self.dir / "x.npy"), "l")], 5, tokenizer="t")
    files = token_files.TokenFiles.of_index(index)
    self.assertEqual(files.data_offsets.tolist(), [128])
    self.assertEqual(files.where(0, 3), f"{self.dir}/x.npy, byte {128 + 3 * 4}")

  def test_pickling_keeps_all_fields(self):
    files = token_files.TokenFiles.of_index(self.index, max_open_files=5)
    again = pickle.loads(pickle.dumps(files))
    self.assertEqual(again.paths, files.paths)
    self.assertEqual(again.dtype, files.dtype)
    self.assertEqual(again.storage.max_open_files, 5)
    np.testing.assert_array_equal(again.data_offsets, files.data_offsets)


if __name__ == "__main__":
  absltest.main()
