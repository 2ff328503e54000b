"""Tests of reading documents from text files."""

import gzip
import importlib.util
import json
import os
import pathlib

import hypothesis
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import strategies as st

from maxtext_olmo.corpus import text_files
from maxtext_olmo.errors import CorpusError

_needs_zstd = absltest.skipIf(
    importlib.util.find_spec("zstandard") is None, "zstandard is not installed"
)


class ReadDocumentsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)

  def _read(self, name: str, content: bytes, **kwargs) -> list[str]:
    path = self.dir / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return [document.text for document in text_files.read_documents(str(path), **kwargs)]

  def _names(self, name: str, content: str, **kwargs) -> list[tuple[str, int]]:
    (self.dir / name).write_text(content)
    found = list(text_files.read_documents(str(self.dir / name), **kwargs))
    self.assertEqual({document.source for document in found}, {str(self.dir / name)})
    return [(document.name, document.line) for document in found]

  def test_documents_are_named_by_their_id_or_their_file_and_line(self):
    lines = [
        {"id": "a"},
        {"id": 7},
        {"id": None},
        {},
        {"id": ["x"]},
        {"id": True},
        {"id": "b" * 2000},
    ]
    text = "\n" + "".join(json.dumps({"text": "x", **line}) + "\n" for line in lines)
    path = f"{self.dir}/x.jsonl"
    expected = ["a", "7", *(f"{path}:{line}" for line in range(4, 9))]
    self.assertEqual(self._names("x.jsonl", text), list(zip(expected, range(2, 9))))
    named = '{"text": "x", "url": "u\\ud800"}\n'
    self.assertEqual(self._names("x.jsonl", named, id_field="url"), [("u\\ud800", 1)])
    self.assertEqual(self._names("x.txt", "a\nb\n"), [(f"{self.dir}/x.txt:1", 1)])
    self.assertEqual(
        self._names("y.txt", "a\n\n\nb\nc\n\nd", separator=""),
        [(f"{self.dir}/y.txt:{line}", line) for line in (1, 4, 7)],
    )

  def test_a_file_name_that_is_not_utf8_can_be_a_source(self):
    path = os.fsdecode(os.fsencode(str(self.dir)) + b"/\xff.txt")
    with open(path, "w") as file:
      file.write("x")
    ((_, name, source, _),) = text_files.read_documents(path)
    self.assertEqual((name, source), (f"{self.dir}/\\xff.txt:1", f"{self.dir}/\\xff.txt"))

  @parameterized.parameters("x.txt", "x.txt.gz", "README")
  def test_a_text_file_is_one_document_byte_for_byte(self, name):
    content = "a\r\n\n\xe9\x0b\u2028b\rc\n"
    self.assertEqual(self._read(name, content.encode()), [content])

  @parameterized.parameters("x.jsonl", "x.ndjson", "x.jsonl.gz")
  def test_a_json_lines_file_has_a_document_in_each_line(self, name):
    lines = b'{"text": "a\\nb", "id": 1}\n\n{"text": "\\u00e9"}'
    self.assertEqual(self._read(name, lines), ["a\nb", "é"])

  def test_the_field_may_have_another_name(self):
    self.assertEqual(self._read("x.jsonl", b'{"content": "a"}', text_field="content"), ["a"])

  @parameterized.parameters(
      (b"{}", "KeyError: 'text'"),
      (b'{"text": 3}', "TypeError: 'text' is not text"),
      (b"[1]", "TypeError: "),
      (b"{", "JSONDecodeError: "),
      (100_000 * b"[", "RecursionError: "),
      (b'{"text": "\\ud800"}', "UnicodeEncodeError: "),
  )
  def test_a_bad_line_is_an_error_with_file_and_line(self, line, message):
    with self.assertRaisesRegex(
        CorpusError, rf"x\.jsonl:2: expected a JSON object with text in the field 'text': {message}"
    ):
      self._read("x.jsonl", json.dumps({"text": "ok"}).encode() + b"\n" + line)

  @parameterized.parameters(("<|end|>", b"a\nb\n<|end|>\nc\n<|end|>\n"), ("", b"a\nb\n\n\nc\n"))
  def test_a_separator_ends_a_document(self, separator, content):
    self.assertEqual(self._read("x.txt", content, separator=separator), ["a\nb\n", "c\n"])

  def test_text_that_is_not_utf8_is_an_error(self):
    with self.assertRaisesRegex(
        CorpusError,
        r"x\.bin is not UTF-8 text \(it contains the byte 0xff\)\. Convert it, or exclude",
    ):
      self._read("x.bin", b"abc\xff")

  def test_an_unreadable_file_is_an_error(self):
    with self.assertRaisesRegex(CorpusError, "Cannot read /no/such: "):
      list(text_files.read_documents("/no/such"))
    (self.dir / "cut.gz").write_bytes(gzip.compress(os.urandom(1000))[:500])
    with self.assertRaisesRegex(CorpusError, r"cut\.gz"):
      list(text_files.read_documents(str(self.dir / "cut.gz")))
    (self.dir / "bad.gz").write_bytes(gzip.compress(b"")[:10] + 20 * b"\xff")
    with self.assertRaisesRegex(CorpusError, r"Cannot read .*bad\.gz"):
      list(text_files.read_documents(str(self.dir / "bad.gz")))
    os.mkfifo(self.dir / "fifo")
    with self.assertRaisesRegex(CorpusError, "fifo is not a regular file"):
      list(text_files.read_documents(str(self.dir / "fifo")))


