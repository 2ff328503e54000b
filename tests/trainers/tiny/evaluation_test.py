"""Tests for evaluating the embedded trainer's model, after training and during it."""

import os
import pathlib
import shutil
import tempfile
from unittest import mock

import jax
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.trainers.tiny import config as config_lib
from maxtext_olmo.trainers.tiny import evaluation
from maxtext_olmo.trainers.tiny import model
from maxtext_olmo.trainers.tiny import trainer
from tests import corpora
from tests.evaluation import reference
from tests.evaluation.requests_test import needs_harness

STARTS_PROCESSES = True


def tiny_config(**changes):
  config = config_lib.get_config()
  config.update(
      dataset_type="synthetic",
      vocab_size=258,
      max_target_length=32,
      global_batch_size_to_load=4,
      emb_dim=16,
      num_layers=1,
      num_heads=1,
      head_dim=16,
      mlp_dim=32,
      steps=4,
      warmup_steps=1,
      checkpoint_period=2,
  )
  config.update(changes)
  return config


def files_below(directory):
  return sorted(str(path) for path in pathlib.Path(directory).rglob("*"))


class _Trained(parameterized.TestCase):
  """A model that was trained for four steps."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.task_dir = reference.write_tasks(folder + "/tasks")
    cls.config = tiny_config(checkpoint_dir=folder + "/checkpoints")
    cls.losses = []
    trainer.train(cls.config, on_step=lambda step, metrics: cls.losses.append(metrics["loss"]))
    cls.mesh = model.make_mesh(cls.config)


class EvaluationTest(_Trained):

  def test_parameters_come_from_the_latest_checkpoint_or_the_one_asked_for(self):
    step, params = evaluation.load_params(self.config, self.mesh)
    self.assertEqual(step, 3)
    step, older = evaluation.load_params(self.config, self.mesh, 1)
    self.assertEqual(step, 1)
    same = jax.tree.map(lambda a, b: bool((np.asarray(a) == np.asarray(b)).all()), params, older)
    self.assertFalse(all(jax.tree.leaves(same)))

  def test_loading_changes_nothing_not_even_a_save_in_progress(self):
    busy = pathlib.Path(self.config.checkpoint_dir, "9.orbax-checkpoint-tmp-1")
    busy.mkdir()
    self.addCleanup(busy.rmdir)
    half = pathlib.Path(self.config.checkpoint_dir, "8")
    half.mkdir()
    self.addCleanup(half.rmdir)
    before = files_below(self.config.checkpoint_dir)
    step, _ = evaluation.load_params(self.config, self.mesh)
    self.assertEqual(step, 3)
    self.assertEqual(files_below(self.config.checkpoint_dir), before)

  def test_without_a_step_an_unreadable_latest_checkpoint_is_an_error(self):
    latest = pathlib.Path(self.config.checkpoint_dir, "5")
    latest.mkdir()
    self.addCleanup(shutil.rmtree, latest)
    metadata = latest / "_CHECKPOINT_METADATA"
    os.symlink(metadata, metadata)  # Opening it fails, even for root.
    with self.assertRaisesRegex(errors.ResumeError, "5/_CHECKPOINT_METADATA cannot be read"):
      evaluation.load_params(self.config, self.mesh)
    self.assertEqual(evaluation.load_params(self.config, self.mesh, 3)[0], 3)

  def test_a_checkpoint_that_is_not_there_is_an_error(self):
    empty = self.create_tempdir().full_path
    for changes, step, message in (
        ({"checkpoint_dir": ""}, None, "No checkpoint was given"),
        ({"checkpoint_dir": empty}, None, "has no checkpoint"),
        ({"checkpoint_dir": empty + "/nowhere"}, None, "is not a directory. Train a model first"),
        ({}, 7, "no checkpoint 7; the latest is 3"),
    ):
      config = tiny_config(**{"checkpoint_dir": self.config.checkpoint_dir, **changes})
      with self.assertRaisesRegex(errors.ConfigError, message):
        evaluation.load_params(config, self.mesh, step)
    self.assertFalse(os.path.exists(empty + "/nowhere"))

  def test_figures_have_plain_names_and_no_errors_of_their_own(self):
    results = {
        "results": {
            "a": {"alias": "a", "sample_len": 3, "acc,none": 0.5, "acc_stderr,none": 0.1},
            "b": {"exact_match,strict": 1, "x_stderr,none": "N/A"},
        }
    }
    self.assertEqual(evaluation.metrics(results), {"a/acc": 0.5, "b/exact_match/strict": 1.0})

  def test_tasks_alone_need_no_held_out_data(self):
    index_path, _ = corpora.write_corpus(self.create_tempdir().full_path, sequence_length=32)
    config = tiny_config(
        dataset_type="olmo_grain", olmo_index_path=index_path, eval_interval=2, eval_tasks="a"
    )
    config_lib.validate(config)
    self.assertEqual(config_lib.for_data(config).eval_interval, -1)
    config.olmo_eval_instances = 2
    self.assertEqual(config_lib.for_data(config).eval_interval, 2)
    config.eval_interval = -1
    with self.assertRaisesRegex(errors.ConfigError, "eval_tasks='a' needs eval_interval"):
      config_lib.validate(config)


@needs_harness
class TasksTest(_Trained):

  def test_names_patterns_and_files_are_found(self):
    tasks = evaluation.Tasks(["say_*", "colours"], self.task_dir)
    self.assertEqual(tasks.names, ["say_colour", "colours"])
    path = os.path.join(self.task_dir, "texts.yaml")
    self.assertEqual(evaluation.Tasks([path]).names, [path])

  def test_a_task_that_is_unknown_is_an_error_with_the_nearest_ones(self):
    with self.assertRaisesRegex(
        errors.ConfigError, "'colour' is not a task .* Did you mean colours"
    ):
      evaluation.Tasks(["colour"], self.task_dir)
    for names, directory, message in (
        ([], "", "No task was given"),
        (["/nowhere/task.yaml"], self.task_dir, "task file /nowhere/task.yaml does not exist"),
        (["colours"], "/nowhere", "task directory /nowhere does not exist"),
    ):
      with self.assertRaisesRegex(errors.ConfigError, message):
        evaluation.Tasks(names, directory)

  def make_lm(self):
    _, params = evaluation.load_params(self.config, self.mesh)
    return evaluation.make_lm(self.config, params, self.mesh, progress=False)

  @parameterized.parameters(
      ("colours.jsonl", None, "FileNotFoundError: .*colours.jsonl"),
      ("colours.jsonl", "", "Check their task files"),
      ("colours.yaml", ("{{thing}}", "{{thin}}"), "'thin' is undefined"),
      ("colours.yaml", ("{", "[", 1), "colours.yaml cannot run here: .* line 1"),
  )
  def test_a_task_that_cannot_work_is_an_error_that_says_so(self, name, change, message):
    directory = reference.write_tasks(self.create_tempdir().full_path)
    path = pathlib.Path(directory, name)
    text = path.read_text()
    path.unlink()
    if change is not None:
      path.write_text(text.replace(*change) if change else "")
    tasks = evaluation.Tasks([directory + "/colours.yaml"])
    with self.assertRaisesRegex(errors.ConfigError, message):
      tasks.run(self.make_lm())

  def test_an_error_of_the_model_is_not_reported_as_one_of_the_task(self):
    lm = self.make_lm()
    lm.params = {}
    with self.assertRaises(KeyError):
      evaluation.Tasks(["colours"], self.task_dir).run(lm)

  def test_git_does_not_complain_where_there_is_no_repository(self):
    lm = self.make_lm()
    tasks = evaluation.Tasks(["colours"], self.task_dir)
    self.addCleanup(os.chdir, os.getcwd())
    directory = self.create_tempdir().full_path
    os.chdir(directory)
    # Whatever the temporary directory itself lies in.
    self.enter_context(mock.patch.dict(os.environ, GIT_CEILING_DIRECTORIES=directory))
    with tempfile.TemporaryFile("w+") as said:
      errors_before = os.dup(2)
      os.dup2(said.fileno(), 2)
      try:
        results = tasks.run(lm)
      finally:
        os.dup2(errors_before, 2)
        os.close(errors_before)
      said.seek(0)
      self.assertNotIn("git", said.read())
    self.assertIsNone(results["git_hash"])

  def test_the_trainer_logs_tasks_at_the_interval_and_trains_as_without_them(self):
    seen, losses = {}, []

    def on_step(step, metrics):
      losses.append(metrics["loss"])
      seen[step] = {name: value for name, value in metrics.items() if name.startswith("eval/")}

    config = tiny_config(
        eval_interval=2,
        eval_tasks="colours,texts",
        eval_task_dir=self.task_dir,
        checkpoint_dir=self.create_tempdir().full_path,
    )
    with self.assertLogs("absl", "INFO") as logs:
      trainer.train(config, on_step=on_step)
    self.assertEqual(losses, self.losses)
    names = {"eval/colours/acc", "eval/colours/acc_norm", "eval/texts/bits_per_byte"}
    self.assertEqual([set(seen[step]) for step in range(4)], [set(), names, set(), names])
    figure = seen[3]["eval/texts/bits_per_byte"]
    self.assertIn(f"step     3  eval/texts/bits_per_byte {figure:.4f}", "\n".join(logs.output))

    step, params = evaluation.load_params(config, self.mesh)
    self.assertEqual(step, 3)
    lm = evaluation.make_lm(config, params, self.mesh, batch_size=2, progress=False)
    results = evaluation.Tasks(["colours", "texts"], self.task_dir).run(lm)
    for name, value in evaluation.metrics(results).items():
      self.assertAlmostEqual(value, seen[3][f"eval/{name}"], delta=1e-4)

  def test_the_limit_counts_documents(self):
    _, params = evaluation.load_params(self.config, self.mesh)
    lm = evaluation.make_lm(self.config, params, self.mesh, progress=False)
    results = evaluation.Tasks(["colours"], self.task_dir).run(lm, limit=2, log_samples=True)
    self.assertLen(results["samples"]["colours"], 2)


if __name__ == "__main__":
  absltest.main()
