"""Tests of checking a corpus against its index."""

import os
import pathlib
import shutil

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.corpus import scan
from maxtext_olmo.corpus import verify
from maxtext_olmo.corpus.storage import stores
from maxtext_olmo.corpus.work.options import WorkOptions
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.errors import MissingFileError
from tests import corpora
from tests import object_server
from tests.cli import runner


class VerifyTestCase(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)
    path, _ = corpora.write_corpus(self.dir)
    self.data = self.dir / "data"
    for file in self.data.iterdir():
      corpora.end_documents(file)
    self.index = index_lib.load_index(path)

  def _findings(self, index=None, **kwargs) -> list[tuple[str, str, str]]:
    report = verify.verify_corpus(index or self.index, **kwargs)
    return [(f.level, os.path.basename(f.path), f.message) for f in report.findings]


class CheckSizesTest(VerifyTestCase):

  @parameterized.parameters(1, 16)
  def test_a_whole_corpus_passes(self, workers):
    verify.check_sizes(self.index, workers=workers)

  def test_every_missing_or_changed_file_is_named(self):
    os.unlink(self.data / "part-000.npy")
    with open(self.data / "part-002.npy", "ab") as file:
      file.write(b"x")
    with self.assertRaises(MissingFileError) as caught:
      verify.check_sizes(self.index)
    self.assertEqual(
        str(caught.exception),
        "2 of 4 files of the corpus do not match the index:\n"
        f"  {self.data}/part-000.npy: No such file or directory\n"
        f"  {self.data}/part-002.npy: expected 14 bytes, found 15\n"
        f"The index expects them below {self.data}. If the corpus has moved, remap its paths"
        " (olmo_path_remap_from and olmo_path_remap_to), or load the index with the new base. If"
        " files were changed, restore them, or build the index again with `maxtext-olmo index"
        " build` and start a new run.",
    )

  def test_a_long_list_is_shortened(self):
    index = index_lib.build_index(
        [(str(self.data / "part-000.npy"), "l")] * 30, 8, tokenizer="t", dtype="uint16"
    )
    os.truncate(self.data / "part-000.npy", 600)
    with self.assertRaisesRegex(CorpusError, r"(?s)^30 of 30 files .*\n  … and 20 more\n"):
      verify.check_sizes(index)

  def test_a_path_that_is_not_a_regular_file_is_named(self):
    for make in (os.mkdir, os.mkfifo):
      path = self.data / "part-002.npy"
      os.rename(path, self.dir / f"before-{make.__name__}")
      make(path)
      with self.assertRaisesRegex(CorpusError, "part-002.npy is not a regular file"):
        verify.check_sizes(self.index)
      self.assertRegex(self._findings()[0][2], "is not a regular file")

  def test_a_remap_is_followed(self):
    shutil.move(self.data, self.dir / "moved")
    verify.check_sizes(self.index, path_remap={str(self.data): str(self.dir / "moved")})

  def test_an_index_without_sizes_or_header_offsets_finds_headers_by_the_size(self):
    # As with MaxText's index of .npy files whose paths are remapped: the data offset is unknown.
    path = self.dir / "x.npy"
    np.save(path, np.zeros(16, np.uint32))
    index = index_lib.build_index(
        [("gs://b/x.npy", "l")], 8, tokenizer="t", header_reader=lambda _: ("uint32", (16,))
    )
    with self.assertRaisesRegex(CorpusError, "x.npy: expected 64 bytes, found 192"):
      verify.check_sizes(index, path_remap={"gs://b": str(self.dir)})