def _ranges(path, form, unit):
  """Returns the documents of consecutive ranges of a file, with lines counted from its start."""
  found, lines = [], 0
  size = os.path.getsize(path)
  for first in range(0, size, unit):
    reader = text_files.DocumentReader(str(path), form, first, min(size, first + unit))
    found += [(text, name, line + lines) for text, name, _, line in reader]
    lines += reader.lines
  return found


class RangesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)

  @hypothesis.given(
      lines=st.lists(st.sampled_from(["a", "", "é\u2028", "--", " --\t", "bb", "\r"]), max_size=12),
      ends_in_newline=st.booleans(),
      separator=st.sampled_from(["", "--"]),
      unit=st.integers(1, 20),
  )
  @hypothesis.settings(max_examples=200, deadline=None)
  def test_ranges_of_text_have_the_documents_of_the_file(
      self, lines, ends_in_newline, separator, unit
  ):
    path = self.dir / "x.txt"
    path.write_bytes(("\n".join(lines) + "\n" * ends_in_newline).encode())
    form = text_files.TextFormat(separator)
    reader = text_files.DocumentReader(str(path), form)
    whole = [(text, name, line) for text, name, _, line in reader]
    self.assertEqual(_ranges(path, form, unit), whole)

  @hypothesis.given(
      lines=st.lists(st.sampled_from(['{"text": "é"}', "", '{"text": "b", "id": 4}']), max_size=9),
      ends_in_newline=st.booleans(),
      unit=st.integers(1, 50),
  )
  @hypothesis.settings(max_examples=100, deadline=None)
  def test_ranges_of_json_lines_have_the_documents_of_the_file(self, lines, ends_in_newline, unit):
    path = self.dir / "x.jsonl"
    path.write_bytes(("\n".join(lines) + "\n" * ends_in_newline).encode())
    form = text_files.TextFormat()
    reader = text_files.DocumentReader(str(path), form)
    whole = [(text, name, line) for text, name, _, line in reader]
    self.assertEqual(_ranges(path, form, unit), whole)

  @parameterized.parameters(1, 13, 14, 15, 28, 29)
  def test_an_error_in_a_range_names_the_line_of_the_file(self, first):
    path = self.dir / "x.jsonl"
    path.write_text('{"text": "a"}\n{"text": "b"}\n\n[]\n')
    with self.assertRaisesRegex(CorpusError, r"x\.jsonl:4: expected a JSON object"):
      list(text_files.DocumentReader(str(path), text_files.TextFormat(), first))

  @parameterized.parameters(
      ("x.txt", None, False),
      ("x.txt", "", True),
      ("x.jsonl", None, True),
      ("x.jsonl.gz", None, False),
      ("x.txt.zst", "", False),
      ("x.parquet", "", False),
  )
  def test_only_lines_that_are_not_compressed_have_ranges(self, path, separator, splits):
    self.assertEqual(text_files.TextFormat(separator).can_split(path), splits)


@_needs_zstd
class ZstandardTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)

  def write(self, name, *frames):
    import zstandard

    data = b"".join(zstandard.ZstdCompressor().compress(frame) for frame in frames)
    (self.dir / name).write_bytes(data)
    return str(self.dir / name), data

  def texts(self, path):
    return [document.text for document in text_files.read_documents(path)]

  def test_text_and_json_lines_of_several_frames(self):
    content = os.urandom(300_000).hex()
    path, _ = self.write("x.txt.zst", content.encode(), b"", b"end")
    self.assertEqual(self.texts(path), [content + "end"])
    path, _ = self.write("x.jsonl.zst", b'{"text": "a"}\n{"te', b'xt": "b"}\n')
    self.assertEqual(self.texts(path), ["a", "b"])

  def test_damaged_files_are_errors(self):
    path, data = self.write("x.txt.zst", os.urandom(100_000).hex().encode())
    for damaged, message in (
        (data[:-10], "ends before its end marker"),
        (data[:50_000], "ends before its end marker"),
        (b"no zstd", "Cannot read .*x.txt.zst"),
    ):
      pathlib.Path(path).write_bytes(damaged)
      with self.assertRaisesRegex(CorpusError, message):
        self.texts(path)


class ProbeTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)

  @parameterized.parameters(
      ("x.txt", b"\xff", "not UTF-8"),
      ("x.txt.gz", b"x", "Cannot read"),
      ("x.jsonl", b'\n{"body": "a"}', "x.jsonl:2: expected"),
  )
  def test_a_file_whose_beginning_cannot_be_used_is_an_error(self, name, content, message):
    (self.dir / name).write_bytes(content)
    with self.assertRaisesRegex(CorpusError, message):
      text_files.probe(str(self.dir / name), text_files.TextFormat())

  @parameterized.parameters(
      ("x.txt", b""),
      ("x.jsonl", b""),
      ("x.jsonl", b'{"text": "a"}\n['),
      ("x.txt", b"a" * ((1 << 16) - 1) + "é".encode()),
      ("x.txt", b"a" * (1 << 16) + b"\xff"),
  )
  def test_only_the_beginning_is_read(self, name, content):
    (self.dir / name).write_bytes(content)
    text_files.probe(str(self.dir / name), text_files.TextFormat())


if __name__ == "__main__":
  absltest.main()
