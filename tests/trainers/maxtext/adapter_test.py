"""Tests inside the real MaxText trainer: the batches that its train step receives."""

import collections
import dataclasses
import importlib.util
import inspect
import json
import os
import pathlib
import random
import subprocess
import sys
import types
from unittest import mock

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.trainers import lease
from maxtext_olmo.trainers import lease_places
from maxtext_olmo.trainers.maxtext import adapter
from maxtext_olmo.trainers.maxtext import shapes
from tests import object_server
from tests.trainers.maxtext import runs

STARTS_PROCESSES = True

_MODULE = "maxtext_olmo.trainers.maxtext"


def setUpModule():
  runs.set_up_module()


def _digests_outside(directory: str, steps: int) -> list[list[int]]:
  """Returns the rows of the first batches from `create_data_iterator`, without MaxText."""
  import zlib

  import jax

  import maxtext_olmo

  config = maxtext_olmo.get_config()
  config.update(
      olmo_index_path=os.path.join(directory, "index.json"),
      max_target_length=runs.LENGTH,
      global_batch_size_to_load=4,
      vocab_size=runs.VOCABULARY,
      checkpoint_dir="",
  )
  mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
  train, _ = maxtext_olmo.create_data_iterator(config, mesh)
  found = []
  for _ in range(steps):
    batch = next(train)
    arrays = [np.asarray(batch[name]) for name in sorted(batch)]
    found.append([zlib.crc32(np.concatenate(row).tobytes()) for row in zip(*arrays)])
  train.close()
  return found


@runs.needs_maxtext
class LedgerTest(parameterized.TestCase):

  def test_twelve_steps_are_those_of_create_data_iterator_outside(self):
    directory = self.create_tempdir().full_path
    runs.write_corpus(directory, 100)
    outside = runs.in_child(_digests_outside, directory, 12)
    run = runs.start(directory, "steps=12", "per_device_batch_size=4").wait()
    self.assertEqual([step.digests for step in run.steps().values()], outside)
    self.assertEqual(list(run.steps()), list(range(12)))

  def test_kills_and_restarts_on_other_processes_and_workers_train_each_instance_once_per_epoch(
      self,
  ):
    directory = self.create_tempdir().full_path
    instances, held_out, steps = 61, 10, 30
    runs.write_corpus(directory, instances)
    common = (
        f"steps={steps}",
        f"olmo_eval_instances={held_out}",
        "eval_interval=7",
        "eval_steps=2",
        "async_checkpointing=true",
    )
    reference = runs.start(
        directory, *common, "per_device_batch_size=4", "run_name=reference"
    ).wait()
    seed = random.SystemRandom().randrange(1 << 30)
    dice = random.Random(seed)
    trained: dict[int, runs.Step] = {}
    evaluations = [list(reference.evaluations().values())]
    restarts = ((1, 0), (1, 2), (2, 2), (2, 0), (1, 0))
    for i, (processes, workers) in enumerate(restarts):
      run = runs.start(
          directory,
          *common,
          f"per_device_batch_size={4 // processes}",
          f"grain_worker_count={workers}",
          processes=processes,
          pause=0.1,
      )
      if i + 1 < len(restarts):
        run.kill_at(min(steps - 4, (max(trained) if trained else 0) + dice.randrange(2, 7)))
      else:
        run.wait()
      done = run.steps()
      if i:
        self.assertLessEqual(min(done), max(trained) + 1, f"Steps were left out; seed {seed}.")
      trained.update(done)
      evaluations.append(list(run.evaluations().values()))
    self.assertEqual(sorted(trained), list(range(steps)))
    self._check_once_per_epoch(trained, instances - held_out)
    for step, done in trained.items():
      expected = reference.steps()[step]
      self.assertEqual(done.digests, expected.digests, f"Step {step}; seed {seed}.")
      # Sums over two processes round differently.
      np.testing.assert_allclose(done.loss, expected.loss, rtol=1e-4)
    self._check_evaluations(evaluations, {i for step in trained.values() for i in step.ids})

  def _check_once_per_epoch(self, trained: dict[int, runs.Step], epoch: int) -> None:
    ids = [i for step in sorted(trained) for i in trained[step].ids]
    for first in range(0, len(ids), epoch):
      counts = collections.Counter(ids[first : first + epoch])
      self.assertEqual(set(counts.values()), {1}, f"Epoch {first // epoch}.")
      if first + epoch <= len(ids):
        self.assertLen(counts, epoch)

  def _check_evaluations(self, evaluations: list[list[runs.Step]], trained: set[int]) -> None:
    first = evaluations[0][:2]
    self.assertLen({i for step in first for i in step.ids}, 8)
    for batches in evaluations:
      for i, batch in enumerate(batches):
        self.assertEqual(batch.digests, first[i % 2].digests)
        self.assertEmpty(set(batch.ids) & trained)
    self.assertGreater(sum(map(len, evaluations[1:])), 2)

  def test_killed_and_restarted_on_one_process_the_losses_are_equal_to_the_bit(self):
    directory = self.create_tempdir().full_path
    runs.write_corpus(directory, 40)
    common = ("steps=16", "per_device_batch_size=4")
    reference = runs.start(directory, *common, "run_name=reference").wait().steps()
    run = runs.start(directory, *common, pause=0.1)
    run.kill_at(random.randrange(5, 12))
    trained = run.steps()
    trained.update(runs.start(directory, *common, "grain_worker_count=2").wait().steps())
    self.assertEqual(
        {step: done.loss for step, done in trained.items()},
        {step: done.loss for step, done in reference.items()},
    )

  @parameterized.parameters("train", "sft")
  def test_a_directory_that_another_run_writes_to_is_refused(self, entry_point):
    if entry_point == "sft" and importlib.util.find_spec("tunix") is None:
      self.skipTest("google-tunix is not installed.")
    directory = pathlib.Path(self.create_tempdir().full_path)
    runs.write_corpus(directory, 40)
    checkpoints = directory / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    other = dataclasses.replace(lease.Holder.this_process(), host="elsewhere")
    (checkpoints / lease_places.FILE_NAME).write_text(json.dumps(dataclasses.asdict(other)))
    module, folder = adapter.ENTRY_POINTS[entry_point]
    config = os.path.join(folder, "sft.yml" if folder else "base.yml")
    run = runs.start(directory, "steps=2", "per_device_batch_size=4", entry=module, config=config)
    self.assertNotEqual(run.exit_codes(), [0])
    self.assertRegex(run.log(), r"ConfigError: .* is in use by process \d+ on elsewhere")
    self.assertEqual(run.labels(), [])

  def test_a_run_whose_directory_another_one_has_taken_over_stops(self):
    directory = pathlib.Path(self.create_tempdir().full_path)
    runs.write_corpus(directory, 40)
    run = runs.start(directory, "steps=1000", "per_device_batch_size=4", pause=0.1)
    run.wait_until(lambda: len(run.steps()) > 1)
    other = dataclasses.replace(lease.Holder.this_process(), host="elsewhere", machine="another")
    path = directory / "run" / "checkpoints" / lease_places.FILE_NAME
    path.write_text(json.dumps(dataclasses.asdict(other)))
    self.assertEqual(run.exit_codes(), [1])
    self.assertRegex(run.log(), r"ConfigError: .* now belongs to process \d+ on elsewhere")


