"""Tests of the text of rows."""

import numpy as np
from absl.testing import absltest

from maxtext_olmo import errors
from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.corpus import tokenizer as tokenizer_lib
from maxtext_olmo.inspection import text
from maxtext_olmo.rows import explain
from tests import corpora


def _row(tokens, documents=()):
  part = explain.PartExplanation("f", "l", 0, 0, len(tokens), 0, 2 * len(tokens), tuple(documents))
  return explain.RowExplanation(
      0, 0, 0, 0, "l", len(tokens), True, 1, 1.0, (part,), np.array(tokens)
  )


class TextTest(absltest.TestCase):

  def test_control_characters_are_shown_and_not_obeyed(self):
    self.assertEqual(text.printable("a\x1b[31mb\r\n\tc\u202e"), "a\\x1b[31mb\\x0d\n\tc\\u202e")
    self.assertEqual(text.printable("naïve 漢字 🙂"), "naïve 漢字 🙂")

  def test_documents_are_headed_by_what_the_row_has_of_them(self):
    spans = [explain.DocumentSpan(4, 0, 7, 9, 10), explain.DocumentSpan(5, 3, 0, 2, 3)]
    row = _row([*b"ab", 256, *b"cd", 256], spans)
    self.assertEqual(
        text.pieces(row, tokenizer_lib.ByteTokenizer()),
        [
            ("document 4, end: tokens 7 to 9 of 10, at column 0", "ab"),
            ("document 5, whole, 3 tokens, at column 3", "cd"),
        ],
    )

  def test_a_document_is_headed_by_its_name_and_where_it_came_from(self):
    span = explain.DocumentSpan(4, 0, 0, 9, 10, "wiki-7", "wiki.jsonl", 3)
    self.assertEqual(
        text.describe_span(span),
        "document 4 (wiki-7, from wiki.jsonl:3), whole, 10 tokens, at column 0",
    )
    self.assertEqual(text.describe_name("a.txt:1", "a.txt", 1), " (a.txt:1)")
    self.assertEqual(text.describe_name("", "a.txt"), " (from a.txt)")
    self.assertEqual(text.describe_name(""), "")
    self.assertEqual(text.describe_name("a\x1b[1m\nb"), " (a\\x1b[1m\\nb)")

  def test_without_a_document_index_documents_end_at_eos(self):
    row = _row([*b"ab", 256, *b"cde"])
    self.assertEqual(
        text.pieces(row, tokenizer_lib.ByteTokenizer()),
        [("columns 0 to 2", "ab"), ("columns 3 to 5", "cde")],
    )

  def test_the_tokenizer_of_the_index_is_used_if_it_is_bytes(self):
    path, _ = corpora.write_corpus(self.create_tempdir().full_path)
    index = index_lib.load_index(path)
    with self.assertRaisesRegex(errors.ConfigError, r"'test', is needed\. Give .*--tokenizer"):
      text.tokenizer_of(index)
    self.assertEqual(text.tokenizer_of(index, "bytes").name, "bytes")

  def test_a_verdict_tells_masked_from_excluded_tokens(self):
    for kept, excluded, told in (
        (None, 0, ""),
        (True, 0, "yes"),
        (True, 3, "part"),
        (True, 8, "EXCLUDED"),
        (False, 3, "MASKED"),
    ):
      self.assertEqual(text.describe_verdict(kept, excluded, 8), told)


if __name__ == "__main__":
  absltest.main()
