"""Tests of segments and positions."""

import doctest

import hypothesis
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from maxtext_olmo.rows import parts as parts_lib
from maxtext_olmo.rows import segments as segments_lib

_EOS, _BOS = 0, 1
RULES = (
    segments_lib.SegmentRule(),
    segments_lib.SegmentRule("part"),
    segments_lib.SegmentRule("after_eos", _EOS),
    segments_lib.SegmentRule("at_eos", _EOS),
    segments_lib.SegmentRule("after_eos", _EOS, _BOS),
)


def _begins(rule, tokens, columns, place):
  """Returns whether a segment begins at a place of a row other than column 0."""
  if rule.begins == "part":
    return place in columns
  after_eos = tokens[place - 1] == rule.eos_id
  return {
      "nowhere": False,
      "after_eos": after_eos and (rule.bos_id < 0 or tokens[place] == rule.bos_id),
      "at_eos": tokens[place] == rule.eos_id,
  }[rule.begins]


def _slowly(rule, tokens, counts):
  """Returns the starts, segments and positions of one row, computed one token at a time.

  Args:
    rule: Where segments begin.
    tokens: The row, padding included.
    counts: The tokens of each of its parts.
  """
  used, columns = sum(counts), np.cumsum([0, *counts]).tolist()
  starts, segments, positions = [], [], []
  segment, position = 1, 0
  for place in range(len(tokens)):
    is_token = place < used
    begins = is_token and place > 0 and _begins(rule, tokens, columns[:-1], place)
    if begins:
      segment, position = segment + 1, 0
    starts.append(begins)
    segments.append(segment if is_token else 0)
    positions.append(position if is_token else 0)
    position += 1
  return starts, segments, positions


@st.composite
def batches(draw, lengths=st.integers(1, 70), max_rows=4):
  """Tokens with many EOS and BOS (padding too), and the counts of each row's parts."""
  length = draw(lengths)
  counts = []
  for _ in range(draw(st.integers(1, max_rows))):
    used = draw(st.integers(0, length))
    cuts = draw(st.sets(st.integers(1, max(1, used - 1)), max_size=used)) if used > 1 else set()
    edges = sorted({0, used, *(cut for cut in cuts if cut < used)})
    counts.append([b - a for a, b in zip(edges, edges[1:])])
  tokens = draw(
      hnp.arrays(np.uint16, (len(counts), length), elements=st.integers(0, 3), fill=st.nothing())
  )
  return tokens, counts


def parts_of(counts):
  """Returns a table of parts with these counts."""
  return parts_lib.Parts.of_rows([[(0, 0, count) for count in row] for row in counts])