@runs.needs_maxtext
class OtherEntryPointsTest(absltest.TestCase):

  def test_the_standalone_data_loader_takes_our_batches(self):
    directory = self.create_tempdir().full_path
    runs.write_corpus(directory, 40)
    run = runs.start(
        directory,
        "steps=5",
        "per_device_batch_size=4",
        entry="maxtext.utils.standalone_dataloader",
    ).wait()
    ids = [i for step in run.loaded().values() for i in step.ids]
    self.assertEqual(ids, runs.expected_ids(directory, 20))

  def test_sft_takes_our_batches_and_resumes_from_its_own_checkpoint(self):
    if importlib.util.find_spec("tunix") is None:
      self.skipTest("google-tunix is not installed.")
    directory = self.create_tempdir().full_path
    runs.write_corpus(directory, 40)
    sft = {"entry": "maxtext.trainers.post_train.sft.train_sft", "config": "post_train/sft.yml"}
    first = runs.start(directory, "steps=3", "per_device_batch_size=4", **sft).wait().loaded()
    second = runs.start(directory, "steps=5", "per_device_batch_size=4", **sft).wait().loaded()
    # Tunix takes a batch before it sees that the last step was done.
    ids = [i for step in list(first.values())[:3] for i in step.ids]
    ids += [i for step in list(second.values())[:2] for i in step.ids]
    self.assertEqual(ids, runs.expected_ids(directory, 20))

  def test_other_dataset_types_are_maxtexts_own(self):
    directory = self.create_tempdir().full_path
    runs.write_corpus(directory, 40)
    losses = [
        [
            step.loss
            for step in runs.start(
                directory,
                "steps=3",
                "per_device_batch_size=4",
                "dataset_type=synthetic",
                "enable_checkpointing=false",
                install=install,
            )
            .wait()
            .steps()
            .values()
        ]
        for install in (True, False)
    ]
    self.assertLen(losses[0], 3)
    self.assertEqual(losses[0], losses[1])


