"""Connects the processes of a run, so that N tasks form one run and never N runs.

The first case that applies is used:

1.  The coordinator's address and the number of processes, in the config or in
    `JAX_COORDINATOR_ADDRESS` and `JAX_NUM_PROCESSES`.
2.  `num_processes=1`, or `JAX_NUM_PROCESSES=1`: this process trains alone.
3.  A cluster that JAX detects (Slurm, Open MPI, Cloud TPU, GKE, Kubernetes) with several tasks.
4.  Environment variables that show that this is one of several tasks, or may be: an error, because
    each task would train alone and write to the same directory.
5.  Otherwise, this process trains alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from absl import logging

from maxtext_olmo import errors
from maxtext_olmo.trainers import rendezvous

WAIT_SECONDS = 300  # For the other processes, at the start.
# JAX aborts the process if the others do not connect; this module ends it first, with a reason.
_JAX_WAITS_LONGER = 60
_PROCESSES = "maxtext_olmo/processes"

# Maps the environment variable with the number of tasks to the variable that is set only in a task;
# a shell of `salloc` has the first variable but is not a task.
_TASK_COUNTS = {
    "SLURM_NTASKS": "SLURM_PROCID",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
    "MV2_COMM_WORLD_SIZE": "MV2_COMM_WORLD_RANK",
    "WORLD_SIZE": "RANK",
    "JAX_NUM_PROCESSES": "JAX_NUM_PROCESSES",
}
# Kubernetes sets this variable in the pods of an indexed Job, but none with the number of pods.
_KUBERNETES_TASK = "JOB_COMPLETION_INDEX"
# With these, JAX gives each task of a host its own GPU, even if the addresses are explicit.
_LOCAL_TASKS = ("SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")

_REMEDY = (
    "set coordinator_address, num_processes and process_id, or JAX_COORDINATOR_ADDRESS,"
    " JAX_NUM_PROCESSES and JAX_PROCESS_ID. To train alone, set num_processes=1 and process_id=0,"
    " or JAX_NUM_PROCESSES=1."
)


class Coordinator(NamedTuple):
  """The key-value store of the processes of a run, and the place of this process among them."""

  client: Any
  process: int
  processes: int


def coordinator() -> Coordinator | None:
  """Returns the coordinator of this run's processes; None if this is the only process."""
  from jax._src import distributed  # JAX has no public access to its key-value store.

  state = distributed.global_state
  if state.client is None or state.num_processes < 2:
    return None
  return Coordinator(state.client, state.process_id, state.num_processes)


def _address() -> str:
  """Returns the host:port of process 0 that JAX uses; empty if JAX has none yet."""
  from jax._src import distributed

  return distributed.global_state.coordinator_address or ""


def connect(
    address: str = "",
    num_processes: int = 0,
    process_id: int = -1,
    *,
    wait_seconds: int = WAIT_SECONDS,
    give_up: Callable[[errors.ConfigError], None] | None = None,
) -> None:
  """Connects the processes of this run; if they are already connected, only checks their number.

  If the others do not connect in time, the process ends: JAX cannot stop waiting for them.

  Args:
    address: host:port of process 0; by default `JAX_COORDINATOR_ADDRESS`.
    num_processes: The number of processes; 0 uses `JAX_NUM_PROCESSES`.
    process_id: The number of this process; -1 uses `JAX_PROCESS_ID`.
    wait_seconds: How long to wait for the other processes.
    give_up: Called, in a thread, if the others do not connect in time, before the process ends with
      code 1; by default, logs the error.

  Raises:
    ConfigError: This is one of several tasks, or may be, and it could not connect to the others; or
      the processes do not agree on their number.
  """
  address = address or os.environ.get("JAX_COORDINATOR_ADDRESS", "")
  count = num_processes or _number("JAX_NUM_PROCESSES")
  this = process_id if process_id >= 0 else _number("JAX_PROCESS_ID")
  if jax.distributed.is_initialized():
    _check_connected(count)
    return
  if count is not None and this is not None and this >= count:
    raise errors.ConfigError(
        f"This is process {this}, but the run has {count} process{'es' if count > 1 else ''},"
        f" numbered from 0. To fix this, {_REMEDY}"
    )
  if address and count is not None:
    rendezvous.check_address(address, is_ours=this == 0 or count == 1)
    if count > 1:
      logging.info("one of %d processes: waiting for the others at %s", count, address)
    with rendezvous.limit(count, wait_seconds, _address, give_up):
      _initialize(address, count, 0 if count == 1 else this, wait_seconds)
    return
  if count == 1:
    return
  found = _detect()
  if found is None:
    _refuse_if_one_of_several(address, this)
    return
  name, tasks = found
  if count not in (None, tasks):
    raise errors.ConfigError(
        f"num_processes (or JAX_NUM_PROCESSES) is {count}, but this is one of {tasks} tasks"
        f" ({name}). Let the cluster set the number of processes; or {_REMEDY}"
    )
  if tasks > 1:
    logging.info("one of %d tasks (%s): waiting for the others", tasks, name)
    with rendezvous.limit(tasks, wait_seconds, _address, give_up):
      _initialize(address or None, tasks, this, wait_seconds)


