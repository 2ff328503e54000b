import dataclasses
import os
import pickle
import tempfile
import threading

import hypothesis
import hypothesis.strategies as st
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.order import corpora as corpora_lib
from maxtext_olmo.order import mixture as mixture_lib
from maxtext_olmo.order import staged_windows
from maxtext_olmo.order import stages as stages_lib
from tests import corpora

_LABELS = ("label-0", "label-1")


def _mixtures():
  values = st.sampled_from([0.3, 1.0, 2.5])
  return st.dictionaries(st.sampled_from(_LABELS), values, min_size=1)


class StagedWindowsTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.indexes, cls.cache = {}, tempfile.mkdtemp()
    for window in (None, 32):
      directory = tempfile.mkdtemp()
      path, _ = corpora.write_corpus(directory, max_target_sequence_length=window)
      cls.indexes[window] = index_lib.load_index(path)

  def make(self, *stages, window=None, held_out=0, num_epochs=None):
    """Returns the stream of (position, settings) pairs."""
    index = self.indexes[window]
    made = [
        stages_lib.Stage(
            position,
            f"position {position}" if position else "",
            stages_lib.Settings(
                **{"order": "feistel", "seed": 1, "fingerprint": index.fingerprint, **settings}
            ),
        )
        for position, settings in stages
    ]
    corpora_ = corpora_lib.Corpora(index, held_out_instances=held_out, cache_dir=self.cache)
    return staged_windows.StagedWindows(made, corpora_, num_epochs)

  @hypothesis.settings(deadline=None, max_examples=60)
  @hypothesis.given(
      mixtures=st.lists(_mixtures(), min_size=1, max_size=5),
      lengths=st.lists(st.integers(1, 40), min_size=5, max_size=5),
      unit=st.sampled_from(mixture_lib.UNITS[:2]),
      window=st.sampled_from([None, 32]),
      held_out=st.sampled_from([0, 12]),
  )
  def test_labels_continue_through_any_mixtures(self, mixtures, lengths, unit, window, held_out):
    chunk = self.indexes[window].chunk_size
    firsts = np.cumsum([0, *lengths]) * chunk
    settings = [
        {"mixture": stages_lib.mixture_pairs(mixture), "unit": unit} for mixture in mixtures
    ]
    stream = self.make(*zip(firsts.tolist(), settings), window=window, held_out=held_out)
    ids = stream.locate(np.arange(firsts[len(mixtures)]))[1]
    index = self.indexes[window]
    files = index.locate(ids)[0]
    for label in _LABELS:
      mine = ids[[index.files[file].label == label for file in files.tolist()]]
      alone = self.make(
          (0, {"mixture": ((label, 1.0),), "unit": "weights"}), window=window, held_out=held_out
      )
      np.testing.assert_array_equal(mine, alone.locate(np.arange(len(mine)))[1])

  @hypothesis.settings(deadline=None, max_examples=40)
  @hypothesis.given(
      stages=st.lists(
          st.fixed_dictionaries(
              {
                  "order": st.sampled_from(["feistel", "sequential"]),
                  "seed": st.integers(0, 2),
                  "mixture": st.one_of(st.just({}), _mixtures()).map(stages_lib.mixture_pairs),
                  "unit": st.just("weights"),
                  "leave_out_seen": st.booleans(),
              }
          ),
          min_size=2,
          max_size=4,
      ),
      lengths=st.lists(st.integers(1, 50), min_size=4, max_size=4),
      window=st.sampled_from([None, 32]),
      held_out=st.sampled_from([0, 12]),
  )
  def test_visits_are_the_inverse_and_nothing_seen_comes_again(
      self, stages, lengths, window, held_out
  ):
    stages[0] = {**stages[0], "leave_out_seen": False}
    index = self.indexes[window]
    firsts = (np.cumsum([0, *lengths]) * index.chunk_size)[: len(stages)].tolist()
    stream = self.make(*zip(firsts, stages), window=window, held_out=held_out)
    end = firsts[-1] + 150
    epochs, ids = stream.locate(np.arange(end))
    for epoch in np.unique(epochs).tolist():
      which, positions = stream.visits(epoch, np.arange(index.total_instances))
      which, positions = which[positions < end], positions[positions < end]
      self.assertCountEqual(positions.tolist(), np.flatnonzero(epochs == epoch).tolist())
      np.testing.assert_array_equal(ids[positions], which)
      first = stream.positions(epoch, np.arange(index.total_instances))
      for row in range(index.total_instances):
        expected = positions[which == row]
        if len(expected):
          self.assertEqual(first[row], expected.min())
    if stages[-1]["leave_out_seen"] and not stages[-1]["mixture"]:
      seen = set(ids[: firsts[-1]].tolist())
      rest = stream.stream(len(stages) - 1).epochs.length(0)
      train = stream.split.train_ids(np.arange(stream.split.num_train))
      if len(seen) < len(train):
        first_epoch = stream.locate(np.arange(firsts[-1], firsts[-1] + rest))[1].tolist()
        self.assertCountEqual(seen | set(first_epoch), train.tolist())
        self.assertFalse(seen & set(first_epoch))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(stream)).locate(np.arange(end))[1], ids)

  def test_labels_of_a_mixture_leave_out_what_was_seen_once(self):
    stream = self.make(
        (0, {}),
        (60, {"mixture": (("label-0", 1.0),), "unit": "weights", "leave_out_seen": True}),
        (70, {"mixture": (("label-0", 1.0), ("label-1", 1.0)), "unit": "weights"}),
    )
    index = self.indexes[None]
    ids = stream.locate(np.arange(400))[1]
    files = index.locate(ids)[0]
    is_0 = np.array([index.files[file].label == "label-0" for file in files.tolist()])
    count = sum(entry.n_instances for entry in index.files if entry.label == "label-0")
    self.assertLen(set(ids[is_0][:count].tolist()), count)

  def test_an_end_that_depends_on_a_bitmap_is_known_when_it_is_built(self):
    stream = self.make((0, {}), (40, {"seed": 91, "leave_out_seen": True}), num_epochs=2)
    total = self.indexes[None].total_instances
    self.assertIsNone(stream.num_positions)
    self.assertTrue(stream.has(39))
    self.assertTrue(stream.has(2 * total - 1))
    self.assertFalse(stream.has(2 * total))
    self.assertEqual(stream.num_positions, 2 * total)

  def test_a_bitmap_is_built_in_the_background_shortly_before_its_stage(self):
    stream = self.make((0, {}), (100, {"seed": 92, "leave_out_seen": True}), num_epochs=1)
    stream.look_ahead(10)
    self.assertNotIn("olmo_stage", [thread.name for thread in threading.enumerate()])
    self.assertIsNone(stream.num_positions)
    stream.look_ahead(95)
    for thread in threading.enumerate():
      if thread.name == "olmo_stage":
        thread.join()
    self.assertEqual(stream.num_positions, self.indexes[None].total_instances)
    stream.close()

  def test_a_bitmap_that_cannot_be_built_in_the_background_is_not_tried_at_each_step(self):
    stream = self.make((0, {}), (100, {"seed": 3, "leave_out_seen": True}))
    file = self.create_tempfile().full_path
    corpora_ = dataclasses.replace(stream.corpora, cache_dir=f"{file}/cache")
    stream = staged_windows.StagedWindows(stream.stages, corpora_)
    with self.assertLogs(level="WARNING") as logged:
      for position in (95, 96, 97):
        stream.look_ahead(position)
        for thread in threading.enumerate():
          if thread.name == "olmo_stage":
            thread.join()
    self.assertLen(logged.output, 1)
    with self.assertRaisesRegex(errors.ConfigError, "cannot be written"):
      stream.locate(np.array([100]))

  def test_a_mixture_after_a_stage_without_what_was_seen_waits_for_the_same_bitmap(self):
    mixture = {"mixture": (("label-0", 1.0), ("label-1", 1.0)), "unit": "weights", "seed": 93}
    stream = self.make(
        (0, {}),
        (40, {**mixture, "leave_out_seen": True}),
        (60, {**mixture, "mixture": (("label-0", 2.0), ("label-1", 1.0))}),
        num_epochs=1,
    )
    cache = tempfile.mkdtemp()
    corpora_ = dataclasses.replace(stream.corpora, cache_dir=cache)
    stream = staged_windows.StagedWindows(stream.stages, corpora_, 1)
    # Nothing is built for what a start needs to know.
    self.assertIsNone(stream.num_positions)
    self.assertTrue(stream.has(39))
    stream.locate(np.arange(40))
    stream.look_ahead(10)
    self.assertEmpty(os.listdir(cache))
    for position in (39, 59):
      stream.look_ahead(position)
      for thread in threading.enumerate():
        if thread.name == "olmo_stage":
          thread.join()
      self.assertEqual(stream.num_positions is None, position == 39)
      self.assertLen([name for name in os.listdir(cache) if not name.endswith(".lock")], 1)
    stream.close()

  def test_epochs_do_not_depend_on_the_corpora_of_earlier_stages(self):
    n = self.indexes[None].total_instances
    gone = {"fingerprint": "sha256:gone", "index_path": "/nowhere/index.json"}
    whole = self.make((0, {}), (10, {"seed": 2}), (3 * n + 5, {"seed": 3}))
    stream = self.make((0, {}), (10, gone), (3 * n + 5, {"seed": 3}))
    here = np.arange(3 * n + 5, 5 * n)
    for found, expected in zip(stream.locate(here), whole.locate(here)):
      np.testing.assert_array_equal(found, expected)
    epochs = stream.locate(here)[0]
    self.assertEqual([stream.stage_of_epoch(epoch) for epoch in epochs[[0, n]]], [(2, 0), (2, 1)])
    np.testing.assert_array_equal(
        stream.positions(int(epochs[0]), stream.locate(here[:9])[1]), here[:9]
    )
    with self.assertRaisesRegex(errors.CorpusError, "/nowhere/index.json"):
      stream.locate(np.array([10]))


if __name__ == "__main__":
  absltest.main()