@runs.needs_maxtext
class InstallTest(absltest.TestCase):

  def tearDown(self):
    adapter.uninstall()
    super().tearDown()

  def _places(self) -> dict[tuple[str, str], object]:
    return {
        (function.module, function.name): getattr(
            importlib.import_module(function.module), function.name
        )
        for function in adapter._REPLACEMENTS
    }

  def test_install_replaces_and_uninstall_restores(self):
    before = self._places()
    adapter.install()
    self.assertTrue(adapter.is_installed())
    installed = self._places()
    for place, function in installed.items():
      self.assertIsNot(function, before[place])
      self.assertEqual(inspect.signature(function), inspect.signature(before[place]))
    adapter.install()
    self.assertEqual(self._places(), installed)
    adapter.uninstall()
    self.assertFalse(adapter.is_installed())
    self.assertEqual(self._places(), before)
    adapter.uninstall()

  def test_modules_that_took_a_function_by_name_get_ours_too(self):
    loader = importlib.import_module("maxtext.common.data_loader")
    users = [importlib.import_module("maxtext.utils.train_utils")]
    users.append(types.ModuleType("maxtext.of_a_fork"))
    users[1].create_dataloader = own = loader.create_dataloader
    self.enter_context(mock.patch.dict(sys.modules, {"maxtext.of_a_fork": users[1]}))
    adapter.install()
    for user in users:
      self.assertIs(user.create_dataloader, loader.create_dataloader)
      self.assertIsNot(user.create_dataloader, own)
    adapter.uninstall()
    for user in users:
      self.assertIs(user.create_dataloader, own)

  def test_a_function_of_another_shape_is_refused_by_name_and_nothing_changes(self):
    from maxtext.common import data_loader

    own = data_loader.create_dataloader
    before = self._places()
    self.addCleanup(setattr, data_loader, "create_dataloader", own)
    data_loader.create_dataloader = lambda config, mesh: None
    message = r"create_dataloader takes \(config, mesh\), without data_iterator, rampup_manager"
    with self.assertRaisesRegex(errors.ConfigError, message):
      adapter.install()
    del data_loader.create_dataloader
    with self.assertRaisesRegex(
        errors.ConfigError, "no function maxtext.common.data_loader.create"
    ):
      adapter.install()
    data_loader.create_dataloader = own
    self.assertEqual(self._places(), before)
    self.assertFalse(adapter.is_installed())

  def test_another_version_with_the_right_shapes_works_with_one_warning(self):
    # A real distribution of that name, in front of the installed one.
    site = self.create_tempdir().full_path
    info = os.path.join(site, "maxtext-9.9.9.dist-info")
    os.mkdir(info)
    with open(os.path.join(info, "METADATA"), "w", encoding="utf-8") as file:
      file.write("Metadata-Version: 2.1\nName: maxtext\nVersion: 9.9.9\n")
    sys.path.insert(0, site)
    self.addCleanup(sys.path.remove, site)
    with self.assertLogs(level="WARNING") as logs:
      adapter.install()
    self.assertLen(logs.output, 1)
    self.assertIn("MaxText 9.9.9 has not been tested", logs.output[0])
    self.assertTrue(adapter.is_installed())

  @absltest.skipIf(
      runs.has_maxtext() and shapes.installed_version() not in shapes.TRIED,
      "This MaxText has not been tried.",
  )
  def test_a_tested_version_gives_no_warning(self):
    with self.assertNoLogs(level="WARNING"):
      adapter.install()


def _take_own_data() -> None:
  """Makes MaxText one that gets its data from a function that is not replaced."""
  from maxtext.input_pipeline import input_pipeline_interface

  own = input_pipeline_interface.create_data_iterator.__wrapped__
  input_pipeline_interface.create_data_iterator = own


def _restore_by_another_function() -> None:
  """Makes MaxText one that restores its state with a function that is not replaced."""
  from maxtext.utils import maxtext_utils

  maxtext_utils.setup_training_state = maxtext_utils.setup_training_state.__wrapped__


def _forget_the_step() -> None:
  """Makes MaxText one whose train state has no step where it is looked for."""
  from maxtext_olmo.trainers.maxtext import checkpoints

  checkpoints.model_step = lambda state: None


