"""Tests of maxtext_olmo.trainers.tiny.checkpoints."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from maxtext_olmo import errors
from maxtext_olmo.loader import resume
from maxtext_olmo.trainers.tiny import checkpoints as checkpoints_lib
from maxtext_olmo.trainers.tiny import report as report_lib
from tests import distributed

STARTS_PROCESSES = True


def setUpModule():
  jax.config.update("jax_num_cpu_devices", 2)


def _state(value: float) -> dict[str, Any]:
  return {"params": {"w": jnp.full((4, 2), value)}, "step": jnp.int32(value)}


def _abstract(state: Any) -> Any:
  return jax.eval_shape(lambda: state)


def _damage(path: pathlib.Path, how: str) -> None:
  if how == "delete":
    path.unlink()
  else:
    os.truncate(path, path.stat().st_size // 2)


class CheckpointsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)

  def save(self, *steps: int, **kwargs: Any) -> None:
    with checkpoints_lib.Checkpoints(self.dir, **kwargs) as checkpoints:
      for step in steps:
        checkpoints.save(step, _state(step), {"position": 10 * step})

  @parameterized.parameters(True, False)
  def test_what_is_saved_is_restored(self, asynchronous: bool):
    self.save(3, 7, asynchronous=asynchronous)
    with checkpoints_lib.Checkpoints(self.dir) as checkpoints:
      self.assertEqual(checkpoints.latest, 7)
      state, data = checkpoints.restore(7, _abstract(_state(0)))
    np.testing.assert_array_equal(state["params"]["w"], np.full((4, 2), 7.0))
    self.assertEqual(state["step"], 7)
    self.assertEqual(data, {"position": 70})
    self.assertEqual(json.loads((self.dir / "7" / "data" / "metadata").read_text()), data)

  def test_a_state_is_restored_onto_another_mesh(self):
    self.save(1)
    mesh = jax.make_mesh((2,), ("fsdp",))
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype,
            sharding=NamedSharding(mesh, PartitionSpec("fsdp") if leaf.ndim else PartitionSpec()),
        ),
        _abstract(_state(0)),
    )
    with checkpoints_lib.Checkpoints(self.dir) as checkpoints:
      state, _ = checkpoints.restore(1, abstract)
    self.assertEqual(state["params"]["w"].addressable_shards[0].data.shape, (2, 2))

  def test_only_the_newest_are_kept(self):
    self.save(1, 2, 3, 4, max_to_keep=2)
    self.assertCountEqual([path.name for path in self.dir.iterdir()], ["3", "4"])

  def test_a_step_is_due_when_a_period_is_full(self):
    with checkpoints_lib.Checkpoints(self.dir, period=3) as checkpoints:
      self.assertEqual([s for s in range(9) if checkpoints.is_due(s)], [2, 5, 8])

  def test_the_same_step_is_saved_once(self):
    self.save(5, 5)
    self.save(5)
    self.assertEqual(resume.latest_committed_step(self.dir), 5)

  def test_without_checkpoints_there_is_no_latest(self):
    self.assertIsNone(resume.latest_committed_step(self.dir))
    self.assertIsNone(resume.latest_committed_step(self.dir / "nowhere"))

  def test_uncommitted_checkpoints_are_ignored_and_moved_aside(self):
    self.save(5)
    (self.dir / "6").mkdir()  # empty
    (self.dir / "7").mkdir()  # begun, never committed
    (self.dir / "7" / "_CHECKPOINT_METADATA").write_text('{"commit_timestamp_nsecs": null}')
    (self.dir / "8").mkdir()  # cut off in the middle of a copy
    (self.dir / "8" / "_CHECKPOINT_METADATA").write_text('{"item_hand')
    (self.dir / "99.orbax-checkpoint-tmp").mkdir()
    (self.dir / "notes").mkdir()
    self.assertEqual(resume.latest_committed_step(self.dir), 5)
    with (
        self.assertLogs("absl", "WARNING") as logs,
        checkpoints_lib.Checkpoints(self.dir) as checkpoints,
    ):
      self.assertEqual(checkpoints.latest, 5)
      for step in (6, 7, 8, 9):
        checkpoints.save(step, _state(step), {})
    self.assertIn("6 is not a committed checkpoint; moved it to 6.uncommitted", str(logs.output))
    self.assertEqual(resume.latest_committed_step(self.dir), 9)
    self.assertTrue((self.dir / "7.uncommitted" / "_CHECKPOINT_METADATA").exists())
    self.assertTrue((self.dir / "notes").exists())
    self.assertFalse((self.dir / "99.orbax-checkpoint-tmp").exists())

  @parameterized.parameters(True, False)
  def test_a_full_disk_is_an_error_that_leaves_the_earlier_checkpoints(self, asynchronous: bool):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", self.dir],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
      self.skipTest("A file system of its own needs root.")
    self.addCleanup(subprocess.run, ["umount", "-l", self.dir], check=True)
    (self.dir / "²").mkdir()  # A digit, but not a step.
    small = {"params": {"w": jnp.zeros(10)}}
    large = {"params": {"w": jnp.asarray(np.random.default_rng(0).random((600, 600)))}}
    error = r"could not be written to checkpoint_dir=.* bytes are free\).*No space"
    with (
        self.assertRaisesRegex(errors.WriteError, error),
        checkpoints_lib.Checkpoints(self.dir, asynchronous=asynchronous) as checkpoints,
    ):
      checkpoints.save(1, small, {})
      checkpoints.save(2, large, {})
    self.assertCountEqual(os.listdir(self.dir), ["1", "²"])
    with checkpoints_lib.Checkpoints(self.dir) as checkpoints:
      self.assertEqual(checkpoints.latest, 1)
    report = report_lib.Report(str(self.dir / "metrics"), 0, 10**9, enabled=True)
    self.addCleanup(report.close)
    with self.assertRaisesRegex(errors.WriteError, "metrics: No space left.* of free space"):
      for step in range(100_000):
        report.step(step, {"loss": 1.0}, tokens=1, last=False)

  def test_a_checkpoint_of_another_trainer_is_refused(self):
    self.save(2)
    (self.dir / "2" / "data").rename(self.dir / "2" / "iter")
    with (
        checkpoints_lib.Checkpoints(self.dir) as checkpoints,
        self.assertRaisesRegex(
            errors.ResumeError, "no item 'data': it was lost, or another trainer"
        ),
    ):
      checkpoints.restore(2, _abstract(_state(0)))

  @parameterized.parameters("²", "٣")
  def test_a_name_of_other_digits_is_not_a_checkpoint(self, name: str):
    (self.dir / name).mkdir()
    self.save(3)
    self.assertTrue((self.dir / name).exists())
    with checkpoints_lib.Checkpoints(self.dir) as checkpoints:
      self.assertEqual(checkpoints.latest, 3)

  @parameterized.parameters("a_file", "a_file/below", "/proc/checkpoints")
  def test_a_directory_that_cannot_be_written_is_a_config_error(self, name: str):
    (self.dir / "a_file").write_text("")
    with self.assertRaisesRegex(errors.ConfigError, "checkpoint_dir=.* cannot be written"):
      checkpoints_lib.Checkpoints(self.dir / name)

  @parameterized.parameters("delete", "cut")
  def test_a_damaged_model_is_named_with_the_checkpoint_to_use_instead(self, how: str):
    large = {"params": {"w": jax.random.normal(jax.random.key(0), (64, 64))}, "step": jnp.int32(0)}
    with checkpoints_lib.Checkpoints(self.dir, asynchronous=False) as checkpoints:
      for step in (1, 2, 3):
        checkpoints.save(step, large, {})
    model = self.dir / "3" / "state"
    _damage(max(model.glob("ocdbt.*/d/*"), key=lambda path: path.stat().st_size), how)
    _damage(self.dir / "2" / "state" / "manifest.ocdbt", how)
    for step, name in ((3, "state/ocdbt.process_0/d/[0-9a-f]+"), (2, "state/manifest.ocdbt")):
      with (
          checkpoints_lib.Checkpoints(self.dir) as checkpoints,
          self.assertRaisesRegex(errors.ResumeError, f"{step}/{name}(.|\n)*checkpoint 1 is intact"),
      ):
        checkpoints.restore(step, _abstract(large))
    _damage(model / "_METADATA", how)
    with (
        checkpoints_lib.Checkpoints(self.dir) as checkpoints,
        self.assertRaisesRegex(errors.ResumeError, "3/state/_METADATA"),
    ):
      checkpoints.restore(3, _abstract(large))

  @parameterized.parameters("delete", "cut")
  def test_a_damaged_data_state_is_named(self, how: str):
    self.save(2)
    _damage(self.dir / "2" / "data" / "metadata", how)
    with (
        checkpoints_lib.Checkpoints(self.dir) as checkpoints,
        self.assertRaisesRegex(errors.ResumeError, "The data state .*2/data/metadata"),
    ):
      checkpoints.restore(2, _abstract(_state(0)))

  def test_other_shapes_are_refused_by_name(self):
    self.save(2)
    other = {"params": {"w": jnp.zeros((4, 3)), "v": jnp.zeros(1)}, "step": jnp.int32(0)}
    with (
        checkpoints_lib.Checkpoints(self.dir) as checkpoints,
        self.assertRaisesRegex(
            errors.ResumeError,
            r"v: the checkpoint has none, the config makes \(1,\)\n"
            r"  w: the checkpoint has \(4, 2\), the config makes \(4, 3\)",
        ),
    ):
      checkpoints.restore(2, _abstract(other))


class SharedDirectoryTest(absltest.TestCase):

  def test_processes_that_do_not_share_a_directory_are_told_before_training(self):
    directories = [self.create_tempdir().full_path for _ in range(2)]
    with self.assertRaises(distributed.DistributedError) as caught:
      distributed.run("tests.trainers.tiny.checkpoints_cases:open_directories", args=(directories,))
    self.assertLen(caught.exception.failures, 2)
    texts = [str(failure.error) for failure in caught.exception.failures]
    self.assertIn("Process 1 of 2 failed while looking into checkpoint_dir", texts[0])
    self.assertIn("is not the directory that process 0 writes to", texts[1])

  def test_processes_that_share_a_directory_continue_and_leave_no_file(self):
    directory = self.create_tempdir().full_path
    found = distributed.run(
        "tests.trainers.tiny.checkpoints_cases:open_directories", args=([directory] * 2,)
    )
    self.assertEqual(found, [None, None])
    self.assertEmpty([name for name in os.listdir(directory) if name.startswith(".shared")])


if __name__ == "__main__":
  absltest.main()
