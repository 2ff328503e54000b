"""Tests of what MaxText's config means to the data: keys, ramp-up, accumulation, padding."""

import collections
import json
import pathlib
import random
import shutil
import types
import typing
from unittest import mock

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import config as config_lib
from maxtext_olmo import config_table
from maxtext_olmo import errors
from maxtext_olmo.trainers.maxtext import config as maxtext_config
from maxtext_olmo.trainers.maxtext import shapes
from tests.trainers.maxtext import runs

STARTS_PROCESSES = True

_RAMP_UP = (
    "enable_rampup_batch_size=true",
    "per_device_batch_size_start=2",
    "per_device_batch_size_increment=2",
    "per_device_batch_size=8",
    "global_rampup_samples=18",
)


def setUpModule():
  runs.set_up_module()


def _trained_ids(run_steps: dict[int, runs.Step]) -> list[int]:
  return [i for step in sorted(run_steps) for i in run_steps[step].ids if i >= 0]


class StartTest(parameterized.TestCase):
  """Tests where the data begins, before MaxText has restored anything."""

  def config(self, **values):
    config = types.SimpleNamespace(**config_lib.defaults())
    config.attention, config.packing = "autoselected", False
    config.enable_rampup_batch_size = False
    config.gradient_accumulation_steps = 2
    config.load_full_state_path = ""
    for name, value in {"checkpoint_dir": str(self.directory), **values}.items():
      setattr(config, name, value)
    return config

  def start(self, **values):
    made = maxtext_config.data_config(self.config(**values))
    return made.initial_step, made.olmo_initial_position

  def setUp(self):
    super().setUp()
    self.directory = pathlib.Path(self.create_tempdir().full_path)

  def save(self, item):
    """Writes what a committed checkpoint has; Orbax would start JAX here, and runs are forked."""
    checkpoint = self.directory / "6"
    (checkpoint / item).mkdir(parents=True)
    metadata = json.dumps({"commit_timestamp_nsecs": 1})
    (checkpoint / "_CHECKPOINT_METADATA").write_text(metadata)

  def test_without_a_checkpoint_the_keys_decide(self):
    self.assertEqual(self.start(), (-1, -1))
    self.assertEqual(self.start(olmo_initial_position=50), (-1, 50))

  def test_a_checkpoint_that_maxtext_restores_is_not_looked_into(self):
    self.save("items")
    self.assertEqual(self.start(), (0, -1))
    self.assertEqual(self.start(olmo_initial_position=50), (0, -1))
    self.assertEqual(self.start(initial_step=7, olmo_initial_position=0), (7, 0))
    self.assertEqual(self.start(enable_checkpointing=False), (-1, -1))
    self.assertIsNone(maxtext_config.tunix_checkpoint(self.config()))

  @parameterized.parameters(
      ("cudnn_flash_jax", True, "attention=dot_product"),
      ("cudnn_flash_te", False, "packing=true and max_segments_per_seq"),
  )
  def test_an_attention_that_ignores_document_masks_is_refused(self, attention, packing, remedy):
    values = {"attention": attention, "packing": packing}
    with self.assertRaisesRegex(errors.ConfigError, remedy):
      self.start(**values, olmo_document_mask=True)
    with self.assertRaisesRegex(errors.ConfigError, remedy):
      self.start(**values, dataset_type="olmo_documents")
    self.start(**values)
    self.start(attention="cudnn_flash_te", packing=True, olmo_document_mask=True)

  @parameterized.parameters(("olmo_grain", True), ("olmo_packed", True), ("synthetic", False))
  def test_the_dataset_type_decides_whether_batches_are_ours(self, dataset_type, expected):
    self.assertEqual(maxtext_config.is_ours(dataset_type), expected)
    made = maxtext_config.data_config(self.config(dataset_type=dataset_type))
    self.assertEqual(made.dataset_type, dataset_type)

  def test_tunix_says_only_how_many_updates_it_has_done(self):
    self.assertIsNone(maxtext_config.tunix_checkpoint(self.config()))
    self.save("model_params")
    self.assertEqual(maxtext_config.tunix_checkpoint(self.config()), (6, 12))

  def test_a_config_without_our_keys_or_a_key_of_maxtext_is_refused_by_name(self):
    config = self.config()
    del config.olmo_order, config.load_full_state_path
    # MaxText need not be here.
    self.enter_context(mock.patch.object(shapes, "installed_version", lambda: "1.2.3"))
    message = "MaxText 1.2.3 .* no olmo_order, load_full_state_path"
    with self.assertRaisesRegex(errors.ConfigError, message):
      maxtext_config.data_config(config)