@runs.needs_maxtext
class OtherMaxTextTest(parameterized.TestCase):

  @parameterized.parameters(
      (_take_own_data, "got olmo_grain batches from a function other than"),
      (_restore_by_another_function, "without having called maxtext.utils.maxtext_utils.setup_tra"),
      (_forget_the_step, "setup_training_state returned no train state with a step"),
  )
  def test_a_trainer_that_bypasses_the_replacements_is_stopped_before_its_first_step(
      self, edit, message
  ):
    directory = self.create_tempdir().full_path
    runs.write_corpus(directory, 40)
    run = runs.start(directory, "steps=2", "per_device_batch_size=4", edit=edit)
    self.assertEqual(run.exit_codes(), [1])
    self.assertEmpty(run.steps())
    self.assertIn(f"ConfigError: MaxText {shapes.installed_version()} does not fit", run.log())
    self.assertIn(message, run.log())


def _start_as_one_of_two_tasks() -> None:
  """Sets the variables of a task that `srun` has started."""
  os.environ.update(
      SLURM_JOB_ID="4711",
      SLURM_NTASKS="2",
      SLURM_PROCID="0",
      SLURM_LOCALID="0",
      SLURM_STEP_NODELIST="localhost",
  )


@runs.needs_maxtext
class TasksTest(parameterized.TestCase):

  @parameterized.parameters("train", "dataloader")
  def test_a_task_that_maxtext_does_not_connect_refuses_to_train_alone(self, entry_point):
    directory = self.create_tempdir().full_path
    runs.write_corpus(directory, 40)
    run = runs.start(
        directory,
        "steps=2",
        "per_device_batch_size=4",
        # For this hardware, MaxText connects nothing unless JAX_COORDINATOR_IP is set.
        "hardware=gpu",
        "skip_jax_distributed_system=false",
        entry=adapter.ENTRY_POINTS[entry_point][0],
        edit=_start_as_one_of_two_tasks,
    )
    self.assertEqual(run.exit_codes(), [1])
    self.assertEmpty(run.loaded())
    self.assertIn("ConfigError: This is one of 2 tasks (SlurmCluster), but it is not", run.log())
    self.assertFalse(
        os.path.exists(os.path.join(directory, "run", "checkpoints", lease_places.FILE_NAME))
    )


@runs.needs_maxtext
class CommandTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = pathlib.Path(self.create_tempdir().full_path)
    runs.write_corpus(self.directory, 40)

  def run_command(self, module: list[str], config: str, *args: str) -> str:
    """Loads three batches with MaxText's data loader; returns the output."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            *module,
            "dataloader",
            config,
            *runs.MODEL,
            "skip_jax_distributed_system=true",
            "dataset_type=olmo_grain",
            f"base_output_directory={self.directory}",
            "run_name=run",
            "per_device_batch_size=4",
            "steps=3",
            "enable_checkpointing=false",
            *args,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    self.assertEqual(done.returncode, 0, done.stderr[-3000:])
    self.assertIn("3 batches loaded", done.stdout + done.stderr)
    return done.stdout + done.stderr

  def test_the_module_runs_maxtext_with_its_own_arguments(self):
    index = f"olmo_index_path={self.directory}/index.json"
    self.run_command([_MODULE], "base.yml", index, "grain_worker_count=2")

  @parameterized.parameters([[_MODULE]], [["maxtext_olmo", "maxtext"]])
  def test_credentials_in_urls_are_used_but_not_logged(self, module):
    objects = {
        f"bucket/{path.relative_to(self.directory)}": path.read_bytes()
        for path in (self.directory / "index.json", *(self.directory / "data").iterdir())
    }
    config = self.directory / "mine.yml"
    with object_server.ObjectServer(objects) as server:
      base = f"{server.url.replace('//', '//user:hunter2@')}/bucket"
      signature = "?X-Amz-Credential=AKIASECRETKEY&sig=c2lnbmF0dXJl"
      config.write_text(
          f"base_config: base.yml\nolmo_index_path: {base}/index.json{signature}\n"
          f"olmo_path_remap_from: {self.directory}\n"
      )
      text = self.run_command(
          module,
          str(config),
          f"olmo_path_remap_to={base}{signature}",
          "grain_worker_count=0",
          "--verbosity=0",
      )
      tokens = [i for i, request in enumerate(server.requests) if ".npy" in request[1]]
      self.assertIn("c2lnbmF0dXJl", server.requests[tokens[-1]][1])
      self.assertStartsWith(server.headers[tokens[-1]]["authorization"], "Basic ")
    self.assertIn(f"Config param olmo_index_path: {server.url}/bucket/index.json\n", text)
    self.assertIn(f"Config param olmo_path_remap_to: {server.url}/bucket\n", text)
    for secret in ("hunter2", "AKIASECRETKEY", "c2lnbmF0dXJl"):
      self.assertNotIn(secret, text)


if __name__ == "__main__":
  absltest.main()
