"""Tests of long-context and fine-tuning rows inside the real MaxText: its masks and its loss.

`MAXTEXT_LONG=1 python tests/trainers/maxtext/recipes_test.py` runs the commands of all configs in
MaxText's trainer; otherwise, those of OLMo 3 7B and of its fine-tuning. It also kills and resumes a
run without document masks.
"""

import ast
import functools
import importlib
import os
import pathlib
import re
import shlex
from collections.abc import Sequence
from typing import Any

import numpy as np
import yaml
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import config_table
from tests.trainers.maxtext import recipe_runs
from tests.trainers.maxtext import runs

STARTS_PROCESSES = True

_SFT = {"entry": "maxtext.trainers.post_train.sft.train_sft", "config": "post_train/sft.yml"}
_CONFIGS = pathlib.Path(__file__).parents[3] / "configs"
_STAGES = (
    "olmo3_7b_stage1",
    "olmo3_7b_stage2",
    "olmo3_7b_stage3_long_context",
    "olmo3_32b_stage1",
    "olmo3_32b_stage2",
    "olmo3_32b_stage3_long_context",
    "olmo3_sft_think",
    "hybrid_midtrain",
)
# OLMo 3's own layers, three with a sliding window and one without.
_SMALL_OLMO = (
    "model_name=olmo3-7b",
    "base_num_decoder_layers=4",
    "sliding_window_size=8",
    f"vocab_size={runs.VOCABULARY}",
)
_SMALL_IDS = (f"olmo_eos_id={recipe_runs.EOS}", f"olmo_pad_id={recipe_runs.PAD}")
_STEPS = 10
_MASKS = "['labels_mask_part_*.npy']"


def setUpModule():
  runs.set_up_module()


def _skip_unless_long(test: absltest.TestCase) -> None:
  if not os.environ.get("MAXTEXT_LONG"):
    test.skipTest("Set MAXTEXT_LONG=1 to run this.")


def _has_saved(run: runs.Run, tap: pathlib.Path) -> bool:
  """Returns whether a run has trained some steps and saved a checkpoint."""
  return len(list(tap.glob("*.npz"))) > 4 and bool(run.labels())


@runs.needs_maxtext
class TrainerTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = pathlib.Path(self.create_tempdir().full_path)
    self.corpus = recipe_runs.write_corpus(self.directory)

  def train_and_kill(self, *arguments: str, **start: Any) -> list[recipe_runs.LossRecord]:
    """Trains with a kill and a restart; returns what reached the loss function at each step."""
    found: dict[int, recipe_runs.LossRecord] = {}
    for number in range(2):
      tap = self.directory / f"loss-{number}"
      run = runs.start(
          self.directory,
          *arguments,
          f"steps={_STEPS}",
          "checkpoint_period=2",
          edit=recipe_runs.LossTap(tap),
          **start,
      )
      first = 0
      if number == 0:
        run.kill_when(functools.partial(_has_saved, run, tap))
      else:
        run.wait()
        first = int(re.findall(r"the data resumes with step (\d+)", run.log())[-1])
        self.assertGreater(first, 0)
      found.update(recipe_runs.read_losses(tap, first))
    self.assertEqual(sorted(found), list(range(_STEPS)))
    return [record for _, record in sorted(found.items())]

  def check(
      self, records: list[recipe_runs.LossRecord], *, document_mask: bool, label_masks: bool
  ) -> None:
    documents = []
    for record in records:
      documents += self.corpus.check_rows(
          record.batch, document_mask=document_mask, label_masks=label_masks
      )
      record.check_loss()
    epoch = len(self.corpus.tokens)
    self.assertEqual(sorted(documents[:epoch]), list(range(epoch)))

  @parameterized.named_parameters(
      ("long_context", True, False),
      ("long_context_without_document_masks", False, False),
      ("fine_tuning", True, True),
  )
  def test_rows_and_loss_are_those_of_the_files_after_a_kill(self, document_mask, label_masks):
    if not document_mask:
      _skip_unless_long(self)
    records = self.train_and_kill(
        *self.corpus.arguments(
            olmo_document_mask=document_mask, olmo_label_masks=_MASKS if label_masks else "[]"
        )
    )
    self.check(records, document_mask=document_mask, label_masks=label_masks)

  def test_tunix_fine_tunes_on_the_rows_and_masks_of_the_files_after_a_kill(self):
    records = self.train_and_kill(*self.corpus.arguments(olmo_label_masks=_MASKS), **_SFT)
    self.check(records, document_mask=True, label_masks=True)


def _change_of_logits(
    directory: pathlib.Path, arguments: Sequence[Sequence[str]]
) -> list[tuple[np.ndarray, list[int]]]:
  """Returns how the logits of rows change if the first document does, and where that one ends.

  Args:
    directory: Directory of the corpus.
    arguments: Arguments of MaxText, for each result.
  """
  from maxtext_olmo.trainers.maxtext import adapter

  adapter.install()
  return [_change_of_logits_with(directory, chosen) for chosen in arguments]


