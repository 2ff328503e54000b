"""Tests of the saved state of the Grain iterators."""

import dataclasses
import json

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.devices import grain_state

_STATE = grain_state.GrainState(
    step=23,
    epoch_start=19,
    iterator_length=20,
    position=92,
    identity={"seed": 3},
    iterator={"next_index": 23},
)


class GrainStateTest(parameterized.TestCase):

  def test_a_state_survives_json(self):
    written = _STATE.write(own_iterator=True)
    self.assertEqual((written["format"], written["kind"], written["step"]), (2, "grain", 23))
    self.assertEqual(grain_state.read(json.loads(json.dumps(written))), _STATE)

  @parameterized.parameters(
      {"step": 22}, {"position": 91}, {"iterator": {"next_index": 22}}, {"identity": {}}
  )
  def test_a_state_that_was_changed_is_damaged(self, **change):
    written = _STATE.write(own_iterator=False)
    with self.assertRaisesRegex(errors.ResumeError, "damaged: its checksum is"):
      grain_state.read({**written, **change})

  def test_a_state_of_an_earlier_release_has_no_checksum(self):
    written = _STATE.write(own_iterator=False)
    del written["checksum"]
    self.assertEqual(grain_state.read(written), _STATE)

  def test_keys_that_are_numbers_keep_the_checksum_through_json(self):
    state = dataclasses.replace(_STATE, iterator={2: "a", 10: "b"})
    grain_state.read(json.loads(json.dumps(state.write(own_iterator=False))))

  def test_a_state_of_version_1_counts_steps_within_the_epoch(self):
    found = grain_state.read(
        {"step": 4, "iterator_length": 20, "epoch_start": 19, "position": 92, "identity": "lists"}
    )
    self.assertEqual((found.step, found.epoch_start, found.position), (23, 19, 92))
    self.assertEqual((found.identity, found.iterator), ("lists", None))
    plain = grain_state.read({"step": 4, "iterator_length": None, "iterator": {"next_index": 4}})
    self.assertEqual((plain.step, plain.epoch_start, plain.identity), (4, 0, None))

  def test_numpy_integers_are_integers(self):
    written = _STATE.write(own_iterator=False)
    for name in ("step", "position", "epoch_start", "iterator_length"):
      written[name] = np.int64(written[name])
    written["iterator"] = {"next_index": np.int32(23)}
    found = grain_state.read(written)
    self.assertEqual(found, _STATE)
    self.assertIs(type(found.iterator["next_index"]), int)

  def test_states_of_grain_iterators_survive_json(self):
    inner = {"bytes": b"\x00\xff", "remainder_slices": {"inputs": (3, 5)}, "list": [np.int64(1)]}
    for given in (inner, b'{"last_seen": 3}'):
      back = grain_state.from_json(json.loads(json.dumps(grain_state.jsonable(given))))
      self.assertEqual(back, given)

  @parameterized.named_parameters(
      ("no_dict", [1, 2], "is a dict, found list"),
      ("other_kind", {"format": 2, "kind": "stream", "step": 1}, "another kind of iterator"),
      ("later_format", {"format": 3, "kind": "grain", "step": 1}, "format 3"),
      ("missing", {"position": 1}, "no iterator_length and no step, only"),
      ("negative", {"step": -1, "iterator_length": None}, "'step' is -1"),
      ("text", {"step": "2", "iterator_length": None}, "'step' is '2'"),
      ("length", {"step": 2, "iterator_length": 2.5}, "'iterator_length' is 2.5"),
      ("boolean", {"step": True, "iterator_length": None}, "'step' is True"),
      ("large", {"step": 10**30, "iterator_length": None}, "'step' is 10000"),
      ("array", {"step": np.arange(2), "iterator_length": None}, "'step' is array"),
      ("position", {"step": 2, "iterator_length": None, "position": "2"}, "'position' is '2'"),
      ("identity", {"step": 2, "iterator_length": None, "identity": [1]}, "'identity' is .1."),
      ("kind", {"format": [2], "kind": {"a": 1}, "step": 2}, "found format .2."),
      ("iterators", {"step": 2, "iterator_length": None, "iterators": 3}, "'iterators' is 3"),
      (
          "bytes",
          {"step": 2, "iterator_length": None, "iterator": {"__bytes__": "a"}},
          "invalid bytes",
      ),
      (
          "no_bytes",
          {"step": 2, "iterator_length": None, "iterator": {"__bytes__": 5}},
          "invalid bytes",
      ),
      (
          "order",
          {"format": 2, "kind": "grain", "step": 2, "epoch_start": 3, "iterator_length": 9},
          "its step, 2, is before the start of its epoch, 3",
      ),
      (
          "processes",
          {"format": 2, "kind": "grain", "step": 2, "iterator_length": 9, "iterators": [{}, {}]},
          "saved by 2 processes, each with data of its own, and this run has 1. Resume with 2",
      ),
  )
  def test_a_state_that_cannot_be_read_says_why(self, state, message):
    with self.assertRaisesRegex(errors.ResumeError, message):
      grain_state.read(state)

  def test_a_state_that_is_nested_too_deeply_is_a_resume_error(self):
    deep = []
    for _ in range(100_000):
      deep = [deep]
    for state in (deep, {"step": 2, "iterator_length": None, "iterator": deep}):
      with self.assertRaises(errors.ResumeError):
        grain_state.read(state)

  @parameterized.parameters(
      ({"step": 1, "iterator_length": None}, True),
      ({"format": 2, "kind": "grain"}, True),
      ({"format": 2, "kind": "stream"}, False),
      ({"next_index": 4}, False),
      ([1], False),
  )
  def test_a_state_is_recognised(self, value, expected):
    self.assertEqual(grain_state.is_state(value), expected)


if __name__ == "__main__":
  absltest.main()
