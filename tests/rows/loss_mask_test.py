"""Tests of loss masks."""

import pathlib

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.corpus import storage as storage_lib
from maxtext_olmo.corpus import token_files
from maxtext_olmo.rows import buffers
from maxtext_olmo.rows import loss_mask
from maxtext_olmo.rows import parts as parts_lib
from maxtext_olmo.rows import reader as reader_lib
from maxtext_olmo.rows import row_source
from maxtext_olmo.rows import segments


class _Source(row_source.RowSourceDefaults):
  """A row source with only the attributes that masks need."""

  def __init__(self, mask_paths):
    self.mask_paths = mask_paths


class MaskReaderTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    directory = pathlib.Path(self.create_tempdir().full_path)
    rng = np.random.default_rng(0)
    self.masks = [rng.integers(0, 3, size).astype(np.uint8) for size in (90, 50)]
    self.paths = [str(directory / f"{i}.mask") for i in range(2)]
    for path, mask in zip(self.paths, self.masks):
      mask.tofile(path)
    # Token files have headers here; mask files have none.
    tokens = tuple(str(directory / f"{i}.npy") for i in range(2))
    for path, mask in zip(tokens, self.masks):
      pathlib.Path(path).write_bytes(bytes(128 + 4 * len(mask)))
    files = token_files.TokenFiles(
        tokens, np.full(2, 128), np.dtype("uint32"), storage_lib.LocalStorage()
    )
    self.reader = reader_lib.FileReader(files)

  def _masks(self, mask_paths):
    return loss_mask.MaskReader.of(_Source(mask_paths), self.reader, buffers.BufferPool())

  @parameterized.parameters(False, True)
  def test_bits_are_those_of_the_parts_and_padding_has_none(self, compiled):
    if compiled:
      self.assertTrue(reader_lib.compile_reads(np.uint8))
    parts = parts_lib.Parts.of_rows([[(0, 5, 20), (1, 0, 13)], [], [(1, 10, 40)]])
    words = self._masks(self.paths).read(parts, (3, 40))
    self.assertEqual((words.dtype, words.shape), (np.uint32, (3, 2)))
    expected = np.zeros((3, 40), bool)
    expected[0, :33] = np.concatenate([self.masks[0][5:25], self.masks[1][:13]]) != 0
    expected[2] = self.masks[1][10:50] != 0
    np.testing.assert_array_equal(segments.unpack_bits(words, 40), expected)

  def test_a_source_without_masks_has_no_reader_of_them(self):
    self.assertIsNone(self._masks(None))

  @parameterized.parameters(49, 51)
  def test_a_mask_of_another_size_than_its_tokens_is_an_error_that_names_it(self, size):
    np.zeros(size, np.uint8).tofile(self.paths[1])
    parts = parts_lib.Parts.of_rows([[(1, 10, 21)]])
    with self.assertRaisesRegex(errors.CorpusError, rf"1\.mask has {size} bytes, expected 50"):
      self._masks(self.paths).read(parts, (1, 40))

  def test_records_have_no_mask_files(self):
    reader = reader_lib.RecordReader([])
    with self.assertRaisesRegex(errors.ConfigError, "Loss masks need"):
      loss_mask.MaskReader.of(_Source(self.paths), reader, buffers.BufferPool())

  @parameterized.parameters(1, 3)
  def test_there_is_a_mask_file_for_each_token_file(self, count):
    with self.assertRaisesRegex(errors.ConfigError, f"{count} mask files for 2 token files"):
      self._masks((self.paths * 2)[:count])


if __name__ == "__main__":
  absltest.main()
