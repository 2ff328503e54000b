"""Tests of the state of a run."""

import dataclasses
import json

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.loader import state as state_lib
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.order import stream as stream_lib
from tests import corpora

_CONTENT = {"ngram_filter": True, "document_eos_id": None}


def make_state(stream, schedule, step):
  """The state of a run that began with this stream and schedule."""
  start = state_lib.Start(step, schedule, stream)
  history = state_lib.begin_history(start, _CONTENT)
  return state_lib.make_state(history, stream, schedule, step)


class StateTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    path, _ = corpora.write_corpus(self.create_tempdir().full_path, max_target_sequence_length=32)
    self.index = index_lib.load_index(path)
    self.stream = stream_lib.train_stream(self.index, order="feistel", seed=3)
    self.schedule = schedule_lib.BatchSchedule.constant(8)
    self.state = make_state(self.stream, self.schedule, 5)

  def _read(self, state=None, *, stream=None, schedule=None, content=_CONTENT):
    return state_lib.read_state(
        state or self.state, stream or self.stream, schedule or self.schedule, content
    )

  def test_it_is_small_json_and_holds_the_position(self):
    self.assertEqual(json.loads(json.dumps(self.state)), self.state)
    self.assertLess(len(json.dumps(self.state)), 800)
    self.assertEqual((self.state["step"], self.state["position"]), (5, 40))

  def test_it_restores_the_step_under_the_same_schedule(self):
    self.assertEqual(self._read()[:3], (5, self.schedule, self.stream))

  def test_another_batch_size_goes_on_from_the_position(self):
    start = self._read(schedule=schedule_lib.BatchSchedule.constant(16))
    step, schedule = start.step, start.schedule
    self.assertEqual((step, schedule.start(5), schedule.start(6)), (5, 40, 56))
    history = state_lib.begin_history(start, _CONTENT)
    again = state_lib.make_state(history, self.stream, schedule, 6)
    self.assertEqual(again["position"], 56)
    self.assertEqual([(e["step"], e["position"]) for e in again["history"]], [(0, 0), (5, 40)])
    # Both batch sizes are known, each where it was in force.
    self.assertEqual([history.at(k).schedule.start(k) for k in (0, 4, 5, 6)], [0, 32, 40, 56])

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
      self.assertEqual(self._read(content={**_CONTENT, "ngram_filter": False})[0], 5)
    self.assertIn("ngram_filter=True, this run has False", logs.output[0])

  def test_another_sequence_length_of_the_same_corpus_goes_on_at_the_same_token(self):
    stream = stream_lib.train_stream(self.index.with_sequence_length(16), order="feistel", seed=3)
    start = self._read(stream=stream)
    self.assertEqual((start.step, start.schedule.start(start.step)), (5, 20))

  def test_a_position_inside_a_longer_instance_is_refused(self):
    state = {**self.state, "position": 41}
    stream = stream_lib.train_stream(self.index.with_sequence_length(16), order="feistel", seed=3)
    with self.assertRaisesRegex(errors.ResumeError, "sample 41 of 8 tokens, which is inside"):
      self._read(state, stream=stream)

  @parameterized.parameters(({"next_index": 3},), ({"format": 99, "step": 1},), ("text",))
  def test_a_foreign_state_is_refused(self, state):
    with self.assertRaisesRegex(errors.ResumeError, "not a data state that this library saved"):
      self._read(state)

  @parameterized.parameters("step", "position", "history")
  def test_a_damaged_state_is_refused_and_the_field_named(self, field):
    state = {k: v for k, v in self.state.items() if k != field}
    with self.assertRaisesRegex(errors.ResumeError, f"damaged: .*'{field}'"):
      self._read(state)

  @parameterized.parameters("identity", "content", "sequence_length", "schedule", "step", "extents")
  def test_a_damaged_history_is_refused(self, field):
    for value in (None, [1], "text", -1, 10**30):
      entry = {**self.state["history"][0], field: value}
      with self.assertRaisesRegex(errors.ResumeError, "history in the data state is damaged"):
        self._read({**self.state, "history": [entry]})
      del entry[field]
      with self.assertRaisesRegex(errors.ResumeError, "history in the data state is damaged"):
        self._read({**self.state, "history": [entry]})

  def test_numpy_integers_are_taken_for_integers(self):
    state = {**self.state, "step": np.int64(5), "position": np.int32(40)}
    self.assertEqual(self._read(state)[:3], (5, self.schedule, self.stream))

  def test_a_state_of_format_1_resumes_and_says_what_it_does_not_know(self):
    state = {
        "format": 1,
        "step": 5,
        "position": 40,
        "anchor": [0, 0],
        "sequence_length": 8,
        "identity": self.stream.identity(),
        "content": _CONTENT,
    }
    start = self._read(state)
    self.assertEqual((start.step, start.schedule.start(5)), (5, 40))
    history = state_lib.begin_history(start, _CONTENT)
    self.assertEqual(history.at(5).schedule.start(7), 56)
    with self.assertRaisesRegex(errors.OrderError, "saved by an older version"):
      history.at(4)

  def test_a_state_of_another_kind_is_refused(self):
    with self.assertRaisesRegex(errors.ResumeError, "kind 'grain', this iterator needs 'stream'"):
      self._read({**self.state, "kind": "grain"})

  def test_a_negative_position_is_refused(self):
    with self.assertRaisesRegex(errors.ResumeError, "'position' is -4"):
      self._read({**self.state, "position": -4})

  def test_the_anchor_of_a_state_is_kept_where_it_fits(self):
    anchored = self.schedule.anchored(5, 41)
    state = make_state(self.stream, anchored, 9)
    start = self._read(state)
    self.assertEqual((start.step, start.schedule), (9, anchored))
    self.assertEqual(start.schedule.start(6), 49)

  def test_padding_at_the_end_of_a_finite_stream_was_no_sample(self):
    total = self.stream.order.num_instances
    self.assertNotEqual(total % 7, 0)
    schedule = schedule_lib.BatchSchedule.constant(7)
    finite = dataclasses.replace(self.stream, num_epochs=1)
    state = make_state(finite, schedule, -(-total // 7))
    self.assertEqual(state["position"], total)
    longer = dataclasses.replace(self.stream, num_epochs=2)
    start = self._read(state, stream=longer, schedule=schedule)
    self.assertEqual(start.schedule.start(start.step), total)

  def test_a_held_out_set_at_another_sequence_length_is_told_by_its_number(self):
    held = stream_lib.train_stream(self.index, order="feistel", seed=3, held_out_instances=8)
    state = make_state(held, self.schedule, 4)
    longer = stream_lib.train_stream(
        self.index.with_sequence_length(16), order="feistel", seed=3, held_out_instances=8
    )
    with self.assertRaisesRegex(
        errors.ResumeError, "set olmo_eval_instances=4, which is as much at 16"
    ):
      self._read(state, stream=longer)


if __name__ == "__main__":
  absltest.main()
