"""Tests of mix manifests."""

import os
import pathlib

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.corpus import manifest as manifest_lib
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.errors import MissingFileError

_TESTDATA = pathlib.Path(__file__).parent.parent / "testdata"


class MixTest(parameterized.TestCase):

  def _write(self, content: str) -> str:
    return self.create_tempfile("mix.txt", content=content).full_path

  def _error(self, content: str, **kwargs) -> str:
    with self.assertRaises(CorpusError) as caught:
      manifest_lib.read_mix(self._write(content), **kwargs)
    return str(caught.exception)

  def test_a_real_manifest_is_read_in_order_with_its_tokenizer_filled_in(self):
    entries = manifest_lib.read_mix(
        _TESTDATA / "mix_excerpt.txt", tokenizer="allenai/dolma3-tokenizer"
    )
    self.assertLen(entries, 7)
    self.assertEqual(
        entries[0],
        manifest_lib.MixEntry(
            label="common_crawl_adult_content",
            path=(
                "preprocessed/dolma3-0625/v0.1-official/allenai/dolma3-tokenizer/common_crawl"
                "/adult_content/000000.npy"
            ),
            line=2,
        ),
    )
    self.assertEqual([entry.line for entry in entries], [2, 3, 4, 6, 7, 8, 9])
    self.assertEqual(
        entries[-1].path,
        "eval-data/perplexity/v3_small_allenai/dolma3-tokenizer/wikitext_103/val/part-0-00000.npy",
    )

  def test_absolute_paths_blanks_and_carriage_returns_are_fine(self):
    entries = manifest_lib.read_mix(
        self._write("\r\n  # note\n a , /x/y.npy \r\nb,s3://bucket/z.npy\n")
    )
    self.assertEqual(
        [(entry.label, entry.path) for entry in entries],
        [("a", "/x/y.npy"), ("b", "s3://bucket/z.npy")],
    )

  @parameterized.parameters(
      ("wiki", "expected exactly one comma, found 0: 'wiki'"),
      ("a,b,c", "expected exactly one comma, found 2: 'a,b,c'"),
      ("a,b\0c", "a label or path must not contain a NUL character: 'a,b\\x00c'"),
      (",b", "the label before the comma is empty: ',b'"),
      ("a,", "the path after the comma is empty: 'a,'"),
      (
          "a,x/{TOKEN}/y",
          "unknown placeholder {TOKEN}, expected {TOKENIZER} or none: 'a,x/{TOKEN}/y'",
      ),
      (
          "a,{TOKENIZER}/y",
          "the path needs a tokenizer's name for {TOKENIZER}, but none was given:"
          " 'a,{TOKENIZER}/y'",
      ),
  )
  def test_a_malformed_line_is_an_error_with_file_and_line(self, line, message):
    error = self._error(f"# first\n{line}\n")
    self.assertRegex(
        error, r"^The mix file .*mix\.txt has 1 malformed line; each line must be `label,path`:\n"
    )
    self.assertIn(f"mix.txt:2: {message}", error)

  def test_all_malformed_lines_are_reported_together(self):
    error = self._error("good,x\n" + "bad\n" * 12, tokenizer="t")
    self.assertIn("has 12 malformed lines", error)
    self.assertIn("mix.txt:11: ", error)
    self.assertNotIn("mix.txt:12: ", error)
    self.assertTrue(error.endswith("\n  … and 2 more"))

  def test_without_labels_the_second_part_of_each_path_is_the_label(self):
    lines = "#SOURCE: http://x (1MT)\npreprocessed/dclm/{TOKENIZER}/a.npy\nall/math/b.npy\n"
    entries = manifest_lib.read_mix(self._write(lines), tokenizer="t")
    self.assertEqual(
        entries,
        (
            manifest_lib.MixEntry("dclm", "preprocessed/dclm/t/a.npy", 2),
            manifest_lib.MixEntry("math", "all/math/b.npy", 3),
        ),
    )

  def test_a_missing_label_among_labelled_lines_is_an_error(self):
    error = self._error("wiki,preprocessed/wiki/a.npy\npreprocessed/math/b.npy\n")
    self.assertIn("mix.txt:2: expected exactly one comma, found 0", error)
    self.assertIn("expected exactly one comma", self._error("gs://bucket\n"))

  def test_a_manifest_without_files_is_an_error(self):
    self.assertRegex(self._error("# nothing\n"), r"mix\.txt names no files")

  def test_a_byte_order_mark_is_skipped(self):
    entries = manifest_lib.read_mix(self._write("\ufeffa,x.npy\n"))
    self.assertEqual(entries, (manifest_lib.MixEntry("a", "x.npy", 1),))
    self.assertLen(manifest_lib.read_mix(self._write("\ufeff# note\na,x.npy\n")), 1)

  def test_files_outside_the_base_are_named_with_their_lines(self):
    inside = "a,x.npy\na,b/../x.npy\na,/base/y.npy\na,b/..c/x.npy\n"
    manifest_lib.check_inside(manifest_lib.read_mix(self._write(inside)), "mix", "/base")
    outside = "b,../x.npy\nb,a/../../x.npy\nb,/bases/x.npy\nb,gs://base/x.npy\n"
    with self.assertRaises(CorpusError) as caught:
      entries = manifest_lib.read_mix(self._write(inside + outside))
      manifest_lib.check_inside(entries, "mix", "/base")
    self.assertRegex(
        str(caught.exception),
        "^In the mix file mix, 4 of 8 files are outside the base /base:\n  mix:5: ../x.npy\n"
        r"(?s:.*)\(--allow-outside\)\.$",
    )

  @parameterized.parameters("../x.npy", "gs://other/x.npy", "gs://base/../x.npy", "/x.npy")
  def test_a_path_may_also_leave_an_object_store(self, path):
    entries = manifest_lib.read_mix(self._write(f"a,x.npy\na,gs://base/x.npy\na,{path}\n"))
    with self.assertRaisesRegex(CorpusError, "1 of 3 files are outside"):
      manifest_lib.check_inside(entries, "mix", "gs://base")

  def test_files_that_are_listed_more_than_once_are_counted(self):
    entries = manifest_lib.read_mix(self._write("a,x\na,y\nb,./x\na,z\na,y\na,x\n"))
    self.assertEqual(
        manifest_lib.describe_repeats(entries),
        "2 of 3 files are listed more than once (x 3 times), and are read as often as they are"
        " listed.",
    )
    self.assertEqual(manifest_lib.describe_repeats(entries[:2]), "")

  def test_a_fifo_is_not_a_manifest(self):
    path = pathlib.Path(self.create_tempdir().full_path, "mix.txt")
    os.mkfifo(path)
    with self.assertRaisesRegex(CorpusError, "Cannot read the mix file .* is not a regular file"):
      manifest_lib.read_mix(path)

  def test_a_missing_manifest_is_an_error(self):
    message = "Cannot read the mix file /no/such.txt: No such file"
    with self.assertRaisesRegex(MissingFileError, message):
      manifest_lib.read_mix("/no/such.txt")

  def test_a_token_file_in_place_of_a_manifest_is_an_error(self):
    path = self.create_tempfile("x.npy", content=b"\xff\xfe\x00\x01", mode="wb").full_path
    with self.assertRaisesRegex(
        CorpusError, r"x\.npy is not UTF-8 text \(byte 0\)\. Check that it is not a"
    ):
      manifest_lib.read_mix(path)


if __name__ == "__main__":
  absltest.main()
