"""Tests of the comparison of a spike with calm steps."""

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.inspection import contrast
from maxtext_olmo.inspection import figures
from maxtext_olmo.inspection import losses as losses_lib
from maxtext_olmo.inspection import spike_detection

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
    places = rng.choice(np.arange(120 * _ROWS, steps * _ROWS), bad_rows, replace=False)
    self.bad = {tuple(map(int, divmod(place, _ROWS))) for place in places}
    for step, row in self.bad:
      self.files[step, row] = _BAD_FILE
      self.tokens[step, row] = garbage(rng)
    count = np.array([sum(step == bad for bad, _ in self.bad) for step in range(steps)])
    values = 3 + rng.normal(0, 0.02, steps) + 0.3 * count
    self.losses = losses_lib.Losses(np.arange(steps), values, "loss")

  def read(self, step):
    used, files = self.used[step].tolist(), self.files[step].tolist()
    first = step * _ROWS
    return figures.StepRows(
        tokens=[row[:count] for row, count in zip(self.tokens[step], used)],
        width=_LENGTH,
        trained=[True] * _ROWS,
        pieces=[
            [figures.Piece(f"label-{file % 3}", f"file-{file}", -1, 0, count, 0, first + row)]
            if count
            else []
            for row, (file, count) in enumerate(zip(files, used))
        ],
    )

  def contrast(self):
    """Returns the comparison of each spike, and of all of them."""
    spikes = spike_detection.find_spikes(self.losses)
    each = [
        contrast.contrast(self.read, *contrast.steps_to_compare(self.losses, spike, spikes))
        for spike in spikes
    ]
    return contrast.merge(each), each


_GARBAGE = {
    "random_tokens": lambda rng: rng.integers(0, _VOCABULARY, _LENGTH),
    "one_token": lambda rng: np.full(_LENGTH, rng.integers(0, _VOCABULARY)),
    "tokens_never_seen_elsewhere": lambda rng: rng.integers(_VOCABULARY, 5000, _LENGTH),
    "a_repeated_phrase": lambda rng: np.resize(rng.integers(0, _VOCABULARY, 9), _LENGTH),
}


class ContrastTest(parameterized.TestCase):

  @parameterized.named_parameters(*_GARBAGE.items())
  def test_a_planted_file_and_its_rows_come_first(self, garbage):
    for seed in range(3):
      run = _Run(seed, garbage)
      found, each = run.contrast()
      self.assertEqual(found.files[0].source, (f"label-{_BAD_FILE % 3}", f"file-{_BAD_FILE}"))
      first = [(row.step, row.row) in run.bad for row in found.rows[:10]]
      self.assertGreaterEqual(sum(first), 9, f"seed {seed}: {found.rows[:10]}")
      self.assertEqual(found.labels[0].source, (f"label-{_BAD_FILE % 3}",))
      for shares in (found.labels, found.files):
        self.assertAlmostEqual(sum(source.share for source in shares), 1)
      self.assertEqual(found.notable, sum(file.notable for file in found.files))
      self.assertLen(found.rows, len({(r.step, r.row) for one in each for r in one.rows}))

  def test_copies_of_a_row_stand_out_as_duplicates(self):
    run = _Run(0, lambda rng: np.arange(_LENGTH) % 3, bad_rows=1)
    copied = run.tokens[50, 3].copy()
    for row in range(5):
      run.tokens[60, row] = copied
    found = contrast.contrast(run.read, [60], range(30, 50))
    self.assertEqual(
        {(row.row, row.why) for row in found.rows[:5]}, {(i, "duplicates") for i in range(5)}
    )
    self.assertEqual(found.rows[0].found, 1)
    self.assertEqual(found.rows[0].reason, "tokens in duplicates 100%, usually 0%")

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
    found = contrast.contrast(run.read, [60], range(30, 50))
    self.assertEqual({row.row for row in found.rows}, set(range(8)))
    self.assertEqual(found.without_loss, 0)

  def test_rows_without_loss_are_counted_but_not_scored(self):
    run = _Run(0, lambda rng: np.arange(_LENGTH) % 3, bad_rows=1)

    def read(step):
      return run.read(step)._replace(trained=[row != 5 for row in range(_ROWS)])

    found = contrast.contrast(read, [60, 61], range(30, 50))
    self.assertNotIn(5, {row.row for row in found.rows})
    self.assertEqual(found.without_loss, 2)

  def test_a_row_of_several_documents_is_attributed_to_the_surprising_one(self):
    run = _Run(0, lambda rng: np.arange(_LENGTH) % 3, bad_rows=1)
    run.tokens[60, 3, 40:80] = np.arange(900, 940)

    def read(step):
      pieces = [
          [
              figures.Piece("a", f"file-{d}", 10 * row + d, c, n, n, 0)
              for d, (c, n) in enumerate(cuts)
          ]
          for row in range(_ROWS)
          for cuts in [((0, 40), (40, 40), (80, 48))]
      ]
      return run.read(step)._replace(pieces=pieces)

    found = contrast.contrast(read, [60], range(30, 50))
    first = found.rows[0]
    self.assertEqual((first.row, first.file, first.document), (3, "file-1", 31))
    self.assertEqual(found.documents[0].source, ("a", "file-1", 31))


class StepsToCompareTest(absltest.TestCase):

  def losses(self, every, loud):
    steps = np.arange(0, 200 * every, every)
    values = np.where(np.isin(steps, loud), 9.0, 2 + np.sin(steps) / 100)
    found = losses_lib.Losses(steps, values, "loss")
    return found, spike_detection.find_spikes(found)

  def test_the_step_before_a_spike_belongs_to_it_and_no_other_spike_is_calm(self):
    losses, spikes = self.losses(1, [100, 101, 150])
    last = next(spike for spike in spikes if spike.first == 150)
    steps, calm = contrast.steps_to_compare(losses, last, spikes)
    self.assertEqual(steps, [149, 150])
    self.assertEqual(calm[:3], [148, 147, 146])
    self.assertNoCommonElements(calm, [100, 101, 149, 150])

  def test_a_loss_that_is_logged_now_and_then_is_about_all_steps_since_the_last_one(self):
    losses, spikes = self.losses(5, [500])
    steps, calm = contrast.steps_to_compare(losses, spikes[0], spikes)
    self.assertEqual(steps, [496, 497, 498, 499, 500])
    self.assertEqual(calm[:2], [495, 490])

  def test_few_steps_of_a_long_spike_are_read_and_its_peak_is_one(self):
    losses, _ = self.losses(1, [])
    losses.values[100:190] = np.nan
    spikes = spike_detection.find_spikes(losses)
    steps, _ = contrast.steps_to_compare(losses, spikes[0], spikes)
    self.assertLessEqual(len(steps), 16)
    self.assertEqual(steps[:3], [99, 100, 101])


if __name__ == "__main__":
  absltest.main()
