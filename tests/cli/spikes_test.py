"""Tests of `maxtext-olmo inspect --losses`: planted garbage is found from the losses alone."""

import json
import pathlib

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.inspection import run as run_lib
from maxtext_olmo.trainers.tiny import trainer
from tests.cli import runner
from tests.inspection import planted
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


if __name__ == "__main__":
  absltest.main()
