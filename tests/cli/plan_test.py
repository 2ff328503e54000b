"""`maxtext-olmo plan`."""

import contextlib
import io
import json
import pathlib
import re
import xml.etree.ElementTree as ET

import numpy as np
from absl.testing import absltest

from maxtext_olmo.cli import main as main_lib
from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.inspection import run as run_lib
from maxtext_olmo.order import mixture
from tests import corpora
from tests.inspection import small_run


class PlanTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.path, _ = corpora.write_corpus(
        self.create_tempdir().full_path, tokens_per_file=(400, 160, 80, 320)
    )

  def plan(self, *args):
    return self.run_main(self.path, *args)

  def config(self, *keys):
    """Returns the arguments that plan a config of this corpus."""
    path = pathlib.Path(__file__).resolve().parents[2] / "configs" / "tiny.py"
    return (
        str(path),
        "--config.dataset_type=olmo_grain",
        f"--config.olmo_index_path={self.path}",
        "--config.max_target_length=8",
        *keys,
    )

  def run_main(self, *args):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
      code = main_lib.main(["plan", *args])
    return code, out.getvalue(), err.getvalue()

  def cells(self, out, label):
    line = next(line for line in out.splitlines() if label in line)
    return [cell.strip() for cell in re.split("[│|]", line) if cell.strip()]

  def test_the_plan_is_what_the_stream_does(self):
    code, out, _ = self.plan(
        "--batch-size", "4", "--steps", "50", "--mixture", "label-0=2", "label-1=0.5"
    )
    self.assertEqual(code, 0)
    index = index_lib.load_index(self.path)
    stream = mixture.mixture_stream(
        index, {"label-0": 2, "label-1": 0.5}, "epochs", order="feistel", seed=9
    )
    ids = stream.instance_ids(np.arange(200))
    labels = np.array([index.files[file].label for file in index.locate(ids)[0]])
    for label in ("label-0", "label-1"):
      count = int((labels == label).sum())
      _, tokens, _, seen, epochs, after = self.cells(out, label)
      self.assertEqual(tokens, "480")
      self.assertEqual(int(seen.replace(",", "")), count * 8)
      self.assertEqual(epochs, f"{count / 60:.3f}")
      if label == "label-0":
        steps = int(after)
        before = ids[: (steps - 1) * 4][labels[: (steps - 1) * 4] == label]
        until = ids[: steps * 4][labels[: steps * 4] == label]
        self.assertLess(len(set(before.tolist())), 60)
        self.assertLen(set(until.tolist()), 60)
      else:
        self.assertStartsWith(after, "not in this run")

  def test_without_a_mixture_it_is_one_pass_over_everything(self):
    code, out, _ = self.plan("--batch-size", "8")
    self.assertEqual(code, 0)
    self.assertEqual(self.cells(out, "label-0")[4], "1.000")
    self.assertIn("15 steps of 8 × 8 = 960 tokens", out)

  def test_invalid_arguments_are_one_line_on_stderr(self):
    for args, message in (
        (("--batch-size", "0"), "must be from 1"),
        (("--batch-size", "4", "--mixture", "label-0"), "not LABEL=NUMBER"),
        (("--batch-size", "4", "--mixture", "nope=1"), "'nope' matches no label"),
    ):
      code, _, err = self.plan(*args)
      self.assertEqual(code, 2)
      self.assertIn(message, err)

  def test_the_plan_of_a_config_is_what_its_run_sees(self):
    keys = (
        "--config.steps=30",
        "--config.olmo_batch_schedule=((0, 2), (10, 4))",
        "--config.olmo_eval_instances=6",
        "--config.olmo_mixture={'label-0': 2.0, 'label-1': 0.5}",
    )
    code, out, err = self.run_main(*self.config(*keys))
    self.assertEqual(code, 0, err)
    index = index_lib.load_index(self.path)
    stream = mixture.mixture_stream(
        index,
        {"label-0": 2.0, "label-1": 0.5},
        "epochs",
        order="feistel",
        seed=0,
        held_out_instances=6,
    )
    files = index.locate(stream.instance_ids(np.arange(10 * 2 + 20 * 4)))[0]
    labels = [index.files[file].label for file in files]
    for label in ("label-0", "label-1"):
      seen = int(self.cells(out, label)[3].replace(",", ""))
      self.assertEqual(seen, labels.count(label) * 8)
    self.assertIn("30 steps of 2 to 4 × 8 = 800 tokens", out)
    self.assertIn("step 10: batch size 2 → 4", out)

  def test_a_config_without_labels_or_with_options_of_an_index_is_an_error(self):
    for args, message in (
        (self.config("--batch-size", "4"), "the config of a run sets this"),
        (self.config("--config.dataset_type=synthetic", "--config.olmo_index_path="), "no plan"),
        ((self.path,), "needs --batch-size"),
        (("nope.json", "--batch-size", "8"), "nope.json does not exist. Give"),
        ((self.path, "--batch-size", "4", "--config.steps=3"), "is an index"),
    ):
      code, _, err = self.run_main(*args)
      self.assertEqual(code, 2)
      self.assertIn(message, err)

  def test_the_picture_has_each_label_and_change(self):
    file = self.create_tempfile().full_path
    keys = ("--config.steps=30", "--config.olmo_batch_schedule=((0, 2), (10, 4))", "--svg", file)
    code, _, err = self.run_main(*self.config(*keys))
    self.assertEqual(code, 0, err)
    drawn = ET.parse(file).getroot()
    said = [e.text or "" for e in drawn.iter()]
    for text in ("label-0", "label-1", "step 10: batch size 2 → 4", "steps 0 to 30"):
      self.assertTrue(any(text in one for one in said), text)

  def test_the_plan_of_a_run_has_its_past_and_what_is_to_come(self):
    run = small_run.write(self.create_tempdir().full_path)
    with run_lib.open_iterator(run_lib.find_run(run.checkpoints)) as iterator:
      rows = [row for step in range(20) for row in iterator.explain(step).rows]
    done = sum(len(batch["inputs"]) for batch in run.batches)
    for path in (run.checkpoints, f"{run.checkpoints}/14"):
      code, out, err = self.run_main(path, "--steps", "20")
      self.assertEqual(code, 0, err)
      for label in ("wiki", "web"):
        _, _, _, so_far, by_the_end, _, _ = self.cells(out, label)
        seen = [32 * sum(row.label == label for row in part) for part in (rows[:done], rows)]
        self.assertEqual([int(cell.replace(",", "")) for cell in (so_far, by_the_end)], seen)
      self.assertIn("15 steps are done.", out)
      self.assertIn("step 5: batch size 4 → 6", out)

  def test_a_run_without_a_known_length_is_planned_to_the_end_of_its_epoch(self):
    run = small_run.write(self.create_tempdir().full_path, sizes=(4,))
    code, out, err = self.run_main(run.checkpoints)
    self.assertEqual(code, 0, err)
    for label in ("wiki", "web"):
      # The last batch of the epoch has a few rows of the next one.
      self.assertBetween(float(self.cells(out, label)[5]), 1.0, 1.05)

  def test_a_json_file_with_keys_of_a_run_is_a_config(self):
    run = small_run.write(self.create_tempdir().full_path, sizes=(4,))
    path = pathlib.Path(self.create_tempdir().full_path, "config.json")
    path.write_text(json.dumps({**run.config, "checkpoint_dir": "", "steps": 7}))
    code, out, err = self.run_main(str(path))
    self.assertEqual(code, 0, err)
    self.assertIn("7 steps of 4 × 32 = 896 tokens", out)

  def test_labels_that_are_left_out_are_named(self):
    _, out, _ = self.plan("--batch-size", "4", "--mixture", "label-1=1")
    self.assertIn("Left out: label-0.", out)


if __name__ == "__main__":
  absltest.main()
