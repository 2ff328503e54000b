"""Tests of tokenizing units of text files."""

import pathlib

from absl.testing import absltest

from maxtext_olmo.corpus import part_files
from maxtext_olmo.corpus import text_files
from maxtext_olmo.corpus import text_units
from maxtext_olmo.corpus import tokenize_units
from maxtext_olmo.corpus import tokenizer as tokenizer_lib
from maxtext_olmo.corpus.storage import open_storage


class TokenizeUnitsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)
    source = tokenizer_lib.TokenizerSource.find("bytes")
    form = text_files.TextFormat()
    self.work = tokenize_units.TokenizeUnits(source, form, str(self.dir / "units"))

  def tokenize(self, *slices):
    unit = text_units.TextUnit(
        tuple(text_units.TextSlice(f"{self.dir}/{name}", *place) for name, *place in slices), 1
    )
    result = self.work(unit)
    self.assertStartsWith(result["file"], unit.key)
    path = str(self.dir / "units" / result["file"])
    documents = list(part_files.read_part(open_storage(), path, itemsize=2))
    return documents, [tokenize_units.SliceResult(*fields) for fields in result["slices"]]

  def test_documents_have_the_number_of_their_slice_and_their_line_in_it(self):
    lines = ['{"text": "a", "id": 7}', '{"text": ""}', "", '{"text": "bc"}']
    (self.dir / "x.jsonl").write_text("\n".join(lines))
    (self.dir / "y.txt").write_text("é")
    documents, counts = self.tokenize(("x.jsonl", 0, 5), ("x.jsonl", 5), ("y.txt",))
    self.assertEqual(
        documents,
        [
            part_files.EncodedDocument(b"a\0\0\1", 2, "7", "0", 1),
            part_files.EncodedDocument(b"b\0c\0\0\1", 3, "", "1", 3),
            part_files.EncodedDocument(b"\xc3\0\xa9\0\0\1", 3, "", "2", 1),
        ],
    )
    self.assertEqual(
        counts,
        [
            tokenize_units.SliceResult(documents=1, empty=0, tokens=2, lines=1),
            tokenize_units.SliceResult(documents=1, empty=1, tokens=3, lines=3),
            tokenize_units.SliceResult(documents=1, empty=0, tokens=3, lines=0),
        ],
    )

  def test_a_file_that_cannot_be_read_does_not_keep_others_from_being_read(self):
    (self.dir / "x.jsonl").write_text('{"text": "a"}\n{}\n')
    (self.dir / "y.txt").write_text("b")
    documents, counts = self.tokenize(("x.jsonl",), ("none",), ("y.txt",))
    self.assertEqual([(one.data[:1], one.source) for one in documents], [(b"a", "0"), (b"b", "2")])
    self.assertRegex(counts[0].error, r"x\.jsonl:2: expected a JSON object")
    self.assertRegex(counts[1].error, "Cannot read .*none")
    self.assertEqual((counts[2].error, counts[2].tokens), ("", 2))

  def test_each_attempt_has_files_of_its_own(self):
    (self.dir / "y.txt").write_text("b")
    for _ in range(2):
      self.tokenize(("y.txt",))
    self.assertLen(list((self.dir / "units").glob("*.npy")), 2)

  def test_results_depend_on_the_settings_but_not_on_where_units_lie(self):
    source = tokenizer_lib.TokenizerSource.find("bytes")
    form = text_files.TextFormat()
    elsewhere = tokenize_units.TokenizeUnits(source, form, "elsewhere")
    self.assertEqual(elsewhere.settings, self.work.settings)
    for other in (
        tokenize_units.TokenizeUnits(source, text_files.TextFormat("##"), "elsewhere"),
        tokenize_units.TokenizeUnits(
            tokenizer_lib.TokenizerSource("a", digest="1"), form, "elsewhere"
        ),
    ):
      self.assertNotEqual(other.settings, self.work.settings)


if __name__ == "__main__":
  absltest.main()
