import dataclasses

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.rows import content as content_lib
from maxtext_olmo.rows import repetition
from maxtext_olmo.rows import row_source
from maxtext_olmo.rows import segments


@dataclasses.dataclass(frozen=True)
class _Rows(row_source.RowSourceDefaults):
  """Rows without documents."""

  segment_rule: segments.SegmentRule = segments.SegmentRule()


class ContentTest(parameterized.TestCase):

  def test_a_checkpoint_records_filter_and_document_ends(self):
    nothing = {
        "ngram_filter": False,
        "repetition": None,
        "document_eos_id": None,
        "document_bos_id": None,
        "documents_by_part": False,
        "exclude": None,
        "label_masks": None,
    }
    self.assertEqual(
        content_lib.Content().record(segments.SegmentRule()),
        {**nothing, "ngram_filter": True, "repetition": "1,13,32"},
    )
    self.assertEqual(
        content_lib.Content(ngram_filter=False).record(segments.SegmentRule("after_eos", 7)),
        {**nothing, "document_eos_id": 7},
    )
    self.assertEqual(
        content_lib.Content(
            repetition=repetition.RepetitionRule(2, 5, 8), label_masks="abc"
        ).record(segments.SegmentRule("part_and_padding", 7, 1)),
        {
            **nothing,
            "ngram_filter": True,
            "repetition": "2,5,8",
            "document_eos_id": 7,
            "document_bos_id": 1,
            "documents_by_part": True,
            "label_masks": "abc",
        },
    )

  def test_a_record_is_described_by_what_is_set(self):
    plain = content_lib.Content(ngram_filter=False).record(segments.SegmentRule())
    self.assertEqual(content_lib.describe_record(plain), {"repetition filter": "off"})
    content = content_lib.Content(repetition=repetition.RepetitionRule(2, 5, 8), label_masks="abc")
    full = content.record(segments.SegmentRule("part_and_padding", 7, 1)) | {"exclude": "329"}
    self.assertEqual(
        content_lib.describe_record(full),
        {
            "repetition filter": "on (2 to 5 tokens, 8 times)",
            "documents": "begin with token 1, end with token 7, one for each part of a row",
            "olmo_exclude": "a list with digest 329",
            "label masks": "files with digest abc",
        },
    )
    self.assertEqual(content_lib.describe_changes(full, full), [])

  @parameterized.parameters(
      segments.SegmentRule(),
      segments.SegmentRule("after_eos", 7),
      segments.SegmentRule("after_eos", 7, 1),
      segments.SegmentRule("part_and_padding", 7),
      segments.SegmentRule("part_and_padding", 7, 1),
  )
  def test_every_record_restores_what_it_was_made_of(self, rule):
    then = content_lib.Content(repetition=repetition.RepetitionRule(2, 5, 8))
    source, content = content_lib.as_recorded(
        then.record(rule), _Rows(segments.SegmentRule("after_eos", 3)), content_lib.Content()
    )
    self.assertEqual((source.segment_rule, content), (rule, then))

  def test_a_damaged_record_of_the_filter_is_an_error(self):
    for text in ("1,2", "", "1,2,3,4", "a,b,c"):
      with self.assertRaisesRegex(errors.ResumeError, "repetition filter"):
        content_lib.as_recorded({"repetition": text}, _Rows(), content_lib.Content())

  def test_a_step_is_processed_as_it_was_recorded(self):
    now = content_lib.Content(ngram_filter=False)
    rows = _Rows()
    record = {"ngram_filter": True, "document_eos_id": 7, "exclude": None}
    source, content = content_lib.as_recorded(record, rows, now)
    self.assertTrue(content.ngram_filter)
    self.assertEqual(source.segment_rule, segments.SegmentRule("after_eos", 7))
    self.assertEqual(content_lib.as_recorded({}, rows, now), (rows, now))

  def test_exclusions_that_are_not_configured_now_are_an_error(self):
    with self.assertRaisesRegex(errors.OrderError, "exclusions with digest abc was in force"):
      content_lib.as_recorded({"exclude": "abc"}, _Rows(), content_lib.Content())


if __name__ == "__main__":
  absltest.main()