@runs.needs_maxtext
class BatchSizesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = self.create_tempdir().full_path
    runs.write_corpus(self.directory, 100)

  def test_ramp_up_trains_each_row_once_and_resumes_at_the_right_size_after_a_kill(self):
    reference = runs.start(self.directory, *_RAMP_UP, "steps=12", "run_name=reference").wait()
    sizes = [len(step.ids) for step in reference.steps().values()]
    self.assertEqual(sizes, [2, 2, 2, 4, 4, 6, *[8] * 6])
    self.assertEqual(_trained_ids(reference.steps()), runs.expected_ids(self.directory, sum(sizes)))
    trained = {}
    for first, last in ((1, 4), (5, 8)):
      run = runs.start(self.directory, *_RAMP_UP, "steps=12", "checkpoint_period=2", pause=0.1)
      run.kill_at(random.randrange(first, last))
      trained.update(run.steps())
    trained.update(
        runs.start(self.directory, *_RAMP_UP, "steps=12", "checkpoint_period=2").wait().steps()
    )
    self.assertEqual(
        {step: (done.digests, done.loss) for step, done in trained.items()},
        {step: (done.digests, done.loss) for step, done in reference.steps().items()},
    )

  def test_ramp_up_continues_by_the_step_where_nothing_else_is_known(self):
    first = runs.start(self.directory, *_RAMP_UP, "steps=5").wait()
    pathlib.Path(self.directory, "run", "checkpoints", "olmo_history.jsonl").unlink()
    shutil.rmtree(pathlib.Path(self.directory, "run", "checkpoints", "olmo_run"))
    second = runs.start(self.directory, *_RAMP_UP, "steps=8").wait()
    sizes = [2, 2, 2, 4, 4, 6, 8, 8]
    self.assertEqual([len(step.ids) for step in second.steps().values()], sizes[5:])
    self.assertEqual(
        _trained_ids(first.steps()) + _trained_ids(second.steps()),
        runs.expected_ids(self.directory, sum(sizes)),
    )

  @parameterized.named_parameters(
      ("expansion_of_two", ("per_device_batch_size=4", "expansion_factor_real_data=2"), 1, 8, 4),
      (
          "expansion_of_a_half",
          ("per_device_batch_size=4", "expansion_factor_real_data=0.5"),
          1,
          2,
          2,
      ),
      ("half_a_row_per_device", ("per_device_batch_size=0.5",), 4, 4, 2),
      ("accumulation", ("per_device_batch_size=2", "gradient_accumulation_steps=2"), 1, 4, 4),
      (
          "accumulation_of_half_rows",
          ("per_device_batch_size=0.5", "gradient_accumulation_steps=2"),
          4,
          8,
          4,
      ),
  )
  def test_rows_that_are_trained_on_come_once_and_others_are_padding(
      self, args, devices, loaded, trained
  ):
    runs_of_it = [
        runs.start(self.directory, *args, f"steps={steps}", devices=devices).wait().steps()
        for steps in (4, 6)
    ]
    steps = {**runs_of_it[0], **runs_of_it[1]}
    self.assertEqual(list(steps), list(range(6)))
    for step in steps.values():
      self.assertLen(step.ids, loaded)
      self.assertEqual(step.ids[trained:], [-1] * (loaded - trained))
    self.assertEqual(_trained_ids(steps), runs.expected_ids(self.directory, 6 * trained))

  def test_half_rows_train_as_whole_ones_do(self):
    losses = []
    for name, args, devices in (
        ("half", ("per_device_batch_size=0.5", "gradient_accumulation_steps=2"), 4),
        ("whole", ("per_device_batch_size=4",), 1),
        ("wide", ("per_device_batch_size=4", "expansion_factor_real_data=2"), 1),
    ):
      run = runs.start(self.directory, *args, "steps=3", f"run_name={name}", devices=devices)
      losses.append([step.loss for step in run.wait().steps().values()])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
    np.testing.assert_allclose(losses[2], losses[1], rtol=1e-5)


