"""Tests of the trainer's iterator, over windows and over documents."""

import concurrent.futures
import json
import os

import jax
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import maxtext_olmo
from maxtext_olmo import errors
from tests import workers as workers_lib
from tests.loader import cases

STARTS_PROCESSES = True

_ONE_DOCUMENT = {"olmo_packing": "none", "olmo_long_documents": "truncate"}


def setUpModule():
  cases.compile_fast()


class MoveTest(cases.LoaderCase):

  def test_iter_does_not_move_a_train_iterator(self):
    expected = cases.take_inputs(self.train(), 4)
    iterator = self.train()
    got = cases.take_inputs(iterator, 2) + cases.take_inputs(iter(iterator), 2)
    np.testing.assert_array_equal(got, expected)

  def test_an_eval_iterator_continues_after_a_state_and_then_starts_again(self):
    _, evaluation = self.make(eval_interval=5, olmo_eval_instances=14)
    batches = [{k: np.asarray(v) for k, v in batch.items()} for batch in evaluation]
    self.assertLen(batches, 4)
    cases.take(iter(evaluation), 1)
    state, end = evaluation.get_state(), {}
    _, other = self.make(eval_interval=5, olmo_eval_instances=14)
    other.set_state(state)
    for expected in (batches[1:], batches, batches):
      got = [{k: np.asarray(v) for k, v in batch.items()} for batch in other]
      self.assert_equal_batches(got, expected)
      end = other.get_state()
    # After the last batch a pass is over, and a restored iterator begins the next.
    evaluation.set_state(end)
    self.assert_equal_batches(cases.take(iter(evaluation), 4), batches)
    # A reset forgets the state.
    evaluation.set_state(state)
    evaluation.reset()
    self.assert_equal_batches(cases.take(iter(evaluation), 4), batches)

  def test_reset_returns_to_where_the_iterator_began(self):
    iterator = self.train(initial_step=3)
    first = cases.take_inputs(iterator, 3)
    iterator.reset()
    self.assertEqual((iterator.step, iterator.position), (3, 12))
    np.testing.assert_array_equal(cases.take_inputs(iterator, 3), first)

  def test_a_refused_state_changes_nothing(self):
    expected = cases.take_inputs(self.train(), 4)
    iterator = self.train()
    np.testing.assert_array_equal(cases.take_inputs(iterator, 3), expected[:3])
    state = self.train(data_shuffle_seed=5).get_state()
    with self.assertRaisesRegex(errors.ResumeError, "another stream"):
      iterator.set_state(state)
    self.assertEqual(iterator.step, 3)
    np.testing.assert_array_equal(cases.take_inputs(iterator, 1), expected[3:])

  def test_a_closed_iterator_says_so(self):
    iterator = self.train()
    next(iterator)
    iterator.close()
    iterator.close()
    with self.assertRaisesRegex(ValueError, "closed"):
      next(iterator)

  def test_closing_it_closes_its_token_files(self):
    def opened():
      files = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
      return [path for path in files if path.endswith(".npy")]

    before = len(opened())
    iterator = self.train()
    next(iterator)
    self.assertGreater(len(opened()), before)
    iterator.close()
    self.assertLen(opened(), before)

  def test_threads_that_share_it_get_each_batch_once(self):
    expected = cases.take_inputs(self.train(), 40)
    iterator = self.train()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
      found = list(pool.map(lambda _: np.asarray(next(iterator)["inputs"]), range(40)))
    self.assertEqual(iterator.step, 40)
    self.assertCountEqual([x.tobytes() for x in found], [x.tobytes() for x in expected])

  def test_it_is_its_own_local_iterator(self):
    iterator = self.train()
    self.assertIs(iterator.local_iterator, iterator)


class DescribeTest(cases.LoaderCase):

  def test_it_returns_step_position_and_epoch(self):
    iterator = self.train(initial_step=3)
    next(iterator)
    found = iterator.describe()
    self.assertEqual((found.step, found.position, found.tokens), (4, 16, 16 * 8))
    self.assertEqual(found.epoch, iterator.epoch)
    self.assertEqual(found.identity, iterator.history.present.identity)
    self.assertIn("4 steps done: 16 samples, 128 tokens", str(found))

  def test_after_the_end_there_is_no_epoch(self):
    iterator = self.train(olmo_num_epochs=1)
    for _ in iterator:
      pass
    self.assertIsNone(iterator.describe().epoch)
    self.assertEqual(iterator.describe().position, iterator.position)


class DescribeStreamTest(cases.DocumentsCase):

  def test_rows_that_are_packed_as_they_stream_have_a_position_but_no_explanation(self):
    iterator = self.train(olmo_packing="first_fit")
    next(iterator)
    found = iterator.describe()
    self.assertEqual((found.step, found.position, found.tokens, found.epoch), (1, 4, 128, None))
    with self.assertRaisesRegex(errors.OrderError, "Step 0 cannot be explained"):
      iterator.explain(0)


class RowNumbersTest(cases.LoaderCase):

  def test_they_give_the_rows_of_a_step_without_reading_it(self):
    iterator = self.train()
    for step, inputs in enumerate(cases.take_inputs(iterator, 5)):
      np.testing.assert_array_equal(self.rows[iterator.row_numbers(step)], inputs)

  def test_padding_rows_have_none(self):
    iterator = self.train(olmo_num_epochs=1)
    self.assertEqual(iterator.row_numbers(30).tolist()[3:], [-1])

  def test_a_step_outside_the_stream_is_an_error(self):
    iterator = self.train(olmo_num_epochs=1)
    for step in (31, 500):
      with self.assertRaisesRegex(errors.OrderError, f"Step {step} is outside the stream"):
        iterator.row_numbers(step)

  def test_batches_have_them_and_their_labels_on_request(self):
    index = maxtext_olmo.load_index(self.index_path)
    plain, iterator = self.train(), self.train(olmo_batch_extras=("row_ids", "labels"))
    for step in range(3):
      batch, expected = next(iterator), next(plain)
      self.assertEqual(set(batch) - set(expected), {"row_ids", "labels"})
      np.testing.assert_array_equal(batch["row_ids"], iterator.row_numbers(step))
      files, _ = index.locate(np.asarray(batch["row_ids"]))
      self.assertEqual(np.asarray(batch["labels"]).tolist(), [file % 2 for file in files.tolist()])
      np.testing.assert_array_equal(batch["inputs"], expected["inputs"])


