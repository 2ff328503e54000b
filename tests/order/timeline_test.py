"""Tests of the timeline of a run."""

import copy
import json

from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from maxtext_olmo import errors
from maxtext_olmo.order import epochs as epochs_lib
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.order import timeline


def _entry(step=0, *, size=8, content=None, epochs=None, extents=()):
  return timeline.Entry(
      step=step,
      position=10 * step,
      sequence_length=2048,
      schedule=schedule_lib.BatchSchedule(
          ((0, 4), (3, size)), anchor_step=2, anchor_position=7, epochs=epochs
      ),
      identity={"fingerprint": "abc", "order": "feistel", "seed": 3},
      content=content or {"ngram_filter": True, "document_eos_id": None},
      extents=extents,
  )


_GROWN = _entry(
    5, epochs=epochs_lib.Epochs(((0, 50), (2, 80))), extents=((0, 3, "abc"), (2, 5, "def"))
)
_RUN = timeline.Timeline(
    (_entry(0), _entry(5, size=16), _entry(9, content={"ngram_filter": False}))
)

# Values that a damaged file may have in place of a number, a list or a dict.
_ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.just(1 << 70),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(-1, 2), max_size=3),
    st.lists(st.lists(st.integers(-1, 2), max_size=3), max_size=3),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)


def _places(value, path=()):
  """Returns the paths of all values inside a JSON value."""
  items = value.items() if isinstance(value, dict) else enumerate(value)
  for key, item in items:
    yield (*path, key)
    if isinstance(item, (dict, list)):
      yield from _places(item, (*path, key))


_STATE = timeline.Timeline((_entry(0), _GROWN)).to_json()


class TimelineTest(parameterized.TestCase):

  @parameterized.parameters(_RUN, timeline.Timeline((_GROWN,)), timeline.Timeline((_entry(3),)))
  def test_it_survives_json(self, run):
    again = timeline.Timeline.from_json(json.loads(json.dumps(run.to_json())))
    self.assertEqual(again, run)
    self.assertEqual(again.present.schedule.start(6), run.present.schedule.start(6))

  def test_at_returns_the_entry_in_force(self):
    entries = _RUN.entries
    expected = [entries[0]] * 5 + [entries[1]] * 4 + [entries[2]] * 3
    self.assertEqual([_RUN.at(step) for step in range(12)], expected)
    self.assertEqual(_RUN.present, entries[2])

  def test_nothing_is_known_before_the_first_entry(self):
    run = timeline.Timeline((_entry(7),))
    self.assertEqual(run.at(7), run.present)
    with self.assertRaisesRegex(errors.OrderError, "Step 6 lies before step 7"):
      run.at(6)

  def test_a_change_adds_an_entry(self):
    changed = _RUN.changed(_entry(12, size=32))
    self.assertEqual(changed.entries, (*_RUN.entries, _entry(12, size=32)))
    self.assertEqual(changed.at(11), _RUN.present)

  def test_a_change_without_effect_adds_no_entry(self):
    again = timeline.Entry(**{**vars(_RUN.present), "step": 20, "position": 4})
    self.assertTrue(again.same_as(_RUN.present))
    self.assertEqual(_RUN.changed(again), _RUN)

  @parameterized.parameters((9, 2), (7, 2), (5, 1), (0, 0))
  def test_going_back_drops_entries_at_or_after_the_step(self, step, kept):
    entry = _entry(step, size=64)
    self.assertEqual(_RUN.changed(entry).entries, (*_RUN.entries[:kept], entry))

  def test_going_back_to_what_was_in_force_before_adds_nothing(self):
    self.assertEqual(_RUN.changed(_entry(4)).entries, _RUN.entries[:1])

  @given(st.sampled_from(list(_places(_STATE))), _ANYTHING, st.booleans())
  @settings(max_examples=300, deadline=None)
  def test_damage_is_a_resume_error_or_harmless(self, path, value, delete):
    state = copy.deepcopy(_STATE)
    inner = state
    for key in path[:-1]:
      inner = inner[key]
    if delete:
      del inner[path[-1]]
    else:
      inner[path[-1]] = value
    try:
      read = timeline.Timeline.from_json(state)
    except errors.ResumeError:
      return
    # A timeline that can still be read can also be used and saved.
    self.assertEqual(timeline.Timeline.from_json(read.to_json()), read)
    read.present.schedule.start(read.present.schedule.anchor_step)

  @given(_ANYTHING)
  @settings(max_examples=100, deadline=None)
  def test_a_value_that_is_not_a_history_is_a_resume_error(self, value):
    with self.assertRaisesRegex(errors.ResumeError, "damaged"):
      timeline.Timeline.from_json(value)

  @parameterized.parameters([[]], [[0]], [[None]], [["x"]], [[{}]])
  def test_a_list_without_entries_is_a_resume_error(self, value):
    with self.assertRaisesRegex(errors.ResumeError, "damaged"):
      timeline.Timeline.from_json(value)

  @parameterized.parameters(([0, 0],), ([5, 0],))
  def test_entries_out_of_order_are_a_resume_error(self, steps):
    state = [_entry(step).to_json() for step in steps]
    with self.assertRaisesRegex(errors.ResumeError, r"begin at the steps \["):
      timeline.Timeline.from_json(state)

  def test_the_error_says_what_is_wrong_and_what_to_do(self):
    state = _RUN.to_json()
    state[1]["position"] = -4
    with self.assertRaisesRegex(
        errors.ResumeError, r"history\[1\].position' is -4, expected a whole number.*initial_step"
    ):
      timeline.Timeline.from_json(state)


class StepsAtTest(absltest.TestCase):

  def _entry(self, step, position, size, **schedule):
    made = schedule_lib.BatchSchedule(((0, size),), step, position, **schedule)
    return timeline.Entry(step, position, 8, made, {}, {})

  def test_each_position_has_the_step_that_took_it(self):
    run = timeline.Timeline((self._entry(0, 0, 4), self._entry(3, 12, 6)))
    found = [run.steps_at(position) for position in range(24)]
    self.assertEqual(found, [[s] for s in [0] * 4 + [1] * 4 + [2] * 4 + [3] * 6 + [4] * 6])

  def test_a_resume_that_went_back_took_some_positions_twice(self):
    run = timeline.Timeline((self._entry(0, 0, 4), self._entry(3, 8, 8)))
    self.assertEqual([run.steps_at(p) for p in (7, 8, 11, 12, 16)], [[1], [2, 3], [2, 3], [3], [4]])

  def test_a_dropped_tail_and_unknown_positions_have_no_step(self):
    epochs = epochs_lib.Epochs.constant(10)
    run = timeline.Timeline((self._entry(5, 20, 4, epochs=epochs),))
    self.assertEqual(
        [run.steps_at(p) for p in (19, 20, 27, 28, 29, 30)], [[], [5], [6], [], [], [7]]
    )


if __name__ == "__main__":
  absltest.main()
