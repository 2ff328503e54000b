"""Tests of the examination of a run's loss spikes."""

import json
import pathlib
import tempfile
import unittest

import numpy as np
from absl.testing import absltest

from maxtext_olmo import errors
from maxtext_olmo.corpus import tokenizer as tokenizer_lib
from maxtext_olmo.inspection import losses as losses_lib
from maxtext_olmo.inspection import run as run_lib
from maxtext_olmo.inspection import spikes
from tests.inspection import pages
from tests.loader import cases

_run: run_lib.Run
_peak: tuple[int, int]


def setUpModule():
  global _run, _peak
  cases.compile_fast()
  directory = tempfile.TemporaryDirectory(prefix="spikes_test_")
  unittest.addModuleCleanup(directory.cleanup)
  _run = pages.small_run(directory.name)
  _peak = pages.find_peak(_run)


class SpikesTest(absltest.TestCase):

  def losses(self, peak=None, **changes):
    path = pathlib.Path(self.create_tempdir().full_path, "metrics.jsonl")
    pages.write_losses(path, _peak[0] if peak is None else peak)
    lines = [json.loads(line) | changes for line in path.read_text().splitlines()]
    path.write_text("\n".join(map(json.dumps, lines)))
    return losses_lib.read_losses(str(path))

  def examine(self, losses, **settings):
    with run_lib.open_iterator(_run) as iterator:
      return spikes.examine(iterator, losses, **settings)

  def test_the_row_that_stands_out_is_first_with_its_file_bytes_and_text(self):
    found = self.examine(self.losses(), tokenizer=tokenizer_lib.ByteTokenizer())
    (one,) = found.each
    first = one.suspects[0]
    self.assertEqual((first.score.step, first.score.row), _peak)
    self.assertEqual(one.contrast.notable, 1)
    self.assertEqual(one.shown, (first,))
    (part,) = first.row.parts
    raw = pathlib.Path(part.file).read_bytes()[part.first_byte : part.end_byte]
    np.testing.assert_array_equal(np.frombuffer(raw, "<u2"), first.row.tokens)
    self.assertIn("<script>", first.text[0][1])
    self.assertEqual(found.together.suspects[0].score, first.score)

  def test_everything_is_json_that_others_can_read(self):
    losses = self.losses()
    losses.values[_peak[0]] = np.nan
    values = self.examine(losses).to_json()
    read = json.loads(json.dumps(values, allow_nan=False))
    self.assertEqual(read["spikes_found"], 1)
    self.assertIsNone(read["each"][0]["spikes"][0]["loss"])
    self.assertEqual(read["together"]["rows"][0]["blamed_label"], pages.LABEL)
    self.assertLen(read["each"][0]["figures"], 7)

  def test_only_the_steps_of_spikes_and_calm_steps_before_them_are_read(self):
    (one,) = self.examine(self.losses()).each
    peak = _peak[0]
    self.assertEqual(one.contrast.steps, (peak - 1, peak))
    self.assertNoCommonElements(one.contrast.calm_steps, one.contrast.steps)
    self.assertLessEqual(max(one.contrast.calm_steps), peak)

  def test_no_spike_is_no_error(self):
    found = self.examine(self.losses(), threshold=1e9)
    self.assertEmpty(found.spikes)
    self.assertIsNone(found.together)
    self.assertEqual(found.to_json()["each"], [])

  def test_positions_in_the_log_are_compared_with_those_of_the_run(self):
    losses = self.losses()
    with run_lib.open_iterator(_run) as iterator:
      schedule = iterator.history.present.schedule
    right = {step: schedule.position(step) for step in losses.steps.tolist()}
    self.examine(losses_lib.Losses(losses.steps, losses.values, "loss", right))
    wrong = losses_lib.Losses(losses.steps, losses.values, "loss", right | {_peak[0]: 3})
    with self.assertRaisesRegex(errors.ConfigError, "belongs to another run"):
      self.examine(wrong)
    # Whether or not a spike is found.
    other = losses_lib.Losses(
        losses.steps, losses.values, "loss", {s: p + 1 for s, p in right.items()}
    )
    with self.assertRaisesRegex(errors.ConfigError, "belongs to another run"):
      self.examine(other, threshold=1e9)

  def test_steps_that_the_run_does_not_have_are_a_config_error(self):
    losses = self.losses()
    later = losses_lib.Losses(losses.steps + 10_000, losses.values, "loss")
    finite = run_lib.run_of_config("config", {**_run.config, "olmo_num_epochs": 1})
    said = "which this run does not have"
    with run_lib.open_iterator(finite) as it, self.assertRaisesRegex(errors.ConfigError, said):
      spikes.examine(it, later)


if __name__ == "__main__":
  absltest.main()
