from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.loader import state_format
from maxtext_olmo.order import schedule
from maxtext_olmo.order import timeline

_IDENTITY = {"fingerprint": "sha256:0", "order": "feistel", "seed": 3, "split": "none"}
_CONTENT = {"ngram_filter": True, "document_eos_id": None}


def _state():
  """Returns the state of a run after five batches of 8 rows."""
  entry = timeline.Entry(
      step=0,
      position=0,
      sequence_length=8,
      schedule=schedule.BatchSchedule.constant(8),
      identity=_IDENTITY,
      content=_CONTENT,
  )
  history = timeline.Timeline((entry,)).to_json()
  return {"format": 2, "kind": "stream", "step": 5, "position": 40, "history": history}


class StateFormatTest(parameterized.TestCase):

  def test_a_state_gives_its_step_position_and_history(self):
    step, position, history = state_format.parse_state(_state())
    self.assertEqual((step, position), (5, 40))
    self.assertEqual(history.present.identity, _IDENTITY)

  def test_a_state_of_format_1_begins_its_history_where_it_was_saved(self):
    state = {"format": 1, "step": 5, "position": 40, "sequence_length": 8}
    step, position, history = state_format.parse_state(
        {**state, "identity": _IDENTITY, "content": _CONTENT}
    )
    self.assertEqual((step, position), (5, 40))
    (entry,) = history.entries
    self.assertEqual((entry.step, entry.position, entry.content), (5, 40, _CONTENT))

  @parameterized.parameters(
      ({"next_index": 3},), ({"format": 99, "step": 1},), ("text",), (None,), ([],)
  )
  def test_a_foreign_state_is_refused(self, state):
    with self.assertRaisesRegex(errors.ResumeError, "not a data state that this library saved"):
      state_format.parse_state(state)

  def test_a_state_of_another_kind_is_refused(self):
    with self.assertRaisesRegex(errors.ResumeError, "kind 'grain', but .* needs 'stream'"):
      state_format.parse_state({**_state(), "kind": "grain"})

  @parameterized.parameters("step", "position")
  def test_a_damaged_number_is_refused_and_named(self, name):
    for value in (None, -4, "5", 2.5, True, 1 << 62):
      with self.assertRaisesRegex(errors.ResumeError, f"damaged: '{name}' is {value!r}"):
        state_format.parse_state({**_state(), name: value})

  def test_a_state_that_is_nested_too_deeply_is_a_resume_error(self):
    deep = []
    for _ in range(100_000):
      deep = [deep]
    for path in (("history",), ("history", 0, "content"), ("kind",), ("format",)):
      for value in (deep, 10**5000):  # Python does not print the latter.
        state = _state()
        inner = state
        for key in path[:-1]:
          inner = inner[key]
        inner[path[-1]] = value
        with self.assertRaises(errors.ResumeError):
          state_format.parse_state(state)


if __name__ == "__main__":
  absltest.main()
