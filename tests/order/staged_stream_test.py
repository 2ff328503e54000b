"""Tests of streams with stages, whatever the rows of a stage are."""

import pickle

import numpy as np
from absl.testing import absltest

from maxtext_olmo.order import corpora as corpora_lib
from maxtext_olmo.order import epochs as epochs_lib
from maxtext_olmo.order import staged_stream
from maxtext_olmo.order import stages as stages_lib


class _Counting:
  """A stream whose rows are its positions in an epoch of some length."""

  sequence_length = 4

  def __init__(self, length, num_epochs):
    self.epochs = epochs_lib.Epochs(((0, length),))
    self.num_positions = None if num_epochs is None else length * num_epochs

  def has(self, position):
    return self.num_positions is None or position < self.num_positions

  def locate(self, positions):
    return self.epochs.locate(positions)

  def positions(self, epoch, rows):
    length = self.epochs.length(0)
    return np.where(rows < length, rows + epoch * length, -1)

  def visits(self, epoch, rows):
    found = self.positions(epoch, rows)
    return np.flatnonzero(found >= 0), found[found >= 0]

  def identity(self):
    return {"length": self.epochs.length(0)}


class _Stages(staged_stream.StagedStream):
  """Stages whose epochs have 10, 11, 12, … rows."""

  def _make(self, number):
    last = number + 1 == len(self.stages)
    return _Counting(10 + number, self.num_epochs if last else None)


def _stages(*positions, num_epochs=None):
  made = [
      stages_lib.Stage(first, f"step {first}", stages_lib.Settings("feistel", 0, "f"))
      for first in positions
  ]
  return _Stages(made, corpora_lib.Corpora(None), num_epochs)


class StagedStreamTest(absltest.TestCase):

  def test_positions_and_rows_are_those_of_the_stage(self):
    stream = _stages(0, 25, 40)
    epochs, rows = stream.locate(np.array([0, 24, 25, 39, 40, 52]))
    self.assertEqual(rows.tolist(), [0, 4, 0, 3, 0, 0])
    self.assertEqual(
        [stream.stage_of_epoch(epoch) for epoch in epochs.tolist()],
        [(0, 0), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1)],
    )
    for position in range(80):
      (epoch,), (row,) = stream.locate(np.array([position]))
      self.assertEqual(stream.positions(int(epoch), np.array([row])).tolist(), [position])
      self.assertEqual(stream.visits(int(epoch), np.array([row]))[1].tolist(), [position])

  def test_an_epoch_ends_where_the_next_stage_begins(self):
    stream = _stages(0, 25)
    self.assertEqual(stream.positions(2, np.arange(10)).tolist(), [20, 21, 22, 23, 24] + 5 * [-1])
    self.assertEqual(stream.visits(2, np.arange(10))[1].tolist(), [20, 21, 22, 23, 24])
    self.assertEqual(staged_stream.place_of(stream, 22), (0, 2, 2, 5))
    self.assertEqual(staged_stream.place_of(stream, 27), (1, 0, 2, 11))

  def test_the_last_stage_decides_where_the_stream_ends(self):
    self.assertTrue(_stages(0, 25).endless)
    self.assertIsNone(_stages(0, 25).num_positions)
    stream = _stages(0, 25, num_epochs=2)
    self.assertEqual(stream.num_positions, 25 + 22)
    self.assertEqual([stream.has(p) for p in (24, 46, 47)], [True, True, False])

  def test_without_stages_a_place_is_that_of_the_stream(self):
    plain = _Counting(10, None)
    self.assertEqual(staged_stream.stage_at(plain, 12), (None, plain, 0))
    self.assertEqual(staged_stream.place_of(plain, 12), (None, 1, 2, 10))

  def test_it_is_what_the_first_stage_is(self):
    stream = pickle.loads(pickle.dumps(_stages(0, 25)))
    self.assertEqual(stream.identity(), {"length": 10})
    self.assertEqual(stream.sequence_length, 4)


if __name__ == "__main__":
  absltest.main()