@runs.needs_maxtext
class EndOfDataTest(absltest.TestCase):

  def test_padding_batches_follow_the_end_and_a_restart_repeats_nothing(self):
    directory = self.create_tempdir().full_path
    runs.write_corpus(directory, 30)
    args = (
        "per_device_batch_size=4",
        "olmo_num_epochs=1",
        "generate_padding_batch_train=true",
        "generate_padding_batch_eval=true",
        "olmo_eval_instances=6",
        "eval_interval=4",
        "eval_steps=3",
    )
    first = runs.start(directory, *args, "steps=8").wait()
    second = runs.start(directory, *args, "steps=10").wait()
    steps = {**first.steps(), **second.steps()}
    ids = _trained_ids(steps)
    self.assertEqual(set(collections.Counter(ids).values()), {1})
    self.assertLen(ids, 24)
    for step in (6, 7, 8, 9):
      self.assertEqual(steps[step].ids, [-1] * 4)
      self.assertEqual(steps[step].loss, 0.0)
    evaluated = list(first.evaluations().values())
    self.assertLen(evaluated, 6)
    self.assertEqual([i >= 0 for i in evaluated[1].ids], [True, True, False, False])
    self.assertEqual(evaluated[2].ids, [-1] * 4)
    self.assertEqual([e.ids for e in evaluated[:3]], [e.ids for e in evaluated[3:]])
    self.assertEmpty({i for e in evaluated for i in e.ids if i >= 0} & set(ids))

  def test_without_padding_training_ends_with_the_data(self):
    directory = self.create_tempdir().full_path
    runs.write_corpus(directory, 22)
    run = runs.start(directory, "per_device_batch_size=4", "olmo_num_epochs=1", "steps=12").wait()
    self.assertEqual([len(_trained_ids({0: s})) for s in run.steps().values()], [4] * 5 + [2])
    self.assertCountEqual(_trained_ids(run.steps()), range(22))


@runs.needs_maxtext
class KeysTest(absltest.TestCase):

  def test_our_keys_work_in_a_yaml_file(self):
    directory = self.create_tempdir().full_path
    runs.write_corpus(directory, 40)
    path = pathlib.Path(directory, "mine.yml")
    path.write_text(
        "base_config: base.yml\nolmo_order: sequential\nolmo_batch_schedule: [[0, 2], [2, 4]]\n"
        "olmo_apply_ngram_filter: false\n"
    )
    args = ("steps=4", "per_device_batch_size=4", "olmo_batch_extras=[]")
    run = runs.start(directory, *args, config=str(path)).wait()
    self.assertEqual(
        [s.ids for s in run.steps().values()], [[0, 1], [2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    )

  def test_two_deciders_of_the_batch_size_are_refused(self):
    directory = self.create_tempdir().full_path
    runs.write_corpus(directory, 40)
    run = runs.start(directory, "steps=4", *_RAMP_UP, "olmo_batch_schedule=[[0,2],[2,4]]")
    self.assertEqual(run.exit_codes(), [1])
    self.assertIn("enable_rampup_batch_size and olmo_batch_schedule are both set", run.log())

  def test_an_unknown_key_is_refused_as_before(self):
    directory = self.create_tempdir().full_path
    runs.write_corpus(directory, 40)
    run = runs.start(directory, "steps=4", "olmo_ordre=feistel")
    self.assertNotEqual(run.exit_codes(), [0])
    self.assertIn("olmo_ordre", run.log())

  def test_every_data_key_is_in_the_config_with_its_default_and_its_help(self):
    self.assertTrue(runs.in_child(_check_keys))

  def test_no_error_contains_credentials(self):
    texts = runs.in_child(_errors_of_config)
    self.assertLen(texts, 4)
    for text in texts:
      self.assertIn("validation error", text)
      self.assertNotIn("secret", text)


def _errors_of_config() -> list[str]:
  """Returns pydantic's errors about configs that are wrong and have a URL with credentials."""
  from maxtext.configs import types

  from maxtext_olmo.trainers.maxtext import config as config_lib

  extended = config_lib.extended_config_class(types.MaxTextConfig)
  url = "https://user:secret@host/x?sig=secret"
  errors = []
  for values in (
      {"olmo_eos_id": url},
      {"olmo_stages": url},
      {"olmo_label_masks": url},
      {"shard_embed_moe_on_fsdp": True, "olmo_exclude": url},  # The error has the whole config.
  ):
    try:
      extended(**values)
    except ValueError as error:
      errors.append(str(error))
  return errors


def _check_keys() -> bool:
  from maxtext.configs import types

  from maxtext_olmo.trainers.maxtext import config as config_lib

  extended = config_lib.extended_config_class(types.MaxTextConfig)
  for key in config_table.KEYS:
    field = extended.model_fields[key.name]
    own = types.MaxTextConfig.model_fields.get(key.name)
    if key.name == "dataset_type":  # It takes more values than MaxText's own.
      assert (field.default, field.description) == (own.default, own.description), key
      assert typing.get_args(field.annotation)[0] == own.annotation, key
    elif own is not None:
      assert repr(field) == repr(own), key
    else:
      assert field.description == key.help, key
      assert field.default == (list(key.default) if isinstance(key.default, tuple) else key.default)
  return True


if __name__ == "__main__":
  absltest.main()
