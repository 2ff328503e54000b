"""`maxtext-olmo report`, and the page of `maxtext-olmo plan`."""

import importlib.util
import json
import pathlib

from absl.testing import absltest

from tests import corpora
from tests.cli import runner
from tests.inspection import small_run

_CONFIG = pathlib.Path(__file__).resolve().parents[2] / "configs" / "tiny.py"
_HAS_BOKEH = importlib.util.find_spec("bokeh") is not None


class ReportTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = pathlib.Path(self.create_tempdir().full_path)
    path, _ = corpora.write_corpus(self.directory)
    self.page = self.directory / "report.html"
    self.run_ = (
        str(_CONFIG),
        "--config.dataset_type=olmo_grain",
        f"--config.olmo_index_path={path}",
        "--config.max_target_length=8",
        "--config.steps=60",
    )

  @absltest.skipUnless(_HAS_BOKEH, "bokeh not installed; `make test-browser` installs it")
  def test_the_page_has_labels_losses_and_spikes(self):
    log = self.directory / "metrics.jsonl"
    losses = [9.0 if step == 40 else 2 + step % 3 / 100 for step in range(60)]
    log.write_text("".join(json.dumps({"step": i, "loss": v}) + "\n" for i, v in enumerate(losses)))
    code, out, err = runner.run(
        "report", *self.run_, "--losses", str(log), "--output", str(self.page), "--title", "mine"
    )
    self.assertEqual(code, 0, err)
    self.assertIn("1 loss spikes", out)
    text = self.page.read_text()
    for said in ("<h1>mine</h1>", "label-0", "step 40: loss 9 at step 40", "sha256:"):
      self.assertIn(said, text)
    self.assertIn("the tokenizer is not known", text)

  @absltest.skipUnless(_HAS_BOKEH, "bokeh not installed; `make test-browser` installs it")
  def test_the_page_of_a_run_with_checkpoints_has_its_past_and_the_text_of_rows(self):
    run = small_run.write(str(self.directory / "small"))
    log = self.directory / "metrics.jsonl"
    losses = [9.0 if step == 12 else 2 + step % 3 / 100 for step in range(15)]
    log.write_text("".join(json.dumps({"step": i, "loss": v}) + "\n" for i, v in enumerate(losses)))
    for path in (run.checkpoints, str(self.directory / "small" / "run"), f"{run.checkpoints}/14"):
      code, _, err = runner.run("report", path, "--losses", str(log), "--output", str(self.page))
      self.assertEqual(code, 0, err)
      text = self.page.read_text()
      for said in (
          "of which 15 are done (the red line)",
          "step 5: batch size 4 → 6",
          "step 10: batch size 6 → 2",
          "step 12: loss 9 at step 12",
          "lorem ipsum",
      ):
        self.assertIn(said, text)

  @absltest.skipUnless(_HAS_BOKEH, "bokeh not installed; `make test-browser` installs it")
  def test_a_plan_is_drawn_as_the_same_page(self):
    code, _, err = runner.run("plan", *self.run_, "--html", str(self.page))
    self.assertEqual(code, 0, err)
    self.assertIn("<h1>Plan of ", self.page.read_text())

  def test_invalid_arguments_are_one_line_on_stderr(self):
    for args, message in (
        (("report", str(self.directory), "--output", "x"), "is not the directory of a run"),
        (("report", *self.run_, "--spikes", "0", "--output", "x"), "--spikes must be 1 or more"),
        (("report", *self.run_, "--steps", "0", "--output", "x"), "must be positive"),
    ):
      code, _, err = runner.run(*args)
      self.assertEqual(code, 2)
      self.assertIn(message, err)

  @absltest.skipIf(_HAS_BOKEH, "Bokeh is installed")
  def test_without_bokeh_no_page_is_written(self):
    code, _, err = runner.run("report", *self.run_, "--output", str(self.page))
    self.assertEqual(code, 2)
    self.assertIn("pip install bokeh", err)
    self.assertFalse(self.page.exists())


if __name__ == "__main__":
  absltest.main()
