"""Tests for the conversion of harness requests to rows."""

import dataclasses
import doctest
import importlib.util
import unittest

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from maxtext_olmo import errors
from maxtext_olmo.evaluation import requests as requests_lib
from maxtext_olmo.evaluation import tokenizer as tokenizer_lib
from tests.evaluation import tokenizer_test

HAS_HARNESS = importlib.util.find_spec("lm_eval") is not None
needs_harness = unittest.skipUnless(
    HAS_HARNESS, "lm-evaluation-harness is missing: pip install -e '.[eval]'"
)


@dataclasses.dataclass(frozen=True)
class Request:
  """The fields of a harness request that this library reads."""

  args: tuple


def byte_tokenizer():
  return tokenizer_lib.load_eval_tokenizer("bytes")


def harness_encoder(tokenizer):
  """Encodes requests as the harness does, with our tokenizer."""
  from lm_eval.api.model import TemplateLM

  class Encoder(TemplateLM):
    """Records the requests that it would score."""

    eot_token_id = tokenizer.eos_id
    prefix_token_id = tokenizer.prefix_id
    loglikelihood_rolling = generate_until = None

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
      special = add_special_tokens is not False
      return tokenizer.encode([string], special_tokens=special)[0].tolist()

    def _loglikelihood_tokens(self, requests, **kwargs):
      return [(context, continuation) for _, context, continuation in requests]

  return Encoder()


class RequestsTest(parameterized.TestCase):

  @needs_harness
  def test_the_documented_examples_hold(self):
    found = doctest.testmod(requests_lib)
    self.assertEqual(found.failed, 0)
    self.assertGreater(found.attempted, 3)

  def test_a_request_without_a_prefix_has_an_empty_one_and_other_keys_stay(self):
    parsed = requests_lib.ParseLMEval("r").map({"r": Request(("text",)), "idx": 3})
    self.assertEqual(parsed, {"idx": 3, "prefix": "", "text": "text"})

  @needs_harness
  @settings(deadline=None)
  @given(
      st.lists(
          st.tuples(
              st.text("the cat sé\n", max_size=12), st.text(" cat<s>", min_size=1, max_size=9)
          ),
          min_size=1,
          max_size=6,
      )
  )
  def test_bytes_are_split_as_the_harness_splits_them(self, pairs):
    self._check_split(byte_tokenizer(), pairs)

  @needs_harness
  def test_words_are_split_as_the_harness_splits_them(self):
    words = ["", "the", "the ", "the cat ", "cat  ", "<s>cat", "<|endoftext|>the cat"]
    pairs = [(context, text) for context in words for text in words if text]
    for adds_bos in (False, True):
      for config in ({}, {"bos_token": "<s>"}):
        directory = tokenizer_test.write_tokenizer(
            self.create_tempdir().full_path, adds_bos=adds_bos, config=config
        )
        self._check_split(tokenizer_lib.load_eval_tokenizer(directory), pairs)

  def _check_split(self, tokenizer, pairs):
    harness = harness_encoder(tokenizer)
    found = requests_lib.encode_requests(tokenizer, pairs)
    for pair, (context, continuation) in zip(pairs, found):
      # It has no answer for a context of spaces alone, which leaves nothing to condition on.
      if pair[0].strip() or not pair[0]:
        ((their_context, theirs),) = harness.loglikelihood([Request(pair)], disable_tqdm=True)
        self.assertEqual((context.tolist(), continuation.tolist()), (their_context, theirs), pair)
      self.assertNotEmpty(context)

  def test_a_context_of_spaces_is_conditioned_on_the_prefix_token(self):
    ((context, continuation),) = requests_lib.encode_requests(byte_tokenizer(), [("  ", "a")])
    self.assertEqual((context.tolist(), continuation.tolist()), ([256], [32, 32, 97]))

  @needs_harness
  @settings(deadline=None)
  @given(st.integers(0, 40), st.integers(1, 9))
  def test_rolling_windows_are_those_of_the_harness_at_every_length(self, length, max_length):
    from lm_eval import utils

    tokens = list(range(length))
    theirs = [
        utils.make_disjoint_window(window)
        for window in utils.get_rolling_token_windows(tokens, 99, max_length, 1)
    ]
    rows = list(requests_lib.windows(np.array([99, *tokens]), length, max_length, request=0))
    self.assertEqual([row.tokens.tolist() for row in rows], [a + b for a, b in theirs])
    self.assertEqual([row.scored for row in rows], [len(b) for _, b in theirs])

  @settings(deadline=None)
  @given(st.integers(1, 12), st.integers(0, 40), st.integers(1, 9))
  def test_every_token_is_scored_once_at_every_length(self, context, scored, max_length):
    tokens = np.arange(context + scored)
    rows = list(requests_lib.windows(tokens, scored, max_length, request=0))
    seen = np.concatenate([row.tokens[-row.scored :] for row in rows] or [np.zeros(0, int)])
    np.testing.assert_array_equal(seen, tokens[context:])
    self.assertEqual([row.sequence for row in rows], list(range(len(rows))))
    for row in rows:
      self.assertLessEqual(row.length, max_length)
      # Each is full, or has all there is before it.
      self.assertTrue(row.length == max_length or row.tokens[0] == 0)

  def test_a_token_with_nothing_before_it_cannot_be_scored(self):
    with self.assertRaisesRegex(ValueError, "3 of 3 tokens"):
      list(requests_lib.windows(np.arange(3), 3, None, request=0))

  def test_a_long_context_loses_its_beginning_and_the_continuation_nothing(self):
    rows = requests_lib.request_rows(byte_tokenizer(), [("x" * 50, "abc")], max_length=8)
    self.assertLen(rows, 1)
    self.assertEqual(bytes(rows[0].tokens.tolist()), b"xxxxxxabc")
    self.assertEqual(rows[0].scored, 3)

  def test_a_continuation_beyond_the_limit_is_scored_whole_in_windows(self):
    rows = requests_lib.request_rows(byte_tokenizer(), [("x", "abcdefghij")], max_length=4)
    self.assertEqual([row.scored for row in rows], [4, 4, 2])

  def test_with_truncation_error_a_long_request_is_an_error(self):
    arguments = [("x", "a"), ("x" * 50, "abc")]
    with self.assertRaisesRegex(
        errors.ConfigError, "Request 1 has 50 tokens .* 52 input tokens.* at most 8"
    ):
      requests_lib.request_rows(byte_tokenizer(), arguments, max_length=8, truncation="error")

  def test_a_request_with_nothing_to_score_has_no_row(self):
    rows = requests_lib.request_rows(byte_tokenizer(), [("a", ""), ("",), ("", "")], max_length=4)
    self.assertEmpty(rows)

  def test_an_eos_inside_a_text_does_not_restart_positions(self):
    rows = requests_lib.windows(np.array([256, 1, 256, 2, 3]), 4, None, request=0)
    sample = requests_lib.row_arrays(next(rows))
    np.testing.assert_array_equal(sample["inputs_segmentation"], [[1, 1, 1, 1]])
    rolling = requests_lib.HFTokenizeLogLikelihoodRolling("bytes", 4, 1, eos_token_id=98)
    (row,) = rolling.map([Request(("abcd",))])
    np.testing.assert_array_equal(row["inputs_position"], [0, 1, 2, 3])
    self.assertFalse(row["_document_borders"].any())


