"""The iterator over rows of documents."""

import json
import multiprocessing

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from tests import workers as workers_lib
from tests.loader import document_cases

STARTS_PROCESSES = True

_STEPS = 60
_STREAMS = (
    {"olmo_packing": "none", "olmo_long_documents": "truncate"},
    {"olmo_packing": "planned"},
    {"olmo_packing": "planned", "olmo_mixture": {"label-0": 2.0, "label-*": 0.5}},
    {"olmo_packing": "planned", "olmo_batch_schedule": ((0, 2), (7, 4), (30, 6))},
)


class ResumeTest(document_cases.DocumentsCase):

  @parameterized.product(values=_STREAMS, workers=(0, 2))
  def test_continuing_equals_resuming_at_every_one_of_the_first_steps(self, values, workers):
    with workers_lib.started_quickly():
      iterator = self.make(**values)
      states, batches = [], []
      for _ in range(_STEPS):
        states.append(json.loads(json.dumps(iterator.get_state())))
        batches += self.take(iterator, 1)
      states.append(iterator.get_state())
      iterator.close()
      for step in range(_STEPS):
        self.assertEmpty(multiprocessing.active_children())
        resumed = self.make(**values, grain_worker_count=workers)
        resumed.set_state(states[step])
        self.assertEqual(resumed.get_state(), states[step])
        expected = batches[step : step + 2]
        self.assert_equal(self.take(resumed, len(expected)), expected)
        self.assertEqual(resumed.get_state(), states[step + len(expected)])
        self.assertLen(multiprocessing.active_children(), workers)
        resumed.close()

  def test_the_first_steps_reach_into_a_third_epoch(self):
    iterator = self.make()
    self.take(iterator, _STEPS)
    self.assertGreater(iterator.position, 2 * iterator.stream.source.plan.count(1))

  def test_a_refused_state_changes_nothing(self):
    iterator = self.make()
    expected = self.take(self.make(), 4)
    self.assert_equal(self.take(iterator, 3), expected[:3])
    other = self.make(data_shuffle_seed=5).get_state()
    with self.assertRaisesRegex(errors.ResumeError, "another stream"):
      iterator.set_state(other)
    self.assertEqual(iterator.step, 3)
    self.assert_equal(self.take(iterator, 1), expected[3:])

  def test_reset_goes_back_to_where_it_began_and_iter_does_not(self):
    iterator = self.make(initial_step=2)
    first = self.take(iterator, 2)
    self.assertEqual(iter(iterator).step, 4)
    iterator.reset()
    self.assertEqual((iterator.step, iterator.position), (2, 8))
    self.assert_equal(self.take(iterator, 2), first)


class EndTest(document_cases.DocumentsCase):

  def test_padding_follows_the_end_where_asked_and_is_no_step(self):
    iterator = self.make(olmo_num_epochs=1, generate_padding_batch_train=True)
    iterator.stream.source.plan.count(1)
    self.take(iterator, len(iterator))
    state = iterator.get_state()
    for batch in self.take(iterator, 2):
      self.assertEqual(batch["inputs"].shape, (4, 32))
      self.assertFalse(batch["inputs_segmentation"].any())
    self.assertEqual(iterator.get_state(), state)

  def test_a_closed_iterator_says_so(self):
    iterator = self.make()
    self.take(iterator, 1)
    iterator.close()
    iterator.close()
    with self.assertRaisesRegex(ValueError, "closed"):
      next(iterator)


class MetricsTest(document_cases.DocumentsCase):

  @parameterized.product(workers=(0, 1), mixture=({}, {"label-0": 1.0, "label-1": 1.0}))
  def test_they_add_up_to_what_an_epoch_holds(self, workers, mixture):
    values = {"olmo_mixture": mixture} if mixture else {"olmo_num_epochs": 1}
    with workers_lib.started_quickly():
      iterator = self.make(**values, olmo_shift="right", grain_worker_count=workers)
      batches = self.take(iterator, 20)
    found = iterator.metrics()
    self.assertEqual(found["batches"], 20)
    # With inputs shifted right, every token that was read is a target. The corpus has two bytes for each.
    tokens = sum(np.count_nonzero(batch["targets_segmentation"]) for batch in batches)
    self.assertEqual(found["bytes_read"], 2 * tokens)
    segments = sum(int(batch["targets_segmentation"].max(axis=1).sum()) for batch in batches)
    self.assertEqual(found["reads"], segments)
    self.assertEqual(found["bytes_to_device"], 20 * 6 * 4 * 32 * 4)
    for name in ("order_seconds", "read_seconds", "transfer_seconds"):
      self.assertGreater(found[name], 0, name)
    self.assertGreaterEqual(found["wait_seconds"], found["transfer_seconds"])

  def test_documents_that_have_a_row_each_count_what_the_row_keeps(self):
    iterator = self.make(olmo_packing="none", olmo_long_documents="truncate")
    batches = self.take(iterator, 10)
    found = iterator.metrics()
    self.assertEqual((found["batches"], found["reads"]), (10, 40))
    tokens = sum(np.count_nonzero(batch["inputs_segmentation"]) for batch in batches)
    self.assertEqual(found["bytes_read"], 4 * tokens)
    self.assertGreater(found["read_seconds"], 0)


if __name__ == "__main__":
  absltest.main()
