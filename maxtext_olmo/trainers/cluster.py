"""Connects the processes of a run, so that N tasks form one run and never N runs.

The first of these that applies decides:

1.  The coordinator's address and the number of processes, in the config or in
    `JAX_COORDINATOR_ADDRESS` and `JAX_NUM_PROCESSES`.
2.  `num_processes=1`, or `JAX_NUM_PROCESSES=1`: this process trains alone.
3.  A cluster that JAX detects (Slurm, Open MPI, Cloud TPU, Kubernetes) with several tasks.
4.  Environment variables of a launcher that say that this is one of several tasks: an error,
    because each task would train alone, into the same directory.
5.  Otherwise, this process trains alone.
"""

from __future__ import annotations

import os
from typing import Any

import jax
from absl import logging

from maxtext_olmo import errors

# Environment variables with the number of tasks, and those with the number of this task; a shell
# of `salloc` has the first without being a task.
_TASK_COUNTS = {
    "SLURM_NTASKS": "SLURM_PROCID",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
    "JAX_NUM_PROCESSES": "JAX_NUM_PROCESSES",
}


def connect(address: str = "", num_processes: int = 0, process_id: int = -1) -> None:
  """Connects the processes of this run; does nothing if they are already connected.

  Args:
    address: host:port of process 0; by default `JAX_COORDINATOR_ADDRESS`.
    num_processes: The number of processes; 0 uses `JAX_NUM_PROCESSES`.
    process_id: The number of this process; -1 uses `JAX_PROCESS_ID`.

  Raises:
    ConfigError: This is one of several tasks, and it could not connect to the others.
  """
  if jax.distributed.is_initialized():
    return
  address = address or os.environ.get("JAX_COORDINATOR_ADDRESS", "")
  count = num_processes or _number("JAX_NUM_PROCESSES")
  this = process_id if process_id >= 0 else _number("JAX_PROCESS_ID")
  if address and count is not None:
    if count > 1:
      logging.info("one of %d processes: waiting for the others at %s", count, address)
    _initialize(address, count, 0 if count == 1 else this)
    return
  if count == 1:
    return
  found = _detect()
  if found is not None and found[1] > 1:
    logging.info("one of %d tasks (%s): waiting for the others", found[1], found[0])
    _initialize(address or None, count, this)
    return
  for variable, of_task in _TASK_COUNTS.items():
    tasks = _number(variable) or 1
    if tasks > 1 and of_task in os.environ:
      raise errors.ConfigError(
          f"{variable}={tasks}, so this is one of {tasks} tasks, but it is unknown how to reach the"
          " others, and each would train alone. Start the tasks with srun or mpirun; or set"
          " coordinator_address, num_processes and process_id, or JAX_COORDINATOR_ADDRESS,"
          " JAX_NUM_PROCESSES and JAX_PROCESS_ID. To train alone, set num_processes=1 and"
          " process_id=0."
      )
  if address:
    _initialize(address, 1, 0)


def _detect() -> tuple[str, int] | None:
  """Returns the name of the cluster that JAX would join and its number of tasks, if there is one.

  JAX has no public function for that number, and `jax.distributed.initialize` would wait for tasks
  that do not exist.
  """
  try:
    from jax._src import clusters

    kinds = clusters.ClusterEnv._cluster_types
  except (ImportError, AttributeError) as error:
    logging.warning(
        "With JAX %s, the cluster cannot be detected (%s). If the run has several processes, set"
        " coordinator_address, num_processes and process_id.",
        jax.__version__,
        error,
    )
    return None
  for kind in kinds:
    try:
      if not kind.opt_in_only_method and kind.is_env_present():
        return kind.__name__, int(kind.get_process_count())
    except Exception as error:  # JAX reads variables or asks a metadata server, which may fail.
      logging.warning("%s was detected, but its tasks could not be counted: %s", kind, error)
  return None


def _initialize(*args: Any) -> None:
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  # Otherwise JAX would catch SIGTERM and the run would continue, although it should end.
  jax.config.update("jax_enable_preemption_service", False)
  try:
    jax.distributed.initialize(*args)
  except (RuntimeError, ValueError, TypeError) as error:
    raise errors.ConfigError(
        f"This process could not connect to the others of its run, so it stops: {error}. Check"
        " coordinator_address, num_processes and process_id, and that all tasks have started."
    ) from error


def _number(variable: str) -> int | None:
  """Returns the number in an environment variable, or None if it is not set."""
  text = os.environ.get(variable, "").strip()
  if not text:
    return None
  if not text.isdecimal():
    raise errors.ConfigError(f"{variable}={text!r} must be a number of processes.")
  return int(text)
