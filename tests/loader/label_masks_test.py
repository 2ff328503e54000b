"""Tests of pairing mask files with token files."""

import pathlib

import numpy as np
from absl.testing import absltest

import maxtext_olmo
from maxtext_olmo import config as config_lib
from maxtext_olmo import errors
from maxtext_olmo.loader import label_masks
from maxtext_olmo.loader import olmo_core_import
from tests.loader import cases


class MaskPathsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    for number in range(12):
      np.arange(9, dtype=np.uint16).tofile(self.folder / f"part_{number}.npy")
      np.ones(9, np.uint8).tofile(self.folder / f"mask_{number}.npy")
    self.names = sorted(f"part_{number}.npy" for number in range(12))

  def _paths(self, names, *masks, **values):
    index = maxtext_olmo.build_index(
        [(name, "label") for name in names], 4, tokenizer="none", base=str(self.folder),
        dtype="uint16",
    )  # fmt: skip
    index.save(str(self.folder / "index.json"))
    config = cases.data_config(
        olmo_index_path=str(self.folder / "index.json"), olmo_label_masks=masks, **values
    )
    found = label_masks.mask_paths(config_lib.Options.read(config), index)
    return None if found is None else [pathlib.Path(path).name for path in found]

  def test_without_masks_every_token_counts(self):
    self.assertIsNone(self._paths(self.names))

  def test_a_pattern_is_sorted_as_text_and_paired_by_place(self):
    expected = [name.replace("part", "mask") for name in self.names]
    self.assertEqual(expected[:4], ["mask_0.npy", "mask_1.npy", "mask_10.npy", "mask_11.npy"])
    self.assertEqual(self._paths(self.names, "mask_*.npy"), expected)
    self.assertEqual(self._paths(self.names, str(self.folder / "mask_*.npy")), expected)

  def test_plain_paths_and_patterns_keep_their_order(self):
    found = self._paths(self.names[:3], "mask_5.npy", "mask_*11.npy", "mask_0.npy")
    self.assertEqual(found, ["mask_5.npy", "mask_11.npy", "mask_0.npy"])

  def test_masks_are_shuffled_with_the_files(self):
    names = olmo_core_import.permute_sources(self.names, 123)
    found = self._paths(names, "mask_*.npy", olmo_label_masks_seed=123)
    self.assertEqual(found, [name.replace("part", "mask") for name in names])

  def test_a_wrong_number_of_masks_is_refused(self):
    with self.assertRaisesRegex(errors.ConfigError, "12 files, but the index has 3 token files"):
      self._paths(self.names[:3], "mask_*.npy")

  def test_a_pattern_without_a_match_is_refused(self):
    with self.assertRaisesRegex(errors.MissingFileError, "No file matches .*masks_"):
      self._paths(self.names, "masks_*.npy")


if __name__ == "__main__":
  absltest.main()
