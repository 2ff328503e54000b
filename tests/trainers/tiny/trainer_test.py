"""Tests of maxtext_olmo.trainers.tiny.trainer: real runs, killed and resumed."""

from __future__ import annotations

import io
import json
import math
import multiprocessing
import pathlib
import sys
import tempfile
import unittest
from typing import Any
from unittest import mock

import jax
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.trainers.tiny import trainer
from tests import corpora
from tests import distributed
from tests.trainers.tiny import train_cases as cases

STARTS_PROCESSES = True

_CACHE = ""


def setUpModule():
  global _CACHE
  jax.config.update("jax_num_cpu_devices", 4)
  cache = tempfile.TemporaryDirectory(prefix="compilation_cache_")
  unittest.addModuleCleanup(cache.cleanup)
  _CACHE = cache.name
  cases.compile_fast(_CACHE)


class TinyTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)

  def config(self, **changes: Any):
    return cases.make_config(**changes)

  def interrupted(self):
    """Returns the config of a run that stopped after step 3, with a checkpoint of step 2."""
    config = self.config(checkpoint_dir=str(self.dir))
    cases.run(config, stop_after=3)
    return config

  def test_a_run_starts_from_the_weights_of_another(self):
    before = self.config(checkpoint_dir=str(self.dir / "before"), steps=6)
    cases.run(before)
    for path in ("before", "before/5"):
      after = self.config(
          checkpoint_dir=str(self.dir / f"after-{path.count('/')}"),
          load_parameters_path=str(self.dir / path),
          learning_rate=1e-9,
          data_shuffle_seed=1,
          steps=2,
      )
      metrics = cases.run(after).metrics
      # It is another run: its steps, its schedule and its data begin anew.
      self.assertEqual(sorted(metrics), [0, 1])
      self.assertEqual(metrics[0]["learning_rate"], 0)
      self.assertEqual(metrics[0]["position"], 0)
      untrained = cases.run(self.config(data_shuffle_seed=1, steps=1, learning_rate=1e-9))
      self.assertNotEqual(metrics[0]["loss"], untrained.losses[0])
      # A resumed run has its own weights, even if the other run's are gone.
      after.update(load_parameters_path=str(self.dir / "gone"), steps=3)
      self.assertEqual(sorted(cases.run(after).metrics), [2])

  def test_the_first_loss_is_that_of_the_other_runs_next_step(self):
    index = cases.write_counting_corpus(self.dir / "corpus")
    changes = {"dataset_type": "olmo_grain", "olmo_index_path": index, "steps": 4}
    losses = cases.run(self.config(checkpoint_dir=str(self.dir / "before"), **changes)).losses
    changes |= {"load_parameters_path": str(self.dir / "before" / "2"), "olmo_initial_position": 12}
    self.assertEqual(cases.run(self.config(**changes)).losses, {3: losses[3]})

  def test_weights_that_cannot_be_loaded_are_an_error_with_the_key(self):
    cases.run(self.config(checkpoint_dir=str(self.dir / "before"), steps=1))
    for path, message in (
        ("none", "load_parameters_path=.*none: checkpoint_dir=.* is not a directory"),
        ("before/7", "load_parameters_path=.*: .* has no checkpoint 7; the latest is 0"),
    ):
      with self.assertRaisesRegex(errors.ConfigError, message):
        cases.run(self.config(load_parameters_path=str(self.dir / path)))
    with self.assertRaisesRegex(errors.ResumeError, "load_parameters_path=.* does not match this"):
      cases.run(self.config(load_parameters_path=str(self.dir / "before"), emb_dim=32))

  def test_the_loss_falls_on_what_can_be_learnt(self):
    index = cases.write_counting_corpus(self.dir / "corpus")
    changes = {"dataset_type": "olmo_grain", "olmo_index_path": index, "steps": 60}
    losses = cases.run(self.config(**changes)).losses
    self.assertAlmostEqual(losses[0], math.log(64), delta=0.1)
    self.assertLess(losses[59], 1.0)

  def test_the_document_mask_changes_what_tokens_see(self):
    index, _ = corpora.write_corpus(self.dir, sequence_length=16)
    changes = {"dataset_type": "olmo_grain", "olmo_index_path": index, "vocab_size": 100}
    changes |= {"olmo_eos_id": 0}
    plain = cases.run(self.config(**changes), stop_after=0)
    masked = cases.run(self.config(**changes, olmo_document_mask=True), stop_after=0)
    self.assertEqual(plain.rows, masked.rows)
    self.assertNotEqual(plain.losses, masked.losses)

  def test_equal_runs_have_equal_losses(self):
    self.assertEqual(cases.run(self.config()).losses, cases.run(self.config()).losses)

  @parameterized.parameters(2, 4, 6)
  def test_an_interrupted_run_continues_as_if_uninterrupted(self, stop_after: int):
    straight = cases.run(self.config())
    config = self.config(checkpoint_dir=str(self.dir), async_checkpointing=False)
    before = cases.run(config, stop_after=stop_after)
    after = cases.run(config)
    self.assertEqual(min(after.rows), 3 if stop_after < 5 else 6)
    self.assertEqual({**before.rows, **after.rows}, straight.rows)
    self.assertEqual({**before.losses, **after.losses}, straight.losses)

  def test_the_number_of_processes_may_change_on_resume(self):
    # A constant learning rate, so that it does not depend on where a part ends.
    changes = {"steps": 12, "warmup_steps": 0, "learning_rate_final_fraction": 1.0}
    straight = cases.run(self.config(**changes))
    rows: dict[int, dict[int, list[int]]] = {}
    losses: dict[int, float] = {}
    for steps, processes in ((4, 2), (8, 1), (12, 2)):
      part = {**changes, "steps": steps, "checkpoint_dir": str(self.dir)}
      if processes == 1:
        results = [cases.train_in_process(part, _CACHE)]
      else:
        results = distributed.run(
            "tests.trainers.tiny.train_cases:train_in_process",
            processes=processes,
            devices=2,
            args=(part, _CACHE),
        )
      for part_losses, part_rows in results:
        self.assertEqual(min(part_rows), steps - 4)
        losses.update(part_losses)
        for step, found in part_rows.items():
          rows.setdefault(step, {}).update(found)
    self.assertEqual(rows, straight.rows)
    for step, loss in straight.losses.items():
      self.assertAlmostEqual(losses[step], loss, delta=1e-4)

  def test_weights_are_sharded_over_fsdp_and_learn_the_same(self):
    large = {"vocab_size": 1024, "emb_dim": 32, "steps": 4}
    whole = cases.run(self.config(mesh_shape=(4, 1), **large)).losses
    split = cases.run(self.config(mesh_shape=(-1, 2), **large)).losses
    for step, loss in whole.items():
      self.assertAlmostEqual(split[step], loss, delta=1e-4)

  def test_bfloat16_and_remat_stay_close_to_float32(self):
    exact = cases.run(self.config()).losses
    rough = cases.run(self.config(dtype="bfloat16", remat=True)).losses
    self.assertNotEqual(exact, rough)
    for step, loss in exact.items():
      self.assertAlmostEqual(rough[step], loss, delta=0.05)

  def test_evaluation_runs_at_its_interval_on_the_same_data(self):
    config = self.config(eval_interval=2, learning_rate=1e-9, weight_decay=0.0)
    recorder = cases.run(config)
    found = {s: m["eval_loss"] for s, m in recorder.metrics.items() if "eval_loss" in m}
    self.assertEqual(sorted(found), [1, 3, 5, 7])
    self.assertAlmostEqual(found[1], found[5], places=4)
    config.eval_steps = 1
    fewer = cases.run(config).metrics[1]["eval_loss"]
    self.assertNotEqual(fewer, found[1])

  def test_the_metrics_file_has_each_step_once_across_an_interruption(self):
    path = self.dir / "logs" / "metrics.jsonl"
    config = self.config(checkpoint_dir=str(self.dir / "c"), metrics_file=str(path))
    before = cases.run(config, stop_after=6)
    with open(path, "a", encoding="utf-8") as file:
      file.write('{"step": 7, "lo')  # a killed process may leave half a line
    after = cases.run(config)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    self.assertEqual([line["step"] for line in lines], list(range(8)))
    self.assertEqual(
        [line["loss"] for line in lines], list(({**before.losses, **after.losses}).values())
    )
    self.assertEqual(lines[0]["target_tokens"], 4 * 15)
    self.assertEqual([line["position"] for line in lines], list(range(0, 32, 4)))
    self.assertEqual(lines[0]["epoch"], 0)

  def test_a_run_that_is_done_does_nothing(self):
    config = self.config(checkpoint_dir=str(self.dir))
    first = trainer.train(config)
    self.assertEqual(first.steps_done, 8)
    self.assertEqual(trainer.train(config), trainer.Result(8, None, None))

  def test_the_end_of_the_data_ends_the_run_with_a_checkpoint(self):
    index = cases.write_counting_corpus(self.dir / "corpus")
    config = self.config(
        dataset_type="olmo_grain",
        olmo_index_path=index,
        olmo_num_epochs=1,
        global_batch_size_to_load=100,
        mesh_shape=(4, 1),
        steps=50,
        checkpoint_dir=str(self.dir / "c"),
    )
    result = trainer.train(config)
    self.assertEqual(result.steps_done, 5)  # 500 instances
    self.assertTrue((self.dir / "c" / "4").exists())
    self.assertEqual(trainer.train(config), trainer.Result(5, None, None))

  def test_without_checkpointing_initial_step_says_where_the_data_begins(self):
    straight = cases.run(self.config())
    late = cases.run(self.config(initial_step=5))
    self.assertEqual(late.rows, {step: straight.rows[step] for step in (5, 6, 7)})

  def test_a_restored_state_beats_initial_step(self):
    config = self.interrupted()
    config.initial_step = 0
    straight = cases.run(self.config())
    self.assertEqual(cases.run(config).rows, {s: straight.rows[s] for s in range(3, 8)})

  @parameterized.parameters(
      {},
      {"initial_step": 0},
      {"initial_step": 7},
      {"olmo_initial_position": 2},
      {"global_batch_size_to_load": 8},
  )
  def test_the_restored_state_alone_decides_where_the_data_resumes(self, **changes):
    straight = cases.run(self.config())
    config = self.interrupted()
    config.update(changes)
    path = str(self.dir / "2" / "data" / "metadata")
    with (
        cases.counted_opens(path) as opened,
        self.assertNoLogs("absl", "WARNING"),
    ):
      resumed = cases.run(config, stop_after=3)
    self.assertEqual(opened, [path])
    expected = [row for step in (3, 4) for row in straight.rows[step].values()]
    got = list(resumed.rows[3].values())
    self.assertEqual(got, expected[: len(got)])

  def test_the_log_says_where_the_data_resumes(self):
    config = self.interrupted()
    with self.assertLogs("absl", "INFO") as logs:
      cases.run(config, stop_after=3)
    self.assertRegex(
        "\n".join(logs.output),
        "restored checkpoint 2 of .*; step 3 comes next, at position 12 of the data",
    )

  def test_a_checkpoint_of_another_stream_is_refused(self):
    config = self.interrupted()
    config.data_shuffle_seed = 1
    with self.assertRaisesRegex(errors.ResumeError, "seed"):
      cases.run(config)

  def test_a_checkpoint_of_another_model_is_refused(self):
    config = self.interrupted()
    config.update({"emb_dim": 32, "logits_via_embedding": False})
    with self.assertRaisesRegex(
        errors.ResumeError,
        r"embedding: the checkpoint has \(64, 16\), the config makes \(64, 32\)\n(.|\n)*"
        r"output: the checkpoint has none, the config makes \(32, 64\)",
    ):
      cases.run(config)

  def test_a_mesh_that_does_not_fit_the_devices_is_an_error(self):
    with self.assertRaisesRegex(errors.ConfigError, r"mesh_shape=\(3, 1\) .* 3 devices, found 4"):
      trainer.train(self.config(mesh_shape=(3, 1)))