class EndTest(cases.LoaderCase):

  def test_a_finite_stream_pads_its_last_batch_and_stops(self):
    iterator = self.train(olmo_num_epochs=1)
    self.assertLen(iterator, 31)
    batches = [jax.tree.map(np.asarray, batch) for batch in iterator]
    self.assertLen(batches, 31)
    segments = np.concatenate([batch["inputs_segmentation"][:, 0] for batch in batches])
    self.assertEqual(segments.tolist(), [1] * 123 + [0])
    with self.assertRaises(StopIteration):
      next(iterator)

  def test_padding_batches_after_the_end_do_not_count_as_steps(self):
    values = {"olmo_num_epochs": 1, "generate_padding_batch_train": True}
    for extras in ((), ("row_ids",)):
      iterator = self.train(initial_step=30, olmo_batch_extras=extras, **values)
      names = set(next(iterator))
      state = iterator.get_state()
      for batch in cases.take(iterator, 3):
        self.assertEqual(set(batch), names)
        np.testing.assert_array_equal(batch.pop("row_ids", -np.ones(4)), -np.ones(4))
        self.assertFalse(any(array.any() for array in batch.values()))
      self.assertEqual((iterator.get_state(), iterator.step), (state, 31))

  def test_an_endless_stream_has_no_length(self):
    with self.assertRaisesRegex(TypeError, "no end"):
      len(self.train())


class DocumentsEndTest(cases.DocumentsCase):

  def test_padding_follows_rows_that_were_not_counted_beforehand(self):
    iterator = self.train(olmo_num_epochs=1, generate_padding_batch_train=True)
    real = 0
    while (batch := next(iterator))["inputs_segmentation"].any():
      real += 1
    self.assertEqual((iterator.step, len(iterator)), (real, real))
    self.assertEqual(batch["inputs"].shape, (4, 32))
    self.assertFalse(any(np.asarray(array).any() for array in batch.values()))


class MetricsTest(cases.DocumentsCase):

  @parameterized.product(
      workers=(0, 1), mixture=({}, {"olmo_mixture": {"label-0": 1.0, "label-1": 1.0}})
  )
  def test_they_add_up_to_what_the_batches_hold(self, workers, mixture):
    values = mixture or {"olmo_num_epochs": 1}
    with workers_lib.started_quickly():
      iterator = self.train(**values, olmo_shift="right", grain_worker_count=workers)
      batches = cases.take(iterator, 20)
    found = iterator.metrics()
    self.assertEqual(found["batches"], 20)
    self.assert_reads(found, batches, "targets_segmentation", iterator, exact=False)
    for name in ("order_seconds", "read_seconds", "transfer_seconds"):
      self.assertGreater(found[name], 0, name)

  def test_documents_that_have_a_row_each_count_what_the_row_keeps(self):
    iterator = self.train(
        **_ONE_DOCUMENT, olmo_shift="right", olmo_device_prefetch=0, olmo_prefetch_batches=0
    )
    batches = cases.take(iterator, 10)
    found = iterator.metrics()
    self.assertEqual((found["batches"], found["reads"]), (10, 40))
    self.assert_reads(found, batches, "targets_segmentation", iterator, exact=True)

  def assert_reads(self, found, batches, name, iterator, *, exact):
    """Checks bytes and reads; those of batches made ahead are counted before they are taken."""
    # With inputs shifted right, every token that was read is a target, of two bytes.
    tokens = sum(np.count_nonzero(batch[name]) for batch in batches)
    segments = sum(int(batch[name].max(axis=1).sum()) for batch in batches)
    if exact:
      self.assertEqual((found["bytes_read"], found["reads"]), (2 * tokens, segments))
      return
    self.assertGreaterEqual(found["bytes_read"], 2 * tokens)
    self.assertGreaterEqual(found["reads"], segments)

  def test_few_bytes_cross_to_the_devices(self):
    iterator = self.train(olmo_device_prefetch=0, olmo_prefetch_batches=0)
    cases.take(iterator, 10)
    # Tokens of two bytes, a bit per token for segments, and four bytes per row that is not full.
    tokens = 10 * 4 * 32
    self.assertBetween(
        iterator.metrics()["bytes_to_device"], 2 * tokens, 2 * tokens + tokens // 8 + 160
    )


class StateTest(cases.DocumentsCase):

  @parameterized.parameters(
      {"olmo_packing": "planned"},
      {"olmo_packing": "planned", "olmo_batch_schedule": ((0, 2), (3, 4))},
      _ONE_DOCUMENT,
  )
  def test_it_survives_json_and_restores_the_same(self, **values):
    iterator = self.train(**values)
    cases.take(iterator, 5)
    state = json.loads(json.dumps(iterator.get_state()))
    resumed = self.train(**values)
    resumed.set_state(state)
    self.assertEqual(resumed.get_state(), state)
    self.assert_equal_batches(cases.take(resumed, 2), cases.take(iterator, 2))


if __name__ == "__main__":
  absltest.main()