class SegmentsTest(parameterized.TestCase):

  def test_the_examples_of_the_module_run(self):
    found = doctest.testmod(segments_lib)
    self.assertEqual(found.failed, 0)
    self.assertGreater(found.attempted, 0)

  @parameterized.parameters(
      ("part", [1, 1, 1, 2, 2, 2, 2, 0], [0, 1, 2, 0, 1, 2, 3, 0]),
      ("after_eos", [1, 1, 1, 2, 2, 3, 4, 0], [0, 1, 2, 0, 1, 0, 0, 0]),
      ("at_eos", [1, 1, 2, 2, 3, 4, 4, 0], [0, 1, 0, 1, 0, 0, 1, 0]),
      ("nowhere", [1, 1, 1, 1, 1, 1, 1, 0], [0, 1, 2, 3, 4, 5, 6, 0]),
  )
  def test_the_table_of_the_docstring(self, begins, segments, positions):
    tokens, used = np.array([[5, 6, 0, 7, 0, 0, 8, 0]], np.uint32), np.array([7])
    rule = segments_lib.SegmentRule(begins, 0)
    starts = segments_lib.segment_starts(tokens, used, rule, parts_of([[3, 4]]))
    found = segments_lib.segments_and_positions(starts, used)
    self.assertEqual([array.tolist() for array in found], [[segments], [positions]])

  @parameterized.parameters(*RULES)
  def test_each_rule_equals_a_slow_implementation(self, rule):
    @hypothesis.given(batches())
    @hypothesis.settings(max_examples=40, deadline=None)
    def check(batch):
      tokens, counts = batch
      parts = parts_of(counts)
      before = tokens.copy()
      starts = segments_lib.segment_starts(tokens, parts.used, rule, parts)
      segments, positions = segments_lib.segments_and_positions(starts, parts.used)
      self.assertEqual((segments.dtype, positions.dtype), (np.int32, np.int32))
      for r, row in enumerate(tokens.tolist()):
        found = starts[r].tolist(), segments[r].tolist(), positions[r].tolist()
        self.assertEqual(found, _slowly(rule, row, counts[r]))
      np.testing.assert_array_equal(tokens, before)

    check()

  @hypothesis.given(batches(), st.sampled_from(RULES))
  @hypothesis.settings(max_examples=40, deadline=None)
  def test_starts_survive_packing_into_words(self, batch, rule):
    tokens, counts = batch
    parts = parts_of(counts)
    starts = segments_lib.segment_starts(tokens, parts.used, rule, parts)
    words = segments_lib.pack_bits(starts)
    self.assertEqual(words.dtype, np.uint32)
    self.assertEqual(words.shape, (len(tokens), -(-tokens.shape[1] // 32)))
    np.testing.assert_array_equal(segments_lib.unpack_bits(words, tokens.shape[1]), starts)

  @parameterized.parameters(-1, _BOS)
  def test_padding_is_divided_after_an_eos_where_parts_are_segments(self, bos_id):
    @hypothesis.given(batches())
    @hypothesis.settings(max_examples=40, deadline=None)
    def check(batch):
      tokens, counts = batch
      parts, length = parts_of(counts), tokens.shape[1]
      rule = segments_lib.SegmentRule("part_and_padding", _EOS, bos_id)
      covered = np.where(parts.used > 0, length, 0)
      starts = segments_lib.segment_starts(tokens, covered, rule, parts)
      for r, row in enumerate(tokens.tolist()):
        columns, used = np.cumsum([0, *counts[r]])[:-1].tolist(), sum(counts[r])
        for place in range(length):
          expected = place > 0 and place in columns and place < used
          if 0 < used <= place:
            after_eos = row[place - 1] == _EOS
            if bos_id < 0:
              expected = after_eos or place == used
            else:
              expected = after_eos and row[place] == bos_id
          self.assertEqual(starts[r, place], expected)

    check()

  def test_olmo_core_finds_documents_in_the_padded_row_or_takes_them_from_boundaries(self):
    # A document without an EOS merges with what follows it, unless boundaries are known.
    tokens, parts = np.array([[5, 6, 7, 0, 8, 0, 0, 0]], np.uint32), parts_of([[2, 2, 1]])
    used = np.array([8])
    for begins, segments in (
        ("after_eos", [1, 1, 1, 1, 2, 2, 3, 4]),
        ("part_and_padding", [1, 1, 2, 2, 3, 4, 5, 6]),
    ):
      rule = segments_lib.SegmentRule(begins, 0)
      starts = segments_lib.segment_starts(tokens, used, rule, parts)
      found, _ = segments_lib.segments_and_positions(starts, used)
      self.assertEqual(found.tolist(), [segments])

  @hypothesis.given(st.lists(st.integers(0, 70), min_size=1, max_size=4), st.integers(70, 100))
  @hypothesis.settings(max_examples=40, deadline=None)
  def test_bits_below_are_the_packed_flags_of_the_first_columns(self, used, length):
    flags = np.arange(length) < np.array(used)[:, np.newaxis]
    found = segments_lib.bits_below(np.array(used), length)
    np.testing.assert_array_equal(found, segments_lib.pack_bits(flags))

  @parameterized.product(rule=RULES, dtype=(np.uint8, np.uint16, np.uint32, np.int32))
  def test_start_bits_are_packed_starts_whether_compiled_or_not(self, rule, dtype):
    segments_lib.compile_start_bits(dtype)

    @hypothesis.given(batches())
    @hypothesis.settings(max_examples=30, deadline=None)
    def check(batch):
      tokens, counts = batch[0].astype(dtype), batch[1]
      parts = parts_of(counts)
      starts = segments_lib.segment_starts(tokens, parts.used, rule, parts)
      found = segments_lib.start_bits(tokens, parts.used, rule, parts)
      np.testing.assert_array_equal(found, segments_lib.pack_bits(starts))

    check()

  def test_the_first_flag_is_the_lowest_bit(self):
    flags = np.zeros((2, 40), bool)
    flags[0, [0, 31]] = flags[1, [33]] = True
    self.assertEqual(segments_lib.pack_bits(flags).tolist(), [[2**31 + 1, 0], [0, 2]])

  def test_the_rule_by_part_needs_the_parts(self):
    with self.assertRaisesRegex(ValueError, "needs the parts"):
      segments_lib.segment_starts(np.ones((1, 4)), np.array([4]), segments_lib.SegmentRule("part"))

  @parameterized.parameters((0, 5), (3, 0), (0, 0))
  def test_empty_arrays_have_no_segments(self, rows, length):
    tokens, used = np.zeros((rows, length), np.uint32), np.zeros(rows, np.int64)
    starts = segments_lib.segment_starts(tokens, used, RULES[2])
    for array in (starts, *segments_lib.segments_and_positions(starts, used)):
      self.assertEqual(array.shape, (rows, length))

  def test_an_eos_that_the_dtype_cannot_hold_never_occurs(self):
    tokens, used = np.array([[255, 1, 255]], np.uint8), np.array([3])
    for eos_id in (-1, 100257):
      rule = segments_lib.SegmentRule("after_eos", eos_id)
      self.assertFalse(segments_lib.segment_starts(tokens, used, rule).any())


class WindowsTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("several_documents", [5, 6, 0, 7, 0, 0, 8], [1, 1, 1, 2, 2, 3, 4], [0, 1, 2, 0, 1, 0, 0]),
      ("no_eos", [5, 6, 7], [1, 1, 1], [0, 1, 2]),
      ("only_eos", [0, 0, 0], [1, 2, 3], [0, 0, 0]),
      ("eos_first", [0, 5, 6], [1, 2, 2], [0, 0, 1]),
      ("eos_last", [5, 6, 0], [1, 1, 1], [0, 1, 2]),
      ("one_token", [5], [1], [0]),
      ("nothing", [], [], []),
  )
  def test_an_eos_ends_its_document_and_belongs_to_it(self, tokens, segments, positions):
    tokens, used = np.array([tokens], np.uint32), np.array([len(tokens)])
    starts = segments_lib.segment_starts(tokens, used, segments_lib.SegmentRule("after_eos", 0))
    found = segments_lib.segments_and_positions(starts, used)
    np.testing.assert_array_equal(found[0], [segments])
    np.testing.assert_array_equal(found[1], [positions])


if __name__ == "__main__":
  absltest.main()
