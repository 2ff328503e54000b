"""Tests of the state of a run: what it refuses, what it accepts, and the history it keeps."""

import copy
import dataclasses
import json

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import maxtext_olmo
from maxtext_olmo import errors
from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.loader import corpus_change
from maxtext_olmo.loader import state as state_lib
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.order import stream as stream_lib
from tests import corpora
from tests.loader import cases

_CONTENT = {"ngram_filter": True, "document_eos_id": None}


def setUpModule():
  cases.compile_fast()


def _paths(value, path=()):
  """Yields where each field and item of a JSON value is."""
  items = value.items() if isinstance(value, dict) else enumerate(value)
  for key, item in items:
    yield (*path, key)
    if isinstance(item, (dict, list)):
      yield from _paths(item, (*path, key))


def _changed(state, path, value):
  """Returns a copy of a state with another value somewhere; `...` removes what is there."""
  state = copy.deepcopy(state)
  inner = state
  for key in path[:-1]:
    inner = inner[key]
  if value is ...:
    del inner[path[-1]]
  else:
    inner[path[-1]] = value
  return state


class StateTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    path, _ = corpora.write_corpus(self.create_tempdir().full_path, max_target_sequence_length=32)
    self.index = maxtext_olmo.load_index(path)
    self.stream = stream_lib.train_stream(self.index, order="feistel", seed=3)
    self.schedule = schedule_lib.BatchSchedule.constant(8)
    self.state = self.make(5)

  def make(self, step, *, stream=None, schedule=None):
    """Returns the state of a run that began at step 0."""
    stream, schedule = stream or self.stream, schedule or self.schedule
    history = state_lib.begin_history(state_lib.Start(0, schedule, stream), _CONTENT)
    return state_lib.make_state(history, stream, schedule, step)

  def read(self, state=None, *, stream=None, schedule=None, content=None, **values):
    return state_lib.read_state(
        self.state if state is None else state,
        stream or self.stream,
        schedule or self.schedule,
        content or _CONTENT,
        **values,
    )

  def test_it_is_small_json_and_holds_the_position(self):
    self.assertEqual(json.loads(json.dumps(self.state)), self.state)
    self.assertLess(len(json.dumps(self.state)), 600)
    self.assertEqual((self.state["step"], self.state["position"]), (5, 40))
    self.assertEqual((self.state["format"], self.state["kind"]), (2, "stream"))

  def test_it_restores_the_step_under_the_same_schedule(self):
    self.assertEqual(self.read()[:3], (5, self.schedule, self.stream))

  def test_another_batch_size_continues_from_the_position(self):
    start = self.read(schedule=schedule_lib.BatchSchedule.constant(16))
    self.assertEqual((start.step, start.schedule.start(5), start.schedule.start(6)), (5, 40, 56))
    history = state_lib.begin_history(start, _CONTENT)
    again = state_lib.make_state(history, start.stream, start.schedule, 6)
    self.assertEqual(again["position"], 56)
    self.assertEqual(again["history"][-1]["schedule"]["anchor"], [5, 40])

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
      self.read(stream=stream)

  def test_another_corpus_is_refused(self):
    stream = dataclasses.replace(self.stream, fingerprint="other")
    with self.assertRaisesRegex(errors.ResumeError, "fingerprint: .* this run has 'other'"):
      self.read(stream=stream)

  def test_another_filter_is_a_warning(self):
    with self.assertLogs(level="WARNING") as logs:
      self.assertEqual(self.read(content={**_CONTENT, "ngram_filter": False}).step, 5)
    self.assertIn("From step 5 on, repetition filter: on → off", logs.output[0])

  def test_exclusions_that_are_new_are_named_in_a_warning(self):
    self.state["history"][0]["content"]["exclude"] = None
    with self.assertLogs(level="WARNING") as logs:
      self.read(
          content={**_CONTENT, "exclude": "3297"}, exclusions={"3297": "bad.jsonl (9 tokens)"}
      )
    self.assertIn("From step 5 on, olmo_exclude: none → bad.jsonl (9 tokens)", logs.output[0])

  def test_another_sequence_length_of_the_same_corpus_continues_at_the_same_token(self):
    stream = stream_lib.train_stream(self.index.with_sequence_length(16), order="feistel", seed=3)
    start = self.read(stream=stream)
    self.assertEqual((start.step, start.schedule.start(5)), (5, 20))
    entries = state_lib.begin_history(start, _CONTENT).entries
    self.assertEqual(
        [(e.step, e.position, e.sequence_length) for e in entries], [(0, 0, 8), (5, 20, 16)]
    )

  def test_a_position_inside_a_longer_instance_is_refused(self):
    stream = stream_lib.train_stream(self.index.with_sequence_length(16), order="feistel", seed=3)
    state = self.make(5, schedule=self.schedule.anchored(5, 41))
    with self.assertRaisesRegex(errors.ResumeError, "position 41 in samples of 8 tokens, inside"):
      self.read(state, stream=stream)

  def test_the_anchor_of_a_state_is_kept_where_it_fits(self):
    anchored = self.schedule.anchored(5, 41)
    start = self.read(self.make(9, schedule=anchored))
    self.assertEqual((start.step, start.schedule), (9, anchored))
    self.assertEqual(start.schedule.start(6), 49)

  def test_padding_at_the_end_of_a_finite_stream_does_not_count(self):
    total = self.stream.order.num_instances
    self.assertNotEqual(total % 7, 0)
    schedule = schedule_lib.BatchSchedule.constant(7)
    finite = dataclasses.replace(self.stream, num_epochs=1)
    state = self.make(-(-total // 7), stream=finite, schedule=schedule)
    self.assertEqual(state["position"], total)
    longer = dataclasses.replace(self.stream, num_epochs=2)
    start = self.read(state, stream=longer, schedule=schedule)
    self.assertEqual(start.schedule.start(start.step), total)
    # The same run again has changed nothing.
    start = self.read(state, stream=finite, schedule=schedule)
    self.assertEqual(start.schedule, schedule)
    self.assertLen(state_lib.begin_history(start, _CONTENT).entries, 1)

  def test_the_held_out_count_is_given_at_another_sequence_length(self):
    held = stream_lib.train_stream(self.index, order="feistel", seed=3, held_out_instances=8)
    longer = stream_lib.train_stream(
        self.index.with_sequence_length(16), order="feistel", seed=3, held_out_instances=8
    )
    with self.assertRaisesRegex(
        errors.ResumeError, "set olmo_eval_instances=4, the same data in 16-token rows"
    ):
      self.read(self.make(4, stream=held), stream=longer)

  @parameterized.parameters(1, 2)
  def test_removing_any_field_of_a_state_is_a_resume_error(self, version):
    state = self.state
    if version == 1:
      entry = self.state["history"][0]
      state = {name: entry[name] for name in ("sequence_length", "identity", "content")}
      state |= {"format": 1, "step": 5, "position": 40, "anchor": [0, 0]}
    self.assertEqual(self.read(state).step, 5)
    # The anchor of format 1 is no longer read, and a content may lack what it did not record.
    unused = {("anchor",), ("anchor", 0), ("anchor", 1)}
    for path in _paths(state):
      if path in unused or "content" in path[:-1]:
        continue
      for value in (..., None, "text", -1, [], [[]], {"a": 1}):
        if (path[-1], value) in (("extents", []), ("epochs", None), ("content", {"a": 1})):
          continue  # There may be none of these.
        if path[-1] == "epochs" and value is ...:
          continue
        damaged = _changed(state, path, value)
        with self.subTest(path=path, value=value), self.assertRaises(errors.ResumeError):
          self.read(damaged)

  @parameterized.parameters(
      ((), [1]),
      (("step",), 10**30),
      (("step",), np.array([1, 2])),
      (("position",), 39),  # Step 5 is at position 40.
      (("position",), 48),
      (("position",), 0),
      (("format",), True),
      (("format",), np.array([1, 2])),
      (("kind",), ["stream"]),
      (("history",), []),
      (("history",), {"0": {}}),
      (("history", 0, "step"), 6),  # After the state's own step.
      (("history", 0, "position"), 8),
      (("history", 0, "sequence_length"), 0),
      (("history", 0, "sequence_length"), 5),  # Not a divisor of 32.
      (("history", 0, "sequence_length"), 64),
      (("history", 0, "sequence_length"), 1 << 61),
      (("history", 0, "schedule"), [1]),
      (("history", 0, "schedule", "stages"), [[0, 8], [0, 4]]),
      (("history", 0, "schedule", "stages"), [[0, 4]]),  # That is not how it came to 40.
      (("history", 0, "schedule", "anchor"), 7),
      (("history", 0, "schedule", "anchor"), [0]),
      (("history", 0, "schedule", "anchor"), [6, 48]),
      (("history", 0, "schedule", "by_position"), 1),
      (("history", 0, "schedule", "epochs"), [[0, 4]]),
      (("history", 0, "identity"), []),
      (("history", 0, "identity", "fingerprint"), 5),
      (("history", 0, "identity", "fingerprint"), ["a"]),
      (("history", 0, "identity", "fingerprint"), "sha256:../\0" + "a" * 10_000),
      (("history", 0, "identity", "order"), np.array([1, 2])),
      (("history", 0, "identity", "split"), "² of"),
      (("history", 0, "content", "ngram_filter"), 1),
      (("history", 0, "content", "document_eos_id"), "x"),
      (("history", 0, "content", "document_eos_id"), [1]),
      (("history", 0, "content", "document_eos_id"), 2**70),
      (("history", 0, "content", "exclude"), 7),
      (("history", 0, "content"), []),
      (("history", 0, "content", "ngram_filter"), np.array([1, 2])),
      (("history", 0, "extents"), [[0, 0, "a"]]),
      (("history", 0, "extents"), [[0, 1]]),
      (("history", 0, "extents"), "abc"),
  )
  def test_a_state_that_is_wrong_somewhere_is_a_resume_error(self, path, value):
    state = _changed(self.state, path, value) if path else value
    with self.assertRaises(errors.ResumeError):
      self.read(state)
    with self.assertRaises(errors.ResumeError):
      self.read(state, corpus=corpus_change.CorpusPolicy(self.index, "no", "/tmp"))

  @parameterized.parameters([[(1, 3)]], [[(0, 3), (0, 4)]], [[(0, 1), (5, 3)]], [[(3, 4)]])
  def test_impossible_extents_are_a_resume_error(self, extents):
    whole = self.index

    def fingerprint(files):
      return index_lib.compute_fingerprint(
          sequence_length=whole.sequence_length,
          dtype=whole.dtype,
          tokenizer=whole.tokenizer,
          files=whole.files[:files],
          max_target_sequence_length=whole.max_target_sequence_length,
      )

    self.assertEqual(fingerprint(4), whole.fingerprint)
    values = [[first, files, fingerprint(files)] for first, files in extents]
    state = _changed(self.state, ("history", 0, "extents"), values)
    with self.assertRaises(errors.ResumeError):
      self.read(state, corpus=corpus_change.CorpusPolicy(self.index))

  def test_rows_of_a_length_that_the_index_cannot_have_are_refused(self):
    path, _ = corpora.write_corpus(self.create_tempdir().full_path)
    index = maxtext_olmo.load_index(path)
    stream = stream_lib.train_stream(index, order="feistel", seed=3)
    state = _changed(self.make(5, stream=stream), ("history", 0, "sequence_length"), 4)
    for corpus in (None, corpus_change.CorpusPolicy(index)):
      with self.assertRaisesRegex(errors.ResumeError, "rows of 4 tokens, but .* fingerprint is 8"):
        self.read(state, stream=stream, corpus=corpus)

  def test_numpy_integers_are_integers(self):
    def with_numpy(value):
      if isinstance(value, dict):
        return {key: with_numpy(item) for key, item in value.items()}
      if isinstance(value, list):
        return [with_numpy(item) for item in value]
      if isinstance(value, int) and not isinstance(value, bool):
        return np.int64(value)
      return value

    start = self.read(with_numpy(self.state))
    self.assertEqual(start, self.read())
    self.assertIs(type(start.step), int)
    json.dumps(state_lib.make_state(start.history, start.stream, start.schedule, start.step))


class HistoryTest(cases.LoaderCase):
  """A run that changes keeps an entry for each change, with its step and position."""

  def setUp(self):
    super().setUp()
    self.corpus_directory = self.create_tempdir().full_path
    self.index_path, _ = corpora.write_corpus(self.corpus_directory, tokens_per_file=(333, 150, 7))

  def continued(self, state, steps, **values):
    """Continues a run for some steps; returns what each step held, and the states after them."""
    iterator = self.train(**values)
    if state is not None:
      iterator.set_state(state)
    held, states = {}, []
    for _ in range(steps):
      step = iterator.step
      numbers = iterator.row_numbers(step).tolist()
      held[step] = (iterator.stream.epochs, iterator.position, numbers)
      next(iterator)
      states.append(json.loads(json.dumps(iterator.get_state())))
    self.iterator = iterator
    return held, states

  def test_a_run_with_many_changes_can_locate_every_past_step(self):
    held, (*_, state) = self.continued(None, 3)  # 12 samples
    more, (*_, state) = self.continued(state, 4, global_batch_size_to_load=6)  # 24
    held |= more
    bigger = {"global_batch_size_to_load": 10}
    more, (*_, state) = self.continued(state, 2, **bigger)  # 20
    held |= more
    with self.assertLogs(level="WARNING"):
      more, (*_, state) = self.continued(state, 1, **bigger, olmo_apply_ngram_filter=False)
    held |= more
    self.index_path, _ = corpora.write_corpus(self.corpus_directory)
    values = {**bigger, "olmo_apply_ngram_filter": False}
    more, (*_, state) = self.continued(state, 3, **values, olmo_allow_corpus_change="extend")
    held |= more
    more, (*_, state) = self.continued(state, 2, **values)
    held |= more
    self.assertEqual(sorted(held), list(range(15)))

    history = self.iterator.history
    self.assertEqual(
        [(entry.step, entry.position) for entry in history.entries],
        [(0, 0), (3, 12), (7, 36), (9, 56), (10, 66)],
    )
    self.assertEqual([e.content["ngram_filter"] for e in history.entries], [True] * 3 + [False] * 2)
    self.assertEqual([len(e.extents) for e in history.entries], [0, 0, 0, 0, 2])
    self.assertEqual(history.to_json(), state["history"])
    for step, (epochs, position, numbers) in held.items():
      entry = history.at(step)
      start = entry.schedule.start(step)
      self.assertEqual((start, entry.schedule.size(step)), (position, len(numbers)))
      stream = dataclasses.replace(
          self.iterator.stream, order=self.iterator.stream.order.with_epochs(epochs)
      )
      positions = start + np.arange(len(numbers))
      self.assertEqual(stream.instance_ids(positions).tolist(), numbers)

  def test_going_back_to_an_earlier_state_drops_what_came_after_it(self):
    _, early = self.continued(None, 5)
    _, late = self.continued(early[3], 3, global_batch_size_to_load=8)
    self.assertEqual([entry["step"] for entry in late[-1]["history"]], [0, 4])
    iterator = self.train(global_batch_size_to_load=6)
    iterator.set_state(late[-1])
    self.assertEqual([entry.step for entry in iterator.history.entries], [0, 4, 7])
    iterator.set_state(early[1])
    self.assertEqual([entry.step for entry in iterator.history.entries], [0, 2])
    same = self.train()
    same.set_state(late[-1])
    same.set_state(early[1])
    self.assertEqual(same.get_state()["history"], early[1]["history"])

  def test_restarts_that_change_nothing_add_nothing(self):
    _, states = self.continued(None, 2)
    for _ in range(3):
      _, states = self.continued(states[-1], 2)
    self.assertLen(states[-1]["history"], 1)
    # Nor does a change that is taken back before a step was done.
    state = self.train(global_batch_size_to_load=8)
    state.set_state(states[-1])
    back = self.train()
    back.set_state(state.get_state())
    self.assertEqual(back.get_state(), states[-1])

  def test_a_step_before_the_first_that_is_known_is_an_error(self):
    iterator = self.train(initial_step=100, olmo_initial_position=7)
    self.assertEqual(iterator.history.at(101).schedule.start(101), 11)
    with self.assertRaisesRegex(errors.OrderError, "Step 99 lies before step 100"):
      iterator.history.at(99)


if __name__ == "__main__":
  absltest.main()
