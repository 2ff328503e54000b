"""Tests of reading text from Parquet files."""

import importlib.util
import pathlib

from absl.testing import absltest

from maxtext_olmo.corpus import parquet_text
from maxtext_olmo.corpus import text_files
from maxtext_olmo.errors import CorpusError


@absltest.skipIf(importlib.util.find_spec("pyarrow") is None, "pyarrow is not installed")
class ParquetTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.path = str(pathlib.Path(self.create_tempdir().full_path, "x.parquet"))

  def write(self, columns, rows_per_group=2):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), self.path, row_group_size=rows_per_group)

  def read(self, first=0, end=None, **settings):
    reader = text_files.DocumentReader(self.path, text_files.TextFormat(**settings), first, end)
    return [tuple(document) for document in reader], reader.lines

  def test_rows_are_documents_and_row_groups_are_ranges(self):
    self.write({"text": ["a", "b", None, "é", "e"], "id": [1, 2, 3, 4, 5], "x": [0.0] * 5})
    expected = [("a", "1"), ("b", "2"), ("", "3"), ("é", "4"), ("e", "5")]
    found, lines = self.read()
    self.assertEqual(found, [(*pair, "", i) for i, pair in enumerate(expected, 1)])
    self.assertEqual(lines, 5)
    self.assertLen(parquet_text.row_group_bytes(self.path), 3)
    self.assertEqual(self.read(1, 2), ([("", "3", "", 1), ("é", "4", "", 2)], 2))
    self.assertEqual(self.read(2), ([("e", "5", "", 1)], 1))

  def test_columns_have_other_names_or_no_ids(self):
    self.write({"body": ["a"], "url": ["u"]})
    self.assertEqual(self.read(text_field="body")[0], [("a", "", "", 1)])
    self.assertEqual(self.read(text_field="body", id_field="url")[0], [("a", "u", "", 1)])
    self.assertEqual(self.read(text_field="body", id_field="body")[0], [("a", "a", "", 1)])

  def test_files_that_cannot_be_used_are_errors(self):
    self.write({"body": [1]})
    with self.assertRaisesRegex(CorpusError, r"x\.parquet has no column 'text'\. .*body"):
      self.read()
    with self.assertRaisesRegex(CorpusError, r"x\.parquet: the column 'body' contains int64"):
      self.read(text_field="body")
    data = pathlib.Path(self.path).read_bytes()
    for damaged in (b"", data[:-20], b"no parquet at all"):
      pathlib.Path(self.path).write_bytes(damaged)
      with self.assertRaisesRegex(CorpusError, "Cannot read .*x.parquet"):
        self.read()


if __name__ == "__main__":
  absltest.main()