def check_processes(remedy: str = _REMEDY) -> None:
  """Raises ConfigError unless JAX's devices belong to the processes that `connect` connected.

  The TPU runtime finds all hosts of a slice by itself, even those that were told to train alone.

  Args:
    remedy: How to connect the processes, for the error message.
  """
  found, connected = jax.process_count(), coordinator()
  expected = 1 if connected is None else connected.processes
  if found != expected:
    raise errors.ConfigError(
        f"JAX sees devices of {found} process{'es' if found > 1 else ''}, but {expected}"
        f" {'is' if expected == 1 else 'are'} connected. Start all processes of the run in the same"
        f" way; or {remedy}"
    )


def check_not_alone(remedy: str) -> None:
  """Checks the processes of a trainer that connects them itself, as MaxText does.

  Args:
    remedy: How to connect the processes of that trainer, for the error message.

  Raises:
    ConfigError: This process would train alone, but is one of several tasks, or may be; or JAX's
      devices do not belong to the connected processes.
  """
  if coordinator() is not None:
    check_processes(remedy)
    return
  # The TPU runtime connects the hosts of a slice even if `jax.distributed` does not.
  if jax.distributed.is_initialized() or jax.process_count() > 1:
    return
  if _number("JAX_NUM_PROCESSES") == 1:
    return
  found = _detect(remedy)
  if found is None:
    address = os.environ.get("JAX_COORDINATOR_ADDRESS", "")
    _refuse_if_one_of_several(address, _number("JAX_PROCESS_ID"), remedy)
  elif found[1] > 1:
    raise errors.ConfigError(
        f"This is one of {found[1]} tasks ({found[0]}), but it is not connected to the others, and"
        f" each would train alone. To fix this, {remedy}"
    )


def _check_connected(count: int | None) -> None:
  connected = coordinator()
  found = 1 if connected is None else connected.processes
  if count not in (None, found):
    raise errors.ConfigError(
        f"num_processes (or JAX_NUM_PROCESSES) is {count}, but jax.distributed.initialize has"
        f" connected {found}. Set the number of processes in one place."
    )


def _refuse_if_one_of_several(address: str, this: int | None, remedy: str = _REMEDY) -> None:
  """Raises ConfigError if the environment says that this is one of several tasks."""
  for where, tasks in _tasks_of_environment():
    if tasks > 1:
      raise errors.ConfigError(
          f"{where}, so this is one of {tasks} tasks, but it cannot tell how to reach the others,"
          f" and each would train alone. Start the tasks with srun or mpirun; or {remedy}"
      )
  if _KUBERNETES_TASK in os.environ:
    raise errors.ConfigError(
        f"{_KUBERNETES_TASK}={os.environ[_KUBERNETES_TASK]}, so this is a pod of an indexed"
        " Kubernetes Job, but the number of pods is unknown, and each would train alone. Install"
        " jax[k8s] and give the pod's service account the right to read pods, jobs and services; or"
        f" {remedy}"
    )
  for name, value in (
      ("coordinator_address (or JAX_COORDINATOR_ADDRESS)", address or None),
      ("process_id (or JAX_PROCESS_ID)", this),
  ):
    if value is not None:
      raise errors.ConfigError(
          f"{name} is {value}, but the number of processes is unknown, and this process would train"
          f" alone. To fix this, {remedy}"
      )


