"""Tests of dividing text files into units of work."""

import pathlib

import hypothesis
from absl.testing import absltest
from hypothesis import strategies as st

from maxtext_olmo.corpus import text_files
from maxtext_olmo.corpus import text_units

_LINES = text_files.TextFormat(separator="")


class PlanUnitsTest(absltest.TestCase):

  def plan(self, files, form=_LINES, unit_bytes=10):
    found = text_units.plan_units({"l": files}, form, unit_bytes)
    return [[(s.path, s.first, s.end) for s in unit.slices] for unit in found["l"]]

  def test_small_files_share_units_and_large_ones_are_divided(self):
    files = [text_units.TextFile(name, size) for name, size in (("a", 3), ("b", 25), ("c", 4))]
    self.assertEqual(
        self.plan(files),
        [
            [("a", 0, None), ("b", 0, 10)],
            [("b", 10, 20)],
            [("b", 20, None), ("c", 0, None)],
        ],
    )

  def test_whole_texts_and_compressed_files_are_not_divided(self):
    files = [text_units.TextFile(name, 25) for name in ("a.gz", "b.jsonl.zst")]
    self.assertEqual(self.plan(files), [[("a.gz", 0, None)], [("b.jsonl.zst", 0, None)]])
    files = [text_units.TextFile("a", 25), text_units.TextFile("b", 5)]
    self.assertEqual(
        self.plan(files, text_files.TextFormat()), [[("a", 0, None)], [("b", 0, None)]]
    )

  def test_parquet_files_are_divided_by_row_group(self):
    files = [text_units.TextFile("a.parquet", 9, (6, 6, 6)), text_units.TextFile("b", 0)]
    self.assertEqual(
        self.plan(files),
        [[("a.parquet", 0, 1), ("a.parquet", 1, 2)], [("a.parquet", 2, 3), ("b", 0, None)]],
    )

  @hypothesis.given(
      sizes=st.lists(st.integers(0, 50), min_size=1, max_size=9), unit_bytes=st.integers(1, 30)
  )
  def test_units_hold_all_bytes_once_and_in_order(self, sizes, unit_bytes):
    files = [text_units.TextFile(f"{i}", size) for i, size in enumerate(sizes)]
    units = self.plan(files, unit_bytes=unit_bytes)
    found = [piece for unit in units for piece in unit]
    for file in files:
      pieces = [(first, end) for path, first, end in found if path == file.path]
      self.assertEqual([first for first, _ in pieces], [0, *(end for _, end in pieces[:-1])])
      self.assertIsNone(pieces[-1][1])
    self.assertEqual([path for path, first, _ in found if not first], [f.path for f in files])

  def test_keys_tell_units_apart(self):
    files = [text_units.TextFile("a", 25), text_units.TextFile("b", 25)]
    units = text_units.plan_units({"l": files, "m": files[:1]}, _LINES, 10)
    keys = [unit.key for unit in units["l"]]
    self.assertLen(set(keys), len(keys))
    self.assertEqual([unit.key for unit in units["m"]][:2], keys[:2])
    self.assertEqual(units["l"][2].inputs, ("a", "b"))

  def test_the_size_of_units_grows_with_the_text(self):
    sizes = [text_units.unit_bytes_for(total) for total in (0, 10**7, 10**9, 10**10, 10**13)]
    self.assertEqual([size >> 20 for size in sizes], [2, 2, 4, 64, 64])


class ExamineTest(absltest.TestCase):

  def test_files_that_cannot_be_used_are_reported_in_order(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    for name, content in (("a.txt", b"\xff"), ("b.txt", b"fine"), ("c.jsonl", b"{}")):
      (folder / name).write_bytes(content)
    paths = [f"{folder}/{name}" for name in ("a.txt", "b.txt", "c.jsonl", "none")]
    found, errors = text_units.examine_files(paths, text_files.TextFormat())
    self.assertEqual(found, [None, text_units.TextFile(paths[1], 4), None, None])
    for error, path in zip(errors, (paths[0], paths[2], paths[3]), strict=True):
      self.assertIn(path, str(error))


if __name__ == "__main__":
  absltest.main()