class HFTokenizeLogLikelihoodRollingTest(parameterized.TestCase):

  def _rows(self, *arguments, max_length=4, batch_size=1, **kwargs):
    transform = requests_lib.HFTokenizeLogLikelihoodRolling(
        "bytes", max_length, batch_size, **kwargs
    )
    return transform.map([Request(args) for args in arguments])

  @parameterized.parameters(1, 3, 4, 5, 8, 9, 12)
  def test_texts_are_scored_once_also_at_multiples_of_the_limit(self, length):
    rows = self._rows(("a" * length,))
    self.assertEqual(sum(int(row["targets_segmentation"].sum()) for row in rows), length)

  def test_a_long_prefix_is_not_scored(self):
    rows = self._rows(("abcdef", "gh"))
    self.assertEqual(sum(int(row["targets_segmentation"].sum()) for row in rows), 2)

  def test_one_and_two_arguments_are_a_text_and_a_continuation(self):
    (text,) = self._rows(("ab",))
    (pair,) = self._rows(("a", "b"))
    np.testing.assert_array_equal(text["targets"] * text["targets_segmentation"], [97, 98, 0, 0])
    np.testing.assert_array_equal(pair["targets"] * pair["targets_segmentation"], [98, 0, 0, 0])

  def test_the_eos_id_that_is_given_is_the_eos(self):
    rows = self._rows(("ab",), eos_token_id=5, add_eos_token=True)
    np.testing.assert_array_equal(rows[0]["targets"], [97, 98, 5, 0])
    np.testing.assert_array_equal(rows[0]["targets_segmentation"], [1, 1, 1, 0])
    np.testing.assert_array_equal(rows[0]["inputs"], [5, 97, 98, 0])

  def test_every_array_of_every_row_is_int32_and_as_long_as_the_limit(self):
    rows = self._rows(("abcdefghi",), ("a", "bc"), ("",), add_eos_token=True)
    for row in rows:
      for name, array in row.items():
        self.assertEqual(array.dtype, bool if name == "_document_borders" else np.int32, name)
        self.assertEqual(array.shape, () if name.endswith("_idx") else (4,), name)

  def test_filler_rows_make_whole_batches(self):
    rows = self._rows(("abcde",), ("a", "b"), batch_size=4)
    self.assertEqual([int(row["document_idx"]) for row in rows], [1, 1, 2, 0])
    self.assertEqual([int(row["sequence_idx"]) for row in rows], [0, 1, 0, 0])
    self.assertEmpty(self._rows(batch_size=4))

  def test_only_a_tokenizer_and_a_length_are_needed(self):
    rows = requests_lib.HFTokenizeLogLikelihoodRolling("bytes", 4).map(
        requests=[Request(("abcdef",)), Request(("a",))]
    )
    self.assertEqual([int(row["document_idx"]) for row in rows], [1, 1, 2])

  def test_without_bos_the_first_token_of_a_text_is_not_scored(self):
    (row,) = self._rows(("abc",), add_bos_token=False)
    np.testing.assert_array_equal(row["inputs"], [97, 98, 0, 0])
    np.testing.assert_array_equal(row["targets"], [98, 99, 0, 0])
    np.testing.assert_array_equal(row["targets_segmentation"], [1, 1, 0, 0])
    (pair,) = self._rows(("a", "bc"), add_bos_token=False)
    np.testing.assert_array_equal(pair["targets_segmentation"], [1, 1, 0, 0])
    self.assertEmpty(self._rows(("",), ("a",), ("", ""), add_bos_token=False))
    (added,) = self._rows(("",), ("a",), add_bos_token=False, add_eos_token=True, eos_token_id=5)
    np.testing.assert_array_equal(added["targets"] * added["targets_segmentation"], [5, 0, 0, 0])
    self.assertEqual(added["document_idx"], 2)

  def test_limits_must_be_positive(self):
    with self.assertRaisesRegex(errors.ConfigError, "max_length=0 must be positive"):
      self._rows(("a",), max_length=0)


if __name__ == "__main__":
  absltest.main()
