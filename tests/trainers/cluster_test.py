"""Tests of maxtext_olmo.trainers.cluster: tasks of one job are one run, or none."""

from __future__ import annotations

import os
import pathlib
import signal
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


_CONNECT = """
import sys
import jax
from maxtext_olmo import errors
from maxtext_olmo.trainers import cluster, failure
try:
  cluster.connect(wait_seconds=int(sys.argv[1]))
except errors.ConfigError as error:
  print(error)
  failure.end(str(error), 2)
  sys.exit(2)
failure.watch()
cluster.check_processes()
print(jax.process_index(), "of", jax.process_count(), flush=True)
"""


def _start(variables: dict[str, str], wait_seconds: int = 120) -> subprocess.Popen[str]:
  return subprocess.Popen(
      [sys.executable, "-c", _CONNECT, str(wait_seconds)],
      env=distributed.child_environment(variables),
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
  )


def _explicit(task: int, count: int, port: int) -> dict[str, str]:
  return {
      "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
      "JAX_NUM_PROCESSES": str(count),
      "JAX_PROCESS_ID": str(task),
  }


def _open_mpi(task: int) -> dict[str, str]:
  return {
      "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:34911",
      "OMPI_COMM_WORLD_SIZE": "2",
      "OMPI_COMM_WORLD_RANK": str(task),
      "OMPI_COMM_WORLD_LOCAL_RANK": str(task),
  }


def _tpu_slice(task: int) -> dict[str, str]:
  return {
      "JAX_FORCE_TPU_INIT": "1",  # As if the host had TPUs.
      "TPU_WORKER_HOSTNAMES": "localhost,localhost",
      "TPU_WORKER_ID": str(task),
      "MEGASCALE_COORDINATOR_ADDRESS": "localhost:8080",
      "MEGASCALE_NUM_SLICES": "1",
      "MEGASCALE_SLICE_ID": "0",
  }


def _two_tpu_slices(task: int) -> dict[str, str]:
  return _tpu_slice(0) | {
      "TPU_WORKER_HOSTNAMES": "localhost",
      "MEGASCALE_NUM_SLICES": "2",
      "MEGASCALE_SLICE_ID": str(task),
  }


