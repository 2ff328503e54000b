"""Tests of `maxtext-olmo inspect --losses`: planted garbage is found from the losses alone."""

import json
import pathlib
import re
import tempfile

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.inspection import run as run_lib
from maxtext_olmo.trainers.tiny import trainer
from tests.cli import runner
from tests.inspection import pages
from tests.inspection import planted
from tests.inspection import small_run
from tests.loader import cases
from tests.trainers.tiny import train_cases

_BATCH = 8
_STEPS = 280  # Of the 300 of an epoch.


def setUpModule():
  cases.compile_fast()


def _config(corpus: planted.Planted, seed: int, **values):
  return {
      "dataset_type": "olmo_grain",
      "olmo_index_path": corpus.index_path,
      "max_target_length": planted.LENGTH,
      "global_batch_size_to_load": _BATCH,
      "vocab_size": 258,
      "data_shuffle_seed": seed,
      **values,
  }


class PlantedTest(parameterized.TestCase):

  def inspect(self, *argv, code=0):
    found, out, err = runner.run("inspect", *argv)
    self.assertEqual(found, code, err)
    return out if code != 2 else err

  def bad_rows(self, run, corpus):
    """Returns the (step, row) pairs of garbage."""
    with run_lib.open_iterator(run) as iterator:
      return {
          (step, row)
          for step in range(_STEPS)
          for row, number in enumerate(iterator.row_numbers(step).tolist())
          if number in corpus.rows
      }

  def check(self, path, losses, corpus, bad):
    values = json.loads(self.inspect(path, "--losses", losses, "--json"))
    together = values["together"]
    self.assertEqual(together["files"][0]["file"], corpus.file)
    first = [(row["step"], row["row"]) in bad for row in together["rows"][:10]]
    self.assertLen(first, 10)
    self.assertGreaterEqual(sum(first), 9, json.dumps(together["rows"][:10], indent=1))

  @parameterized.parameters(*range(10))
  def test_the_planted_file_and_its_rows_come_first(self, seed):
    directory = pathlib.Path(self.create_tempdir().full_path)
    kinds = list(planted.GARBAGE)
    corpus = planted.write(str(directory), seed, kinds[seed % len(kinds)])
    config = directory / "config.json"
    config.write_text(json.dumps(_config(corpus, seed)))
    bad = self.bad_rows(run_lib.run_of_config("", json.loads(config.read_text())), corpus)
    losses = directory / "metrics.jsonl"
    counts = [sum(step == at for at, _ in bad) for step in range(_STEPS)]
    planted.write_losses(losses, counts, seed)
    self.check(config, losses, corpus, bad)

  def test_a_real_run_names_the_planted_file(self):
    directory = pathlib.Path(self.create_tempdir().full_path)
    corpus = planted.write(str(directory), 77)
    losses = directory / "metrics.jsonl"
    config = train_cases.make_config(
        **_config(corpus, 3),
        checkpoint_dir=str(directory / "checkpoints"),
        checkpoint_period=100,
        metrics_file=str(losses),
        steps=_STEPS,
        learning_rate=1e-2,
    )
    trainer.train(config)
    checkpoints = str(directory / "checkpoints")
    bad = self.bad_rows(run_lib.find_run(checkpoints), corpus)
    self.check(checkpoints, losses, corpus, bad)
    out = self.inspect(checkpoints, "--losses", losses, "--text", "--rows", 3)
    self.assertIn("rows that stand out", out)
    self.assertEqual(out.count("══ step "), 3)
    self.assertRegex(out, r"── document \d+")


class SpikesTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    directory = tempfile.TemporaryDirectory(prefix="cli_spikes_test_")
    cls.addClassCleanup(directory.cleanup)
    cls.directory = pathlib.Path(directory.name)
    cls.run_ = pages.small_run(directory.name)
    cls.log = cls.directory / "metrics.jsonl"
    pages.write_losses(cls.log, pages.find_peak(cls.run_)[0])

  def inspect(self, *argv, code=0):
    found, out, err = runner.run("inspect", self.run_.path, *argv)
    self.assertEqual(found, code, err)
    return out if code != 2 else err

  def test_a_spike_is_shown_with_the_row_that_stands_out(self):
    out = self.inspect("--losses", self.log, "--text")
    self.assertIn("'loss' of 70 steps has 1 spike (robust z-score above 6).", out)
    self.assertIn("This spike: 1 of 8 rows in 2 steps stand out", out)
    self.assertEqual(out.count("══ step "), 1)
    self.assertEqual(out.count(str(self.directory)), 2)  # The log, and the directory of all paths.
    self.assertIn(f"Paths are relative to {self.directory}.", out)
    self.assertIn("</pre><script>document.body", out)

  def test_losses_without_a_spike_are_reported(self):
    out = self.inspect("--losses", self.log, "--threshold", "1e9")
    found = re.search(r"has no spike .*score is [\d.]+, at step \d+; see it with (.*)\.\n", out)
    self.assertIn("has 1 spike", self.inspect("--losses", self.log, *found.group(1).split()))
    values = json.loads(self.inspect("--losses", self.log, "--threshold", "1e9", "--json"))
    self.assertIsNone(values["together"])

  def test_if_no_row_stands_out_other_causes_are_named(self):
    log = self.directory / "calm.jsonl"
    pages.write_losses(log, 30)
    out = self.inspect("--losses", log)
    self.assertIn("The data looks like that of the steps around it.", out)
    self.assertIn("Rows to look at first", out)

  def test_invalid_arguments_are_one_line_on_stderr(self):
    empty = self.directory / "empty.jsonl"
    empty.write_text('{"step": 3, "grad_norm": 1.0}\n')
    folder = self.create_tempdir().full_path
    for argv, message in (
        (("--losses", empty), "expected records with a `step` and a `loss`; found grad_norm"),
        (("--losses", self.log, "--loss-name", "x_loss"), "both a step and 'x_loss'. Found:"),
        (("--losses", folder), "without event files of TensorBoard"),
        (("--losses", self.directory / "none.jsonl"), "none.jsonl does not exist."),
        (("--losses", self.log, "--step", 3), "--losses chooses the steps itself"),
        (("--losses", self.log, "--rows", 0), "--rows must be 1 or more"),
        (("--losses", self.log, "--threshold", "nan"), "--threshold must be more than 0"),
        (("--losses", self.log, "--text", "--tokenizer", "/none"), "There is no tokenizer /none"),
    ):
      self.assertIn(message, self.inspect(*argv, code=2))

  def test_a_run_without_a_config_says_what_to_give(self):
    run = small_run.write(self.create_tempdir().full_path, sizes=(4,))
    (pathlib.Path(run.checkpoints) / "olmo_run" / "config.json").unlink()
    code, _, err = runner.run("inspect", run.checkpoints, "--losses", self.log)
    self.assertEqual(code, 2)
    self.assertIn("Give a config file with --config", err)


if __name__ == "__main__":
  absltest.main()