def _change_of_logits_with(
    directory: pathlib.Path, arguments: Sequence[str]
) -> tuple[np.ndarray, list[int]]:
  import jax
  from flax import nnx
  from flax.core.spmd import logical_axis_rules
  from maxtext.configs import pyconfig
  from maxtext.input_pipeline import input_pipeline_interface
  from maxtext.utils import model_creation_utils

  config = pyconfig.initialize_pydantic(runs.command(directory, *arguments))
  model, mesh = model_creation_utils.from_pretrained(config)
  train, _ = input_pipeline_interface.create_data_iterator(config, mesh)
  batch = {name: np.asarray(array) for name, array in next(train).items()}
  train.close()
  # Segments do not tell where documents end if attention does not stay within them.
  ends = np.argmax(batch["inputs"] == recipe_runs.EOS, axis=1)
  rows = np.flatnonzero((ends > 2) & (ends < runs.LENGTH // 2))
  changed = batch["inputs"].copy()
  for row in rows:
    changed[row, : ends[row]] = (changed[row, : ends[row]] + 100) % runs.VOCABULARY
  graph, state = nnx.split(model)

  @jax.jit
  def logits(state, inputs):
    return nnx.merge(graph, state)(
        decoder_input_tokens=inputs,
        decoder_positions=batch["inputs_position"],
        decoder_segment_ids=batch["inputs_segmentation"],
        enable_dropout=False,
    )

  with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
    difference = np.asarray(logits(state, changed)) - np.asarray(logits(state, batch["inputs"]))
  return np.abs(difference).max(axis=-1)[rows], ends[rows].tolist()


@runs.needs_maxtext
class AttentionTest(parameterized.TestCase):

  @parameterized.named_parameters(("llama", ()), ("olmo3", _SMALL_OLMO))
  def test_a_document_changes_the_logits_of_later_ones_only_without_document_masks(self, model):
    directory = pathlib.Path(self.create_tempdir().full_path)
    corpus = recipe_runs.write_corpus(directory)
    arguments = [
        [
            *corpus.arguments(olmo_document_mask=masked, packing=packing, per_device_batch_size=16),
            *model,
        ]
        for masked, packing in ((True, True), (True, False), (False, True))
    ]
    masked, also_masked, unmasked = runs.in_child(_change_of_logits, directory, arguments)
    for changes, ends in (masked, also_masked):
      self.assertNotEmpty(ends)
      for change, end in zip(changes, ends):
        self.assertGreater(change[end], 0)
        self.assertEqual(change[end + 1 :].max(), 0)
    for change, end in zip(*unmasked):
      self.assertGreater(change[end + 1], 0)


def _command(name: str) -> list[str]:
  """Returns the arguments of the MaxText command in the docstring of a config."""
  text = ast.get_docstring(ast.parse((_CONFIGS / f"{name}.py").read_text()))
  (command,) = re.findall(r"maxtext-olmo maxtext train base\.yml (.*?)\n\n", text, re.DOTALL)
  return shlex.split(command.replace("\\\n", " "))


class CommandsTest(parameterized.TestCase):

  @parameterized.parameters(*_STAGES)
  def test_a_command_has_the_data_settings_of_its_config(self, name):
    module = importlib.import_module(f"maxtext_olmo.configs.{name}")
    config = module.get_config()
    given = dict(argument.split("=", 1) for argument in _command(name))
    self.assertContainsSubset(("dataset_type", "max_target_length", "data_shuffle_seed"), given)
    for key in config_table.KEYS:
      if key.name in given and key.name != "olmo_index_path":
        expected = config[key.name]
        expected = list(expected) if isinstance(expected, tuple) else expected
        self.assertEqual(yaml.safe_load(given[key.name]), expected, key.name)
      elif key.name.startswith("olmo_") and key.name not in ("olmo_index_path", "olmo_eos_id"):
        default = key.default_by_type.get(config.dataset_type, key.default)
        if config[key.name]:  # Empty mixtures and ranges have other types in a config.
          self.assertEqual(config[key.name], default, f"{key.name} is not in the command.")


@runs.needs_maxtext
class StagesTest(parameterized.TestCase):

  @parameterized.parameters(
      ("olmo3_7b_stage1", "olmo3_7b_stage2", "olmo3_7b_stage3_long_context", "olmo3_sft_think"),
      ("olmo3_32b_stage1", "olmo3_32b_stage2", "olmo3_32b_stage3_long_context"),
      ("olmo3_7b_stage1", "hybrid_midtrain"),
  )
  def test_the_commands_of_the_configs_train_a_small_olmo3_from_stage_to_stage(self, *names):
    if names[0] != "olmo3_7b_stage1" or names[-1] == "hybrid_midtrain":
      _skip_unless_long(self)
    directory = pathlib.Path(self.create_tempdir().full_path)
    corpus = recipe_runs.write_corpus(directory)
    weights: list[str] = []
    for name in names:
      arguments = _command(name)
      if weights:  # Otherwise nothing says where the weights come from.
        self.assertIn("load_parameters_path=", " ".join(arguments))
      tap = directory / f"loss-{name}"
      runs.start(
          directory,
          *arguments,
          *_SMALL_OLMO,
          *weights,
          f"max_target_length={runs.LENGTH}",
          f"olmo_index_path={directory / 'index.json'}",
          f"olmo_order_cache_dir={directory}",
          f"base_output_directory={directory}",
          f"run_name={name}",
          *(() if "olmo_grain" in " ".join(arguments) else _SMALL_IDS),
          "per_device_batch_size=2",
          "steps=2",
          edit=recipe_runs.LossTap(tap),
      ).wait()
      weights = [f"load_parameters_path={directory / name / 'checkpoints' / '1' / 'items'}"]
      records = recipe_runs.read_losses(tap)
      self.assertLen(records, 2)
      for record in records.values():
        record.check_loss()
        if "olmo_document_mask=true" in arguments:
          corpus.check_rows(record.batch, document_mask=True, label_masks=name == "olmo3_sft_think")


if __name__ == "__main__":
  absltest.main()
