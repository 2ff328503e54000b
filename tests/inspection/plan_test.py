import numpy as np
from absl.testing import absltest

from maxtext_olmo.corpus import index_builder
from maxtext_olmo.inspection import changes
from maxtext_olmo.inspection import plan as plan_lib
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.order import skips
from maxtext_olmo.order import stream as stream_lib
from maxtext_olmo.order import timeline
from tests import corpora


class PlanTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    path, _ = corpora.write_corpus(self.create_tempdir().full_path)
    self.index = index_builder.load_index(path)
    self.stream = stream_lib.train_stream(self.index, order="sequential", seed=3)

  def stretch(self, first, end, size):
    schedule = schedule_lib.BatchSchedule.constant(size).anchored(first, first * 4)
    return changes.Stretch(first, end, schedule, self.stream, self.index)

  def entry(self, stretch, **values):
    return timeline.Entry(
        step=stretch.first,
        position=stretch.first * 4,
        sequence_length=8,
        schedule=stretch.schedule,
        identity=self.stream.identity(),
        content={},
        **values,
    )

  def test_it_counts_the_sources_of_all_stretches(self):
    plan = plan_lib.Plan((self.stretch(0, 5, 4), self.stretch(5, 8, 2)))
    sources = plan.count_sources()
    self.assertEqual((sources.edges[0], sources.edges[-1]), (0, 8))
    rows = np.arange(5 * 4 + 3 * 2)
    files, _ = self.index.locate(self.stream.locate(rows)[1])
    labels = [self.index.files[file].label for file in files]
    self.assertEqual(
        dict(zip(sources.labels, sources.seen[-1].tolist())),
        {label: 8 * labels.count(label) for label in sources.labels},
    )

  def test_changes_at_restarts_and_masked_samples_are_listed_by_step(self):
    one, other = self.stretch(0, 5, 4), self.stretch(5, 30, 2)
    history = timeline.Timeline(
        (self.entry(one), self.entry(other, skips=(skips.Skip("samples 26:30", 26, 30, "mask"),)))
    )
    plan = plan_lib.Plan((one, other), history, step=6)
    self.assertEqual(
        plan.find_changes(), ((5, "batch size 4 → 2"), (8, "takes no loss on 4 samples"))
    )

  def test_its_identity_is_that_of_the_stream_it_ends_with(self):
    plan = plan_lib.Plan((self.stretch(0, 5, 4),))
    self.assertEqual(plan.identity, {**self.stream.identity(), "sequence_length": 8})


if __name__ == "__main__":
  absltest.main()