def _tasks_of_environment() -> Iterator[tuple[str, int]]:
  """Yields each number of tasks that the environment names, with the variable that names it."""
  for variable, of_task in _TASK_COUNTS.items():
    tasks = _number(variable)
    if tasks is not None and of_task in os.environ:
      yield f"{variable}={tasks}", tasks
  slices = _number("MEGASCALE_NUM_SLICES") or 1
  names = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")
  name, hosts = next(((n, os.environ[n]) for n in names if n in os.environ), ("", ""))
  where = f"{name}={hosts}" if hosts else ""
  if slices > 1:
    where += f"{' and ' if where else ''}MEGASCALE_NUM_SLICES={slices}"
  yield where, slices * len(hosts.split(","))


def _detect(remedy: str = _REMEDY) -> tuple[str, int] | None:
  """Returns the name of the cluster that JAX would join and its number of tasks, if there is one.

  JAX has no public function that counts tasks, and `jax.distributed.initialize` would wait for
  tasks that do not exist.

  Raises:
    ConfigError: There is a cluster, but its tasks cannot be counted.
  """
  try:
    from jax._src import clusters

    kinds = clusters.ClusterEnv._cluster_types
  except (ImportError, AttributeError) as error:
    logging.warning(
        "With JAX %s, the cluster cannot be detected (%s). If the run has several processes, %s",
        jax.__version__,
        error,
        remedy,
    )
    return None
  for kind in kinds:
    if kind.opt_in_only_method:
      continue
    try:
      if kind.is_env_present():
        return kind.__name__, int(kind.get_process_count())
    except Exception as error:  # JAX reads variables, or asks a metadata server or Kubernetes.
      if "KUBERNETES_SERVICE_HOST" in os.environ and _KUBERNETES_TASK not in os.environ:
        # Most pods are not tasks of a Job, and have no permission to query Kubernetes.
        logging.info("Kubernetes does not say whether this pod belongs to a Job: %s", error)
        continue
      raise errors.ConfigError(
          f"This is a task of a cluster ({kind.__name__}), but the tasks could not be counted:"
          f" {type(error).__name__}: {error}. To fix this, {remedy}"
      ) from error
  return None


def _initialize(
    address: str | None, count: int | None, this: int | None, wait_seconds: int
) -> None:
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  # JAX's own service would catch SIGTERM even when no training loop polls it (see `preemption`).
  jax.config.update("jax_enable_preemption_service", False)
  explicit = None not in (address, count, this)
  local = any(name in os.environ for name in _LOCAL_TASKS)
  try:
    jax.distributed.initialize(
        address,
        count,
        this,
        # Otherwise JAX would still ask Kubernetes or a metadata server, which may not answer.
        cluster_detection_method="deactivate" if explicit and not local else None,
        initialization_timeout=wait_seconds + _JAX_WAITS_LONGER,
    )
    _check_agreement(wait_seconds)
  except errors.ConfigError:
    raise
  except Exception as error:  # JAX raises many types, among them those of Kubernetes' client.
    raise errors.ConfigError(
        f"This process could not connect to the other processes of its run, so it stops: {error}."
        " Check coordinator_address, num_processes and process_id, and that all tasks have started."
    ) from error


def _check_agreement(wait_seconds: int) -> None:
  """Raises ConfigError if this process and process 0 expect different numbers of processes."""
  run = coordinator()
  if run is None:
    return
  if run.process == 0:
    run.client.key_value_set(_PROCESSES, str(run.processes))
    return
  expected = int(run.client.blocking_key_value_get(_PROCESSES, 1000 * wait_seconds))
  if expected != run.processes:
    from jax._src import distributed

    distributed.global_state.num_processes = expected  # So that `failure` waits for this many.
    raise errors.ConfigError(
        f"Process {run.process} expects a run of {run.processes} processes, but process 0 expects"
        f" {expected}. Give all processes the same num_processes."
    )


def _number(variable: str) -> int | None:
  """Returns the number in an environment variable, or None if it is not set."""
  text = os.environ.get(variable, "").strip()
  if not text:
    return None
  if not text.isdecimal():
    raise errors.ConfigError(f"{variable}={text!r} must be a whole number.")
  return int(text)