class VerifyCorpusTest(VerifyTestCase):

  @parameterized.parameters(None, 1, 3)
  def test_a_good_corpus_is_ok(self, workers):
    report = verify.verify_corpus(self.index, vocab_size=100, eos_id=0, workers=workers)
    self.assertTrue(report.ok)
    self.assertEqual((report.files, report.tokens, report.errors), (4, 1004, ()))
    self.assertEqual(
        report.checks,
        ("sizes", "data offsets", "dtype (from samples)", "ids (vocab_size 100)", "EOS (id 0)"),
    )
    self.assertEqual(report.unchecked, ("checksums: the index has none",))

  def test_unchecked_properties_are_reported(self):
    report = verify.verify_corpus(self.index)
    self.assertEqual(
        report.unchecked,
        (
            "ids: no vocab_size was given",
            "EOS: no eos_id was given",
            "checksums: the index has none",
        ),
    )

  def test_missing_files_and_wrong_sizes_are_errors(self):
    os.unlink(self.data / "part-000.npy")
    os.truncate(self.data / "part-003.npy", 1000)
    self.assertEqual(
        self._findings(vocab_size=100),
        [
            ("error", "part-000.npy", "No such file or directory"),
            ("error", "part-003.npy", "expected 1028 bytes, found 1000"),
        ],
    )

  def test_the_first_bad_id_is_reported_with_its_place(self):
    path = self.data / "part-003.npy"
    tokens = np.fromfile(path, np.uint16)
    tokens[[200, 513]] = 999
    tokens.tofile(path)
    self.assertEqual(
        self._findings(vocab_size=100),
        [
            (
                "error",
                "part-003.npy",
                "token 200 (byte 400) is 999, expected less than vocab_size 100; 1 more in this"
                " file",
            )
        ],
    )
    self.assertEmpty(self._findings(vocab_size=1000))

  def test_byte_offsets_include_the_header(self):
    np.save(self.dir / "x.npy", np.array([1, 2, 7], np.uint16))
    index = index_lib.build_index(
        [(str(self.dir / "x.npy"), "l")], 1, tokenizer="t", dtype="uint16"
    )
    self.assertEqual(
        self._findings(index, vocab_size=7),
        [("error", "x.npy", "token 2 (byte 132) is 7, expected less than vocab_size 7")],
    )

  def test_places_beyond_the_first_piece_are_correct(self):
    place = scan.CHUNK_BYTES // 2 + 5
    tokens = np.ones(scan.CHUNK_BYTES, np.uint16)
    tokens[place] = 50
    tokens[-1] = 40
    tokens.tofile(self.dir / "x.npy")
    index = index_lib.build_index(
        [(str(self.dir / "x.npy"), "l")], 8, tokenizer="t", dtype="uint16"
    )
    self.assertEqual(
        self._findings(index, vocab_size=50, eos_id=40),
        [
            (
                "error",
                "x.npy",
                f"token {place} (byte {2 * place}) is 50, expected less than vocab_size 50",
            )
        ],
    )

  def test_a_vocabulary_wider_than_the_dtype_is_fine(self):
    self.assertEmpty(self._findings(vocab_size=1 << 40, eos_id=0))

  def test_a_file_without_eos_is_a_warning_and_no_file_with_it_an_error(self):
    np.full(100, 5, np.uint16).tofile(self.data / "part-000.npy")
    index = index_lib.build_index(
        [(str(path), "l") for path in sorted(self.data.iterdir())], 8, tokenizer="t", dtype="uint16"
    )
    report = verify.verify_corpus(index, eos_id=0)
    self.assertTrue(report.ok)
    self.assertEqual(
        report.warnings,
        (
            verify.Finding(
                "warning",
                f"{self.data}/part-000.npy",
                "does not contain the EOS id 0: no document ends in this file",
            ),
        ),
    )
    report = verify.verify_corpus(index, eos_id=70_000)
    self.assertFalse(report.ok)
    self.assertEqual(
        report.findings,
        (
            verify.Finding(
                "error",
                "",
                "no file contains the EOS id 70000: check that it belongs to this tokenizer",
            ),
        ),
    )

  @parameterized.parameters(True, False)
  def test_an_id_that_merely_occurs_is_not_an_eos(self, at_the_end):
    for path in self.data.iterdir():
      tokens = np.fromfile(path, np.uint16)
      tokens[9::30] = 10
      if at_the_end:
        tokens[-1] = 10
      tokens.tofile(path)
    report = verify.verify_corpus(self.index, eos_id=10)
    self.assertTrue(report.ok)
    self.assertRegex(
        report.warnings[-1].message,
        "^id 10 may not be the EOS, because "
        + ("" if at_the_end else "most files do not end with it and ")
        + "most documents would be very short: .* documents, median about 30 tokens, longest ",
    )

  def test_an_empty_file_needs_no_eos(self):
    (self.data / "part-009.npy").touch()
    index = index_lib.build_index(
        [(str(path), "l") for path in sorted(self.data.iterdir())], 8, tokenizer="t", dtype="uint16"
    )
    self.assertEmpty(self._findings(index, vocab_size=100, eos_id=0))

  @parameterized.parameters(("uint16", "uint32"), ("uint32", "uint16"))
  def test_another_dtype_is_recognised(self, actual, declared):
    corpora.write_tokens(self.dir / "x.npy", 3000, seed=0, vocab_size=50_000, dtype=actual)
    index = index_lib.build_index(
        [(str(self.dir / "x.npy"), "l")], 8, tokenizer="t", dtype=declared
    )
    self.assertEqual(
        self._findings(index, vocab_size=50_000),
        [
            (
                "error",
                "x.npy",
                f"the data look like {actual}, but the index says {declared}. Build the index again"
                f" with `--dtype {actual}`.",
            )
        ],
    )

  def test_an_incomplete_token_at_the_end_is_a_warning(self):
    with open(self.data / "part-003.npy", "ab") as file:
      file.write(b"x")
    index = index_lib.build_index(
        [(str(path), "l") for path in sorted(self.data.iterdir())], 8, tokenizer="t", dtype="uint16"
    )
    self.assertEqual(
        self._findings(index, vocab_size=100),
        [
            (
                "warning",
                "part-003.npy",
                "ends with an incomplete token (1 of the 2 bytes of a uint16), which is never read;"
                " the file may be truncated",
            )
        ],
    )

  def test_an_added_or_removed_header_is_an_error(self):
    tokens = np.fromfile(self.data / "part-003.npy", np.uint16)
    np.save(self.data / "part-003.npy", tokens[: 514 - 64])  # Of the same size in bytes.
    self.assertEqual(
        self._findings(vocab_size=100),
        [("error", "part-003.npy", "the tokens begin at byte 128, but the index says 0")],
    )

  @parameterized.parameters("xxh3", "sha256")
  def test_changed_content_of_the_same_size_is_found_by_checksums(self, algorithm):
    np.save(self.data / "part-004.npy", np.arange(9, dtype=np.uint16))
    index = index_lib.build_index(
        [(str(path), "l") for path in sorted(self.data.iterdir())],
        8,
        tokenizer="t",
        dtype="uint16",
        checksums=algorithm,
    )
    report = verify.verify_corpus(index)
    self.assertTrue(report.ok)
    self.assertIn("checksums of 5 files", report.checks)
    for name in ("part-001.npy", "part-004.npy"):
      with open(self.data / name, "r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(b"\x07\x00")
    findings = self._findings(index)
    self.assertEqual([name for _, name, _ in findings], ["part-001.npy", "part-004.npy"])
    self.assertRegex(
        findings[0][2],
        f"^the {algorithm} is [0-9a-f]+, but the index says [0-9a-f]+: the content has changed$",
    )

  @parameterized.parameters((0, 4), (3, 4), (128, 2))
  def test_sums_of_pieces_are_checked_piece_by_piece(self, damaged, header):
    tokens = np.arange(600, dtype=np.uint16)
    tokens[99::100] = 0
    path = self.dir / "x.npy"
    np.save(path, tokens) if header == 2 else tokens.tofile(path)
    index = index_lib.build_index(
        [(str(path), "l")], 8, tokenizer="t", dtype="uint16", checksums="xxh3-pieces-256"
    )
    self.assertStartsWith(index.files[0].checksum, "xxh3-pieces-256:")
    report = verify.verify_corpus(index, vocab_size=600, eos_id=0)
    self.assertEqual((report.findings, report.checks[-1]), ((), "checksums of 1 file"))
    with open(path, "r+b") as file:
      file.seek(256 + damaged)
      file.write(b"\x07\x00")
    ((_, _, message),) = self._findings(index)
    self.assertRegex(message, "^the xxh3-pieces-256 is [0-9a-f]{32}, but .* in bytes 256 to 512$")

  def test_the_report_does_not_depend_on_the_pieces(self):
    tokens = np.fromfile(self.data / "part-003.npy", np.uint16)
    tokens[[100, 200, 513]] = 999
    tokens.tofile(self.data / "part-003.npy")
    os.unlink(self.data / "part-001.npy")
    settings = {"vocab_size": 100, "eos_id": 0}
    reports = []
    for piece_bytes in (2, 64, 200, 1 << 20):
      outcome = verify.check_pieces(self.index, WorkOptions(), piece_bytes=piece_bytes, **settings)
      reports.append(verify.make_report(self.index, outcome, **settings))
    self.assertEqual(reports[1:], reports[:1] * 3)
    self.assertEqual(reports[0], verify.verify_corpus(self.index, **settings))
    self.assertRegex(reports[0].errors[1].message, "token 100 .byte 200. is 999.*; 2 more in")

  def _serve_files(self):
    """Returns a server of the files, and an index of what it serves."""
    names = sorted(path.name for path in self.data.iterdir())
    server = self.enter_context(
        object_server.ObjectServer({f"b/{n}": (self.data / n).read_bytes() for n in names})
    )
    self.addCleanup(stores.use_by_default, stores.StoreOptions())
    stores.use_by_default(stores.StoreOptions(server.url, "here", anonymous=True))
    index = index_lib.build_index(
        [(name, "l") for name in names], 8, tokenizer="t", dtype="uint16", base="s3://b"
    )
    return server, index

  def test_a_file_that_could_not_be_read_is_read_again_by_a_later_run(self):
    server, index = self._serve_files()
    index.save(path := str(self.dir / "remote.json"))
    args = ("verify", path, "--vocab-size", 100, "--anonymous", "--region", "here")
    args += ("--endpoint", server.url)
    server.faults = lambda _, path: "403" if path.endswith("part-002.npy") else ""
    code, out, _ = runner.run(*args)
    self.assertEqual(code, 1)
    self.assertRegex(out, "part-002.npy.*403")
    self.assertIn("NOT OK: 1 error", out)
    server.faults = lambda *_: ""
    code, out, _ = runner.run(*args)
    self.assertEqual(code, 0, out)

  def test_an_object_that_was_replaced_is_found_by_its_etag(self):
    server, index = self._serve_files()
    report = verify.verify_corpus(index)
    self.assertEqual((report.findings, report.checks[-1]), ((), "ETags of 4 objects"))
    data = bytearray(server.objects["b/part-000.npy"])
    data[0] ^= 1
    server.objects["b/part-000.npy"] = bytes(data)
    ((_, name, message),) = self._findings(index)
    self.assertEqual(name, "part-000.npy")
    self.assertRegex(
        message, "^the store's ETag is .*, but the index says .*: the object was replac"
    )

  def test_a_remap_is_followed(self):
    shutil.move(self.data, self.dir / "moved")
    self.assertLen(self._findings(), 4)
    remap = {str(self.data): str(self.dir / "moved")}
    self.assertEmpty(self._findings(path_remap=remap, vocab_size=100))

  @parameterized.parameters(
      ({"vocab_size": 0}, "vocab_size must be 1 or more, got 0"),
      ({"eos_id": -1}, "eos_id must be 0 or more, got -1"),
  )
  def test_impossible_numbers_are_errors(self, kwargs, message):
    with self.assertRaisesRegex(ConfigError, message):
      verify.verify_corpus(self.index, **kwargs)

  def test_errors_come_before_warnings(self):
    np.full(333, 5, np.uint16).tofile(self.data / "part-000.npy")
    os.unlink(self.data / "part-003.npy")
    self.assertEqual([f[0] for f in self._findings(eos_id=0)], ["error", "warning"])


if __name__ == "__main__":
  absltest.main()
