import dataclasses

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.rows import content as content_lib
from maxtext_olmo.rows import row_source
from maxtext_olmo.rows import segments


@dataclasses.dataclass(frozen=True)
class _Rows(row_source.RowSourceDefaults):
  """Rows without documents."""

  segment_rule: segments.SegmentRule = segments.SegmentRule()


class ContentTest(parameterized.TestCase):

  def test_a_checkpoint_records_filter_and_document_ends(self):
    self.assertEqual(
        content_lib.Content().record(segments.SegmentRule()),
        {"ngram_filter": True, "document_eos_id": None, "exclude": None},
    )
    self.assertEqual(
        content_lib.Content(ngram_filter=False).record(segments.SegmentRule("after_eos", 7)),
        {"ngram_filter": False, "document_eos_id": 7, "exclude": None},
    )

  def test_a_step_is_processed_as_it_was_recorded(self):
    now = content_lib.Content(ngram_filter=False)
    rows = _Rows()
    record = {"ngram_filter": True, "document_eos_id": 7, "exclude": None}
    source, content = content_lib.as_recorded(record, rows, now)
    self.assertTrue(content.ngram_filter)
    self.assertEqual(source.segment_rule, segments.SegmentRule("after_eos", 7))
    self.assertEqual(content_lib.as_recorded({}, rows, now), (rows, now))

  def test_exclusions_that_are_not_configured_now_are_an_error(self):
    with self.assertRaisesRegex(errors.OrderError, "The list of exclusions abc was in force"):
      content_lib.as_recorded({"exclude": "abc"}, _Rows(), content_lib.Content())


if __name__ == "__main__":
  absltest.main()