class CommandLineTest(parameterized.TestCase):

  def main(self, *args: str, on_batch: trainer.OnBatch | None = None) -> tuple[int, str]:
    with mock.patch.object(sys, "stderr", io.StringIO()) as stderr:
      code = trainer.main_from_argv(["tiny", *args], on_batch=on_batch)
    return code, stderr.getvalue()

  def arguments(self, **changes: Any) -> list[str]:
    values = cases.make_config(**changes).items()
    return [f"--config.{name}={value}" for name, value in values if value is not None]

  def test_a_run_whose_worker_is_killed_asks_for_a_restart(self):
    index = cases.write_counting_corpus(pathlib.Path(self.create_tempdir().full_path))

    def kill_workers(*_: Any) -> None:
      for child in multiprocessing.active_children():
        child.kill()

    code, text = self.main(
        *self.arguments(
            dataset_type="olmo_grain", olmo_index_path=index, grain_worker_count=1, steps=500
        ),
        on_batch=kill_workers,
    )
    self.assertEqual(code, 1, text)
    self.assertIn("ERROR: WorkerError: A worker that prepares batches has died", text)

  def test_a_run_reports_what_it_does(self):
    code, text = self.main(*self.arguments(log_interval=4))
    self.assertEqual(code, 0)
    self.assertRegex(text, r"model: [\d,]+ parameters, 1 layers of width 16, float32\n")
    self.assertIn("mesh: data=4 x fsdp=1 over 4 devices of 1 process; batches of 4 x 16", text)
    self.assertRegex(
        text,
        r"step     3  loss \d\.\d+  grad \d.*  lr .*  [\d,]+ tokens/s  data wait \d+%"
        r"  position \d+  epoch \d+\n",
    )
    self.assertEqual(text.count("tokens/s"), 2)

  def test_a_misspelt_key_names_its_neighbour(self):
    code, text = self.main("--config.stpes=3")
    self.assertEqual(code, 2)
    self.assertEqual(
        text, "ERROR: ConfigError: The config has no key 'stpes'; did you mean 'steps'?\n"
    )

  def test_help_lists_every_key(self):
    with mock.patch.object(sys, "stdout", io.StringIO()) as stdout:
      self.assertEqual(trainer.main_from_argv(["tiny", "--help"]), 0)
    self.assertIn("\n  learning_rate = 0.001\n      Peak learning rate.\n", stdout.getvalue())
    self.assertIn("\n  olmo_index_path = ''\n", stdout.getvalue())
    self.assertIn(
        "\n  olmo_apply_ngram_filter = True for olmo_grain, False for olmo_documents,",
        stdout.getvalue(),
    )


if __name__ == "__main__":
  absltest.main()
