"""Tests of the plan of a run, compared with what its iterators deliver."""

import numpy as np
from absl.testing import absltest

from maxtext_olmo import config as config_lib
from maxtext_olmo import errors
from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.inspection import run_plan
from tests.loader import cases

_STAGES = (
    {"from_step": 6, "olmo_mixture": {"label-0": 1.0}},
    {"from_step": 12, "olmo_mixture": {}, "leave_out_seen": True},
)


def setUpModule():
  cases.compile_fast()


class RunPlanTest(cases.LoaderCase):

  defaults = {  # noqa: RUF012
      **cases.WINDOWS,
      "olmo_batch_extras": ("labels",),
      "olmo_mixture": {"label-0": 1.0, "label-1": 2.0},
      "olmo_eval_instances": 5,
  }

  def labels(self, iterator, steps):
    """Returns how many tokens of each label the next steps deliver."""
    batches = cases.take(iterator, steps)
    return [np.bincount(b["labels"][b["labels"] >= 0], minlength=2) * 8 for b in batches]

  def test_the_plan_of_a_resumed_run_is_what_was_delivered_and_will_be(self):
    train = self.train()
    delivered = self.labels(train, 7)
    for changes in ({"global_batch_size_to_load": 6}, {"global_batch_size_to_load": 2}):
      state = train.get_state()
      train = self.train(**changes)
      train.set_state(state)
      delivered += self.labels(train, 5)
    index = index_lib.load_index(self.index_path)
    plan = run_plan.plan_of_iterator(train, index, 40)
    self.assertEqual(plan.step, 17)
    delivered += self.labels(train, 23)
    sources = plan.count_sources()
    before = np.concatenate([[[0, 0]], np.cumsum(delivered, axis=0)])
    self.assertEqual(sources.labels, ("label-0", "label-1"))
    np.testing.assert_array_equal(sources.seen, before[sources.edges])
    changes = plan.find_changes()
    self.assertEqual(changes, ((7, "batch size 4 → 6"), (12, "batch size 6 → 2")))

  def test_the_plan_of_a_run_with_stages_has_those_that_it_was_in(self):
    train = self.train(olmo_stages=_STAGES)
    delivered = self.labels(train, 15)
    resumed = self.train(olmo_stages=_STAGES, global_batch_size_to_load=2)
    resumed.set_state(train.get_state())
    plan = run_plan.plan_of_iterator(resumed, index_lib.load_index(self.index_path), 40)
    delivered += self.labels(resumed, 25)
    sources = plan.count_sources()
    before = np.concatenate([[[0, 0]], np.cumsum(delivered, axis=0)])
    np.testing.assert_array_equal(sources.seen, before[sources.edges])
    self.assertEqual([change.step for change in plan.find_changes()], [6, 12, 15])

  def test_the_plan_of_a_config_is_what_its_iterator_delivers(self):
    for values in (
        {},
        {"olmo_mixture": {}, "olmo_batch_schedule": ((0, 4), (5, 4), (9, 2))},
        {"olmo_mixture": {}, "olmo_num_epochs": 1},
        {"olmo_stages": _STAGES[:1]},
        {"olmo_stages": _STAGES, "olmo_skip": ((8, 9),)},
    ):
      options = config_lib.Options.read(self.config(**values))
      sources = run_plan.plan_of_options(options, 30).count_sources()
      delivered = self.labels(self.train(**values), int(sources.edges[-1]))
      np.testing.assert_array_equal(sources.seen[-1], np.sum(delivered, axis=0))

  def test_steps_of_another_stream_are_left_out(self):
    train = self.train()
    cases.take(train, 3)
    index = index_lib.load_index(self.index_path)
    plan = run_plan.plan_of_iterator(train, index, 10)
    self.assertEqual([(s.first, s.end) for s in plan.stretches], [(0, 10)])
    self.assertEqual(plan.identity["sequence_length"], 8)

  def test_streaming_rows_have_no_plan(self):
    values = {**cases.DOCUMENTS, "olmo_packing": "first_fit", "olmo_index_path": self.index_path}
    options = config_lib.Options.read(cases.data_config(**values))
    with self.assertRaisesRegex(errors.ConfigError, "has no plan"):
      run_plan.plan_of_options(options, 10)


if __name__ == "__main__":
  absltest.main()