class ClusterTest(parameterized.TestCase):

  def outcomes(self, tasks: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Returns the exit code and the last line of each task."""
    outputs = [task.communicate()[0] for task in tasks]
    return [(task.returncode, text.splitlines()[-1]) for task, text in zip(tasks, outputs)]

  @parameterized.named_parameters(
      ("slurm", lambda task: _slurm(task, SLURM_STEP_NODELIST="localhost")),
      (
          "slurm_with_several_nodes",
          lambda task: _slurm(task, SLURM_STEP_NODELIST="localhost,b[1-3]"),
      ),
      ("open_mpi", _open_mpi),
      ("tpu_slice", _tpu_slice),
      ("two_tpu_slices", _two_tpu_slices),
  )
  def test_tasks_of_a_cluster_join_into_one_run(self, variables):
    port = {"JAX_COORDINATOR_PORT": str(distributed.free_port())}
    tasks = [_start(variables(task) | port) for task in range(2)]
    self.assertEqual(self.outcomes(tasks), [(0, "0 of 2"), (0, "1 of 2")])

  @parameterized.named_parameters(
      ("nothing_else", lambda task: {}),
      ("slurm", lambda task: _slurm(task, SLURM_STEP_NODELIST="elsewhere", SLURM_NTASKS="4")),
      # As the Job of docs/guides/clusters sets them: the pod may not ask Kubernetes anything.
      (
          "kubernetes",
          lambda task: {
              "KUBERNETES_SERVICE_HOST": "127.0.0.1",
              "KUBERNETES_SERVICE_PORT": "1",
              "JOB_COMPLETION_INDEX": str(task),
          },
      ),
  )
  def test_explicit_addresses_win(self, variables):
    port = distributed.free_port()
    tasks = [_start(variables(task) | _explicit(task, 2, port)) for task in range(2)]
    self.assertEqual(self.outcomes(tasks), [(0, "0 of 2"), (0, "1 of 2")])

  def test_the_number_of_a_process_may_come_from_slurm(self):
    port = distributed.free_port()
    more = {"SLURM_STEP_NODELIST": "elsewhere", "SLURM_NTASKS": "2"}
    tasks = []
    for task in range(2):
      explicit = _explicit(task, 2, port)
      del explicit["JAX_PROCESS_ID"]
      tasks.append(_start(_slurm(task, **more) | explicit))
    self.assertEqual(self.outcomes(tasks), [(0, "0 of 2"), (0, "1 of 2")])

  def test_processes_that_expect_different_numbers_all_refuse(self):
    port = distributed.free_port()
    tasks = [_start(_explicit(0, 2, port)), _start(_explicit(1, 3, port))]
    (code, text), (other_code, other) = self.outcomes(tasks)
    self.assertEqual((code, other_code), (2, 2), (text, other))
    self.assertIn("Process 1 expects a run of 3 processes, but process 0 expects 2", other)
    self.assertIn("Process 1 of 2 failed", text)

  def test_a_process_too_many_is_refused(self):
    port = distributed.free_port()
    first, second = _start(_explicit(0, 2, port)), _start(_explicit(1, 2, port))
    third = _start(_explicit(2, 3, port), wait_seconds=20)
    # JAX aborts it, unless the run has already ended, and nobody answers.
    self.assertIn(self.outcomes([third])[0][0], (-signal.SIGABRT, 1))
    self.assertEqual(self.outcomes([first, second]), [(0, "0 of 2"), (0, "1 of 2")])

  def test_a_process_whose_peers_do_not_come_gives_up(self):
    task = _start(_explicit(0, 2, distributed.free_port()), wait_seconds=10)
    code, text = self.outcomes([task])[0]
    self.assertEqual(code, 1, text)
    self.assertRegex(
        text, "one of 2, .* waiting 10 s .* process 0 answers at .* not all processes have"
    )

  def test_a_process_that_cannot_reach_process_0_says_so(self):
    task = _start(_explicit(1, 2, distributed.free_port()), wait_seconds=18)
    text = task.communicate()[0]
    self.assertEqual(task.returncode, 1, text)
    self.assertRegex(text, "still waiting after 15 s: process 0 does not answer at 127.0.0.1")
    self.assertRegex(text, r"process 0 does not answer at 127.0.0.1:\d+ .*refused")

  def test_a_run_that_is_connected_otherwise_must_have_the_expected_number(self):
    program = (
        "import sys, jax\n"
        "from maxtext_olmo.trainers import cluster\n"
        "jax.distributed.initialize(sys.argv[1], 1, 0)\n"
        "cluster.connect()\n"
        "cluster.connect(num_processes=2, process_id=0)\n"
    )
    done = distributed.run_python(program, f"127.0.0.1:{distributed.free_port()}")
    self.assertIn("num_processes (or JAX_NUM_PROCESSES) is 2, but", done.stderr)
    self.assertIn("has connected 1", done.stderr)

  def test_devices_of_processes_that_are_not_connected_are_an_error(self):
    # Only a TPU slice has them, and its runtime needs TPUs.
    with (
        mock.patch("jax.process_count", return_value=4),
        self.assertRaisesRegex(errors.ConfigError, "devices of 4 processes, but 1 is connected"),
    ):
      cluster.check_processes()
    cluster.check_processes()

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
      ({"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES='two' must be a whole number"),
      ({"JAX_NUM_PROCESSES": "2", "JAX_COORDINATOR_ADDRESS": "localhost:1"}, "could not connect"),
      # Open MPI 5, which JAX does not detect.
      ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"}, "of 2 tasks"),
      ({"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "1"}, "one of 2 tasks"),
      ({"WORLD_SIZE": "8", "RANK": "3", "MASTER_ADDR": "a"}, "WORLD_SIZE=8, so this is one of 8"),
      # A script of sbatch that was not started with srun.
      ({"SLURM_JOB_ID": "4", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, "with srun"),
      ({"JOB_COMPLETION_INDEX": "0"}, "JOB_COMPLETION_INDEX=0, so this is a pod of an indexed"),
      (
          {"JOB_COMPLETION_INDEX": "1", "KUBERNETES_SERVICE_HOST": "127.0.0.1"},
          "the number of pods is unknown",
      ),
      ({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"}, "TPU_WORKER_HOSTNAMES=a,b, so"),
      (
          {"TPU_PROCESS_ADDRESSES": "a:1,b:1", "TPU_WORKER_HOSTNAMES": "localhost"},
          "TPU_PROCESS_ADDRESSES=a:1,b:1, so this is one of 2 tasks",
      ),
      (
          {"TPU_WORKER_HOSTNAMES": "a,b", "MEGASCALE_NUM_SLICES": "3"},
          "TPU_WORKER_HOSTNAMES=a,b and MEGASCALE_NUM_SLICES=3, so this is one of 6 tasks",
      ),
      ({"MEGASCALE_NUM_SLICES": "2"}, "MEGASCALE_NUM_SLICES=2, so this is one of 2"),
      (
          {**_slurm(0), "SLURM_STEP_NODELIST": "localhost", "JAX_NUM_PROCESSES": "3"},
          "is 3, but this is one of 2 tasks .SlurmCluster.",
      ),
      (
          {**_slurm(0), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "many"},
          "a task of a cluster .SlurmCluster., but the tasks could not be counted",
      ),
      ({"JAX_COORDINATOR_ADDRESS": "localhost:1"}, "the number of processes is unknown"),
      ({"JAX_PROCESS_ID": "1"}, "process_id .or JAX_PROCESS_ID. is 1, but the number of"),
      ({"JAX_PROCESS_ID": "1", "JAX_NUM_PROCESSES": "1"}, "process 1, but the run has 1 process,"),
      ({"JAX_PROCESS_ID": "2", "JAX_NUM_PROCESSES": "2"}, "process 2, but the run has 2 processes"),
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
      ({"JOB_COMPLETION_INDEX": "1", "JAX_NUM_PROCESSES": "1"},),
      ({"KUBERNETES_SERVICE_HOST": "127.0.0.1"},),  # A pod that is no task of a Job.
      ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"},),
      ({"WORLD_SIZE": "1", "RANK": "0"},),
  )
  def test_a_single_task_trains_alone(self, variables: dict[str, str]):
    with mock.patch.dict(os.environ, variables):
      cluster.connect()
    self.assertFalse(jax.distributed.is_initialized())

  @parameterized.parameters(
      (_slurm(0, SLURM_STEP_NODELIST="localhost"), "one of 2 tasks .SlurmCluster., but it is not"),
      (_slurm(0), "SLURM_NTASKS=2, so this is one of 2 tasks"),
      ({"JOB_COMPLETION_INDEX": "0"}, "the number of pods is unknown"),
      ({"JAX_COORDINATOR_ADDRESS": "localhost:1"}, "the number of processes is unknown"),
      (_slurm(0, SLURM_STEP_NODELIST="localhost", SLURM_NTASKS="x"), "could not be counted"),
  )
  def test_a_task_that_its_trainer_has_not_connected_is_an_error(
      self, variables: dict[str, str], text: str
  ):
    with mock.patch.dict(os.environ, variables):
      with self.assertRaisesRegex(errors.ConfigError, f"{text}.*call the launcher"):
        cluster.check_not_alone("call the launcher.")
      # The runtime of a TPU slice, which needs TPUs, connects its hosts.
      with mock.patch("jax.process_count", return_value=2):
        cluster.check_not_alone("call the launcher.")
      with mock.patch.dict(os.environ, JAX_NUM_PROCESSES="1"):
        cluster.check_not_alone("call the launcher.")

  def test_a_trainer_that_is_the_only_task_may_be_alone(self):
    cluster.check_not_alone("call the launcher.")
    only = _slurm(0, SLURM_NTASKS="1", SLURM_STEP_NODELIST="localhost")
    with mock.patch.dict(os.environ, only):
      cluster.check_not_alone("call the launcher.")

  def test_a_task_may_be_told_to_train_alone(self):
    with mock.patch.dict(os.environ, _slurm(1)):
      cluster.connect(num_processes=1, process_id=0)
    self.assertFalse(jax.distributed.is_initialized())


if __name__ == "__main__":
  absltest.main()
