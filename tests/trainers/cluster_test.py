"""Tests of maxtext_olmo.trainers.cluster: tasks of one job are one run, or none."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from unittest import mock

import jax
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.trainers import cluster
from tests import distributed
from tests.trainers import launched

STARTS_PROCESSES = True


def _slurm(task: int, **more: str) -> dict[str, str]:
  return {
      "SLURM_JOB_ID": "4711",
      "SLURM_NTASKS": "2",
      "SLURM_PROCID": str(task),
      "SLURM_LOCALID": str(task),
      **more,
  }


class ClusterTest(parameterized.TestCase):

  def test_tasks_of_slurm_join_into_one_run(self):
    port = str(distributed.free_port())
    more = {"SLURM_STEP_NODELIST": "localhost", "JAX_COORDINATOR_PORT": port}
    code = (
        "import jax; from maxtext_olmo.trainers import cluster; cluster.connect()\n"
        "print(jax.process_index(), 'of', jax.process_count())"
    )
    tasks = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=distributed.child_environment(_slurm(task, **more)),
            stdout=subprocess.PIPE,
            text=True,
        )
        for task in range(2)
    ]
    lines = [task.communicate()[0].splitlines()[-1] for task in tasks]
    self.assertEqual(lines, ["0 of 2", "1 of 2"])

  def test_a_jax_without_its_private_list_of_clusters_gives_a_warning_and_no_run_alone(self):
    self.enter_context(mock.patch("jax._src.clusters.ClusterEnv", object()))
    self.enter_context(mock.patch.dict(os.environ, _slurm(0)))
    with self.assertLogs(level="WARNING") as logs, self.assertRaises(errors.ConfigError):
      cluster.connect()
    self.assertIn("cluster cannot be detected", str(logs.output))

  def test_trainers_that_cannot_reach_each_other_refuse_to_train_alone(self):
    checkpoints = pathlib.Path(self.create_tempdir().full_path) / "checkpoints"
    flags = launched.flags(steps=3, checkpoint_dir=str(checkpoints))
    tasks = [launched.start(self, flags, _slurm(task)) for task in range(2)]
    outputs = [task.communicate()[1] for task in tasks]
    self.assertEqual([task.returncode for task in tasks], [2, 2], outputs)
    for output in outputs:
      self.assertIn("ConfigError: SLURM_NTASKS=2, so this is one of 2 tasks", output)
    self.assertFalse(checkpoints.exists())

  @parameterized.parameters(
      ({"JAX_NUM_PROCESSES": "2"}, "JAX_NUM_PROCESSES=2, so this is one of 2 tasks"),
      ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}, "one of 4 tasks"),
      ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "one of 2 tasks"),
      ({**_slurm(0), "JAX_COORDINATOR_ADDRESS": "localhost:1"}, "one of 2 tasks"),
      ({"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES='two' must be a number"),
      ({"JAX_NUM_PROCESSES": "2", "JAX_COORDINATOR_ADDRESS": "localhost:1"}, "could not connect"),
  )
  def test_a_task_without_the_others_is_an_error(self, variables: dict[str, str], text: str):
    with mock.patch.dict(os.environ, variables), self.assertRaisesRegex(errors.ConfigError, text):
      cluster.connect()
    self.assertFalse(jax.distributed.is_initialized())

  @parameterized.parameters(
      ({},),
      ({"SLURM_NTASKS": "2"},),  # A shell of salloc.
      (_slurm(0) | {"SLURM_NTASKS": "1", "SLURM_STEP_NODELIST": "localhost"},),
      (_slurm(1) | {"JAX_NUM_PROCESSES": "1"},),
  )
  def test_a_single_task_trains_alone(self, variables: dict[str, str]):
    with mock.patch.dict(os.environ, variables):
      cluster.connect()
    self.assertFalse(jax.distributed.is_initialized())

  def test_a_task_may_be_told_to_train_alone(self):
    with mock.patch.dict(os.environ, _slurm(1)):
      cluster.connect(num_processes=1, process_id=0)
    self.assertFalse(jax.distributed.is_initialized())


if __name__ == "__main__":
  absltest.main()
