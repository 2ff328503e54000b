"""Tests of what sets the steps of a spike apart."""

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.inspection import contrast
from maxtext_olmo.inspection import losses as losses_lib

_ROWS, _LENGTH, _VOCABULARY = 16, 128, 1000
_BAD_FILE = 7


class _Run:
  """A run whose tokens follow Zipf's law, with some rows of garbage from one file."""

  def __init__(self, seed, garbage, bad_rows=40, steps=400):
    rng = np.random.Generator(np.random.PCG64(seed))
    weights = 1 / np.arange(1, _VOCABULARY + 1)
    shape = (steps, _ROWS, _LENGTH)
    self.tokens = rng.choice(_VOCABULARY, shape, p=weights / weights.sum())
    self.files = rng.integers(0, 12, shape[:2])
    self.used = np.full(shape[:2], _LENGTH)
    self.clean = np.ones(shape[:2], np.bool_)
    places = rng.choice(np.arange(120 * _ROWS, steps * _ROWS), bad_rows, replace=False)
    self.bad = {tuple(map(int, divmod(place, _ROWS))) for place in places}
    for step, row in self.bad:
      self.files[step, row] = _BAD_FILE
      self.tokens[step, row] = garbage(rng)
    count = np.array([sum(step == bad for bad, _ in self.bad) for step in range(steps)])
    values = 3 + rng.normal(0, 0.02, steps) + 0.3 * count
    self.losses = losses_lib.Losses(np.arange(steps), values, "loss")

  def read(self, step):
    return contrast.StepRows(self.tokens[step], self.used[step], self.clean[step], self.files[step])


_GARBAGE = {
    "random_tokens": lambda rng: rng.integers(0, _VOCABULARY, _LENGTH),
    "one_token": lambda rng: np.full(_LENGTH, rng.integers(0, _VOCABULARY)),
    "tokens_never_seen_elsewhere": lambda rng: rng.integers(_VOCABULARY, 5000, _LENGTH),
    "a_repeated_phrase": lambda rng: np.resize(rng.integers(0, _VOCABULARY, 9), _LENGTH),
}


class ContrastTest(parameterized.TestCase):

  @parameterized.named_parameters(*_GARBAGE.items())
  def test_a_planted_file_and_its_rows_come_first(self, garbage):
    for seed in range(10):
      run = _Run(seed, garbage)
      spikes = losses_lib.find_spikes(run.losses)
      found = contrast.contrast(run.read, *contrast.steps_to_compare(run.losses, spikes))
      self.assertEqual(found.files[0].source, _BAD_FILE)
      first = [(row.step, row.row) in run.bad for row in found.rows[:10]]
      self.assertGreaterEqual(sum(first), 9, f"seed {seed}: {found.rows[:10]}")
      labels = found.labels([f"label-{file % 3}" for file in range(12)])
      self.assertEqual(labels[0].source, f"label-{_BAD_FILE % 3}")
      self.assertAlmostEqual(sum(label.share for label in labels), 1)

  def test_copies_of_a_row_stand_out_as_duplicates(self):
    run = _Run(0, lambda rng: np.arange(_LENGTH) % 3, bad_rows=1)
    copied = run.tokens[50, 3].copy()
    for row in range(5):
      run.tokens[60, row] = copied
    found = contrast.contrast(run.read, [60], range(30, 50))
    self.assertEqual(
        {(row.row, row.why) for row in found.rows[:5]}, {(i, "duplicates") for i in range(5)}
    )
    self.assertEqual(found.rows[0].found, 4)

  def test_documents_that_end_and_padding_stand_out(self):
    run = _Run(0, lambda rng: np.arange(_LENGTH) % 3, bad_rows=1)
    run.tokens[60, 4, ::2] = 0
    run.used[60, 9] = 20
    run.tokens[run.tokens == 0] = 1
    run.tokens[60, 4, ::2] = 0
    found = contrast.contrast(run.read, [60], range(30, 50), eos_id=0)
    self.assertEqual({row.row for row in found.rows[:2]}, {4, 9})

  def test_padding_rows_are_left_out(self):
    run = _Run(0, lambda rng: np.arange(_LENGTH) % 3, bad_rows=1)
    run.used[60, 8:] = 0
    run.files[60, 8:] = -1
    found = contrast.contrast(run.read, [60], range(30, 50))
    self.assertEqual({row.row for row in found.rows}, set(range(8)))


if __name__ == "__main__":
  absltest.main()
