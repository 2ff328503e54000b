"""Tests of the state of a run."""

import dataclasses
import json

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.loader import state as state_lib
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.order import stream as stream_lib
from maxtext_olmo.rows import steps
from tests import corpora

_CONTENT = steps.Content()


class StateTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    path, _ = corpora.write_corpus(self.create_tempdir().full_path, max_target_sequence_length=32)
    self.index = index_lib.load_index(path)
    self.stream = stream_lib.train_stream(self.index, order="feistel", seed=3)
    self.schedule = schedule_lib.BatchSchedule.constant(8)
    self.state = state_lib.make_state(self.stream, self.schedule, _CONTENT, 5)

  def _read(self, state=None, *, stream=None, schedule=None, content=_CONTENT):
    return state_lib.read_state(
        state or self.state, stream or self.stream, schedule or self.schedule, content
    )

  def test_it_is_small_json_and_holds_the_position(self):
    self.assertEqual(json.loads(json.dumps(self.state)), self.state)
    self.assertLess(len(json.dumps(self.state)), 600)
    self.assertEqual((self.state["step"], self.state["position"]), (5, 40))

  def test_it_restores_the_step_under_the_same_schedule(self):
    self.assertEqual(self._read(), (5, self.schedule, self.stream))

  def test_another_batch_size_goes_on_from_the_position(self):
    step, schedule, _ = self._read(schedule=schedule_lib.BatchSchedule.constant(16))
    self.assertEqual((step, schedule.start(5), schedule.start(6)), (5, 40, 56))
    again = state_lib.make_state(self.stream, schedule, _CONTENT, 6)
    self.assertEqual((again["position"], again["anchor"]), (56, [5, 40]))

  @parameterized.parameters(
      ("seed", {"seed": 4}),
      ("order", {"order": "sequential"}),
      ("split", {"held_out_instances": 4}),
  )
  def test_another_identity_is_refused_and_the_field_named(self, field, change):
    stream = stream_lib.train_stream(self.index, **{"order": "feistel", "seed": 3, **change})
    with self.assertRaisesRegex(
        errors.ResumeError, f"another stream.*\n  {field}: the checkpoint has"
    ):
      self._read(stream=stream)

  def test_another_corpus_is_refused(self):
    stream = dataclasses.replace(self.stream, fingerprint="other")
    with self.assertRaisesRegex(errors.ResumeError, "fingerprint: .* this run has 'other'"):
      self._read(stream=stream)

  def test_another_filter_is_a_warning(self):
    with self.assertLogs(level="WARNING") as logs:
      self.assertEqual(self._read(content=steps.Content(ngram_filter=False))[0], 5)
    self.assertIn("ngram_filter=True, this run has False", logs.output[0])

  def test_another_sequence_length_of_the_same_corpus_goes_on_at_the_same_token(self):
    stream = stream_lib.train_stream(self.index.with_sequence_length(16), order="feistel", seed=3)
    step, schedule, _ = self._read(stream=stream)
    self.assertEqual((step, schedule.start(step)), (5, 20))

  def test_a_position_inside_a_longer_instance_is_refused(self):
    state = {**self.state, "position": 41}
    stream = stream_lib.train_stream(self.index.with_sequence_length(16), order="feistel", seed=3)
    with self.assertRaisesRegex(errors.ResumeError, "sample 41 of 8 tokens, which is inside"):
      self._read(state, stream=stream)

  @parameterized.parameters(({"next_index": 3},), ({"format": 99, "step": 1},), ("text",))
  def test_a_foreign_state_is_refused(self, state):
    with self.assertRaisesRegex(errors.ResumeError, "not a data state of format 1"):
      self._read(state)

  @parameterized.parameters("step", "position", "identity", "content", "sequence_length")
  def test_a_damaged_state_is_refused_and_the_field_named(self, field):
    state = {k: v for k, v in self.state.items() if k != field}
    with self.assertRaisesRegex(errors.ResumeError, f"damaged: '{field}' is None"):
      self._read(state)

  def test_a_negative_position_is_refused(self):
    with self.assertRaisesRegex(errors.ResumeError, "'position' is -4"):
      self._read({**self.state, "position": -4})

  def test_the_anchor_of_a_state_is_kept_where_it_fits(self):
    anchored = self.schedule.anchored(5, 41)
    state = state_lib.make_state(self.stream, anchored, _CONTENT, 9)
    start = self._read(state)
    self.assertEqual((start.step, start.schedule), (9, anchored))
    self.assertEqual(start.schedule.start(6), 49)

  def test_padding_at_the_end_of_a_finite_stream_was_no_sample(self):
    total = self.stream.order.num_instances
    self.assertNotEqual(total % 7, 0)
    schedule = schedule_lib.BatchSchedule.constant(7)
    finite = dataclasses.replace(self.stream, num_epochs=1)
    state = state_lib.make_state(finite, schedule, _CONTENT, -(-total // 7))
    self.assertEqual(state["position"], total)
    longer = dataclasses.replace(self.stream, num_epochs=2)
    start = self._read(state, stream=longer, schedule=schedule)
    self.assertEqual(start.schedule.start(start.step), total)

  def test_a_held_out_set_at_another_sequence_length_is_told_by_its_number(self):
    held = stream_lib.train_stream(self.index, order="feistel", seed=3, held_out_instances=8)
    state = state_lib.make_state(held, self.schedule, _CONTENT, 4)
    longer = stream_lib.train_stream(
        self.index.with_sequence_length(16), order="feistel", seed=3, held_out_instances=8
    )
    with self.assertRaisesRegex(
        errors.ResumeError, "set olmo_eval_instances=4, which is as much at 16"
    ):
      self._read(state, stream=longer)


if __name__ == "__main__":
  absltest.main()
