import dataclasses

from absl.testing import absltest

from maxtext_olmo.inspection import changes as changes_lib
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.order import skips
from maxtext_olmo.order import timeline


class ChangesTest(absltest.TestCase):

  def entry(self, step, **changes):
    entry = timeline.Entry(
        step=step,
        position=4 * step,
        sequence_length=8,
        schedule=schedule_lib.BatchSchedule.constant(4),
        identity={"fingerprint": "a", "order": "feistel", "seed": 1, "split": "none"},
        content={"ngram_filter": True, "document_eos_id": None},
    )
    return dataclasses.replace(entry, **changes)

  def test_stages_and_skips_of_a_schedule_are_changes(self):
    for schedule in (
        schedule_lib.BatchSchedule(((0, 4), (10, 8), (20, 8), (30, 2))),
        schedule_lib.BatchSchedule(((0, 4), (38, 8), (200, 2)), by_position=True),
    ):
      schedule = schedule.skipping(skips.Skips.of([(230, 234)]))
      found = changes_lib.find_changes([changes_lib.Stretch(0, 100, schedule, None, None)])
      sizes = [schedule.size(step) for step in range(100)]
      expected = [step for step in range(1, 100) if sizes[step] != sizes[step - 1]]
      self.assertEqual([c.step for c in found if "batch size" in c.text], expected)
      self.assertEqual(found[0].text, "batch size 4 → 8")
      self.assertIn(changes_lib.Change(schedule.step_at(230), "skips 4 samples"), found)

  def test_entries_of_a_history_are_changes(self):
    was = self.entry(0)
    history = timeline.Timeline(
        (
            was,
            self.entry(5, schedule=schedule_lib.BatchSchedule.constant(6).anchored(5, 20)),
            self.entry(7, identity={**was.identity, "order": "feistel mixture of 2 labels"}),
            self.entry(9, content={**was.content, "ngram_filter": False, "exclude": "abc"}),
        )
    )
    found = changes_lib.find_changes([], history, {"abc": "bad.jsonl"})
    self.assertEqual(
        found,
        (
            (5, "batch size 4 → 6"),
            (7, "a different mixture"),
            (7, "batch size 6 → 4"),
            (9, "a different mixture"),
            (9, "olmo_exclude: none → bad.jsonl"),
            (9, "repetition filter: on → off"),
        ),
    )


if __name__ == "__main__":
  absltest.main()
